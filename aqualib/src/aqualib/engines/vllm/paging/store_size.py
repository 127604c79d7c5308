"""How many blocks a worker's store holds: what was asked for, or what the host can spare.

Room is taken when a store opens. The KV cache of a large GPU is as large as the memory of a small
container, and every worker of an engine has one, so without `store_bytes` a worker takes its part
of the share that spilled data gets of the memory there is (`aqualib.connection.HOST_SHARE`).
"""

from __future__ import annotations

from typing import NamedTuple

from aqua_protocol import ConfigError, format_bytes
from aqualib.connection import HOST_SHARE
from aqualib.host_memory import host_memory_bytes
from aqualib.settings import Settings


class StoreSize(NamedTuple):
    """What one worker's store is to be.

    Attributes:
        capacity_blocks: Blocks that it holds.
        host_bytes: Host memory that these may take.
        warning: What a person should know, if anything.
    """

    capacity_blocks: int
    host_bytes: int
    warning: str | None


def store_size(
    store_bytes: int | None,
    *,
    block_bytes: int,
    block_count: int,
    worker_count: int,
    settings: Settings,
) -> StoreSize:
    """Choose the size of a worker's store.

    Args:
        store_bytes: What was asked for; None leaves it to the host.
        block_bytes: Size of a block.
        block_count: Blocks of the KV cache.
        worker_count: Workers of this engine on this machine, which share its memory.
        settings: May bound host memory, and ask for memory of peers.

    Raises:
        ConfigError: There is not room for one block.
    """
    slab_bytes = settings.slab_bytes
    per_slab = max(1, slab_bytes // block_bytes)
    limit = host_memory_bytes()
    share = int(limit * HOST_SHARE) // worker_count
    warning = None
    if store_bytes is not None:
        capacity = store_bytes // block_bytes
        if store_bytes * worker_count > limit:
            warning = (
                f"store_bytes={format_bytes(store_bytes)} for each of {worker_count} workers is "
                f"more than the {format_bytes(limit)} that this machine or container has: unless "
                "peers hold most of it, the kernel will end a worker"
            )
    else:
        room = settings.host_bytes or max(share, settings.wanted_bytes or 0)
        # A slab is left for blocks that move between slabs.
        capacity = min(block_count, (room // slab_bytes - 1) * per_slab)
        if capacity < block_count:
            warning = (
                f"KV blocks page into {format_bytes(max(0, capacity) * block_bytes)} of a KV "
                f"cache's {format_bytes(block_count * block_bytes)}: {worker_count} workers share "
                f"{format_bytes(limit)} of host memory and leave most of it to others; "
                "store_bytes chooses otherwise"
            )
    if capacity < 1:
        raise ConfigError(
            f"{format_bytes(share if store_bytes is None else store_bytes)} do not hold one KV "
            f"block of {format_bytes(block_bytes)}"
            + (f" in slabs of {format_bytes(slab_bytes)}" if store_bytes is None else ""),
            remedy='Raise "store_bytes" or the memory limit, lower AQUA_SLAB_BYTES, or set '
            '"mode": "recompute".',
        )
    slabs = 1 - (-capacity // per_slab)
    host_bytes = settings.host_bytes or max(slabs * slab_bytes, settings.wanted_bytes or 0)
    return StoreSize(capacity, host_bytes, warning)
