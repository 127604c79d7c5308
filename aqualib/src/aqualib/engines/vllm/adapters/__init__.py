"""One module per supported minor version of vLLM; any other is refused."""

from __future__ import annotations

import importlib
import re
from typing import Final

from aqua_protocol import ConfigError
from aqualib.engines.vllm.adapters.base import Adapter

SUPPORTED: Final = ("0.28", "0.30", "0.31", "0.32")


def adapter_for(version: str) -> Adapter:
    """The adapter for a version of vLLM, such as `0.32.0` or `0.32.0.dev1+cpu`.

    Raises:
        ConfigError: Nobody has tried this version with Aqua.
    """
    found = re.match(r"(\d+\.\d+)(?:\.|$)", version)
    minor = found.group(1) if found else version
    if minor not in SUPPORTED:
        raise ConfigError(
            f"vLLM {version} is not supported",
            remedy=f"Install vLLM {', '.join(SUPPORTED)}, or a newer aqualib.",
        )
    module = importlib.import_module(f"{__name__}.v{minor.replace('.', '_')}")
    adapter: Adapter = module.ADAPTER
    return adapter
