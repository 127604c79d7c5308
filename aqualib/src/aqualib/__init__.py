"""Aqua: idle memory of other GPUs for the state of your engine, taken back whenever they need it.

    import aqualib

    with aqualib.connect(coordinator_url="http://127.0.0.1:7700") as aqua:
        kv = aqualib.offload(tensor)                      # on a peer if one lends, else in DRAM
        kv.load(out=tensor)

        blocks = aqualib.block_store(block_bytes=2 << 20, capacity_blocks=1024)
        slots, transfer = blocks.page_out(kv_cache, index)
        transfer.wait()

        aqualib.step()                                    # once per iteration; under 1 us

    with aqualib.open_producer(model="sdxl") as producer:  # the other side, in another process
        producer.offer(8 << 30)                            # by hand, or by the engine's load and
        with aqualib.Informer(producer, engine):           # what the books have of its profile:
            serve()

An `engine` is a `LoadSource`: it answers `load()` with an `ObservedLoad` (or the `LoadReport` that
it extends), gives memory up by `shrink` and takes it again by `grow`. What `step` returns tells a
consumer of memory that came and went.

`connect` gives an independent instance; the first one is also the default that the functions here
use (see `aqualib.connection`). Errors are those of `aqua_protocol`, each with a next step.

Importing this package loads none of it: names are resolved when they are first used, so a program
that only might use Aqua pays nothing, and one without torch is told which extra to install.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from aqua_protocol import (
        AquaError,
        CapacityError,
        ChecksumMismatchError,
        ConfigError,
        DataLostError,
        LeaseLostError,
        TransportError,
        TransportKind,
    )
    from aqua_protocol.members import LoadReport
    from aqualib.blocks import BlockStore, PagedOut
    from aqualib.connection import (
        block_store,
        connect,
        default,
        empty,
        offload,
        open_producer,
        step,
    )
    from aqualib.consumer import Aqua, StepChanges
    from aqualib.memory.transfers import Transfer
    from aqualib.metrics import Stats
    from aqualib.producer.escalation import Escalation
    from aqualib.producer.informer import Informer, LoadSource
    from aqualib.producer.offer_rule import ObservedLoad
    from aqualib.producer.producer import Producer
    from aqualib.producer.profile import Profile
    from aqualib.tensor import AquaTensor, Location

    __version__: str

__all__ = [
    "Aqua",
    "AquaError",
    "AquaTensor",
    "BlockStore",
    "CapacityError",
    "ChecksumMismatchError",
    "ConfigError",
    "DataLostError",
    "Escalation",
    "Informer",
    "LeaseLostError",
    "LoadReport",
    "LoadSource",
    "Location",
    "ObservedLoad",
    "PagedOut",
    "Producer",
    "Profile",
    "Stats",
    "StepChanges",
    "Transfer",
    "TransportError",
    "TransportKind",
    "__version__",
    "block_store",
    "connect",
    "default",
    "empty",
    "offload",
    "open_producer",
    "step",
]

_HOMES: Final = ("aqua_protocol", "aqua_protocol.members", "aqualib.metrics", "aqualib.version")
"""Modules that have the names above and do without torch, in the order in which they are asked."""

_HOMES_WITH_TORCH: Final = (
    "aqualib.connection",
    "aqualib.consumer",
    "aqualib.tensor",
    "aqualib.blocks",
    "aqualib.memory.transfers",
    "aqualib.producer.escalation",
    "aqualib.producer.informer",
    "aqualib.producer.offer_rule",
    "aqualib.producer.producer",
    "aqualib.producer.profile",
)


def __getattr__(name: str) -> Any:  # noqa: ANN401 - whatever the name stands for
    if name in __all__:
        wanted = "AQUALIB_VERSION" if name == "__version__" else name
        for home in (*_HOMES, *_HOMES_WITH_TORCH):
            if home == _HOMES_WITH_TORCH[0]:
                _require_torch()
            module = importlib.import_module(home)
            if wanted in vars(module):
                value = globals()[name] = vars(module)[wanted]  # `step` is on a hot path.
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        from aqua_protocol import ConfigError

        raise ConfigError(
            "aqualib moves torch tensors, and torch is not installed",
            remedy="Install the build of torch that fits this machine, or `aqualib[torch]`.",
        )
