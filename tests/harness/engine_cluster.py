"""The cluster beside one engine: a coordinator, a producer that lends, and the way to join."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from aqua_protocol import MIB
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.lender_process import LenderProcess

if TYPE_CHECKING:
    from collections.abc import Iterator

SLAB: Final = MIB
SLABS: Final = 24
"""What the producer offers."""
WANTED: Final = 16 * SLAB
"""What the engine asks for."""


class EngineCluster(NamedTuple):
    """A real coordinator, a real producer, and the environment of a consumer of theirs."""

    coordinator: CoordinatorProcess
    lender: LenderProcess
    environment: dict[str, str]


@contextlib.contextmanager
def engine_cluster() -> Iterator[EngineCluster]:
    """Both run, and the producer has offered."""
    with contextlib.ExitStack() as stack:
        coordinator = stack.enter_context(CoordinatorProcess(stack.enter_context(data_dir())))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="aqua-", dir="/tmp"))
        socket = Path(folder) / "lender.sock"
        lender = LenderProcess(socket, slab_bytes=SLAB, slab_count=SLABS, url=coordinator.url)
        stack.enter_context(lender)
        environment = {
            "AQUA_COORDINATOR_URL": coordinator.url,
            "AQUA_SLAB_BYTES": str(SLAB),
            "AQUA_WANTED_BYTES": str(WANTED),
            "AQUA_HEARTBEAT_S": "0.1",
            "AQUA_NODE": "node",
            "AQUA_DOMAIN": "domain",
            "AQUA_GPU_UUID": "GPU-consumer",
        }
        yield EngineCluster(coordinator, lender, environment)
