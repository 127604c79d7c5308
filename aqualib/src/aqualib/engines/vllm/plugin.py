"""Makes `AquaConnector` a name that vLLM knows; called by vLLM in each of its processes.

An entry point of the group `vllm.general_plugins`, so it runs in engines that do not use Aqua as
well, several times: it imports nothing heavy, changes nothing, and is harmless when repeated.
"""

from __future__ import annotations

from typing import Final

CONNECTOR: Final = "AquaConnector"
MODULE: Final = "aqualib.engines.vllm.connector"


def register() -> None:
    """Register the connector, unless it is."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    except ValueError:
        return  # vLLM's word for "is registered already".
