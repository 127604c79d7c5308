"""What has come into the prefix tier and left it, as vLLM's KV events, so that routers see it.

vLLM publishes events of its own prefix cache (`--kv-events-config`) and takes a connector's along.
Ours say of a block that requests share that it was stored or removed, once for each change that is
still true when it is told; a block that came and went in between is not worth a word. Blocks of
preempted requests are among them where others may use them, and are not where they have keys of
their own.

The medium is `CPU`, whether a block lies in host memory or on a peer: it is what routers know as
"not on the GPU, cheaper than computing". Like those of vLLM's own offloading by default, events
carry the hash, no tokens and a block size of 0: a router knows the hash by the event of when the
block was on the GPU.

A block that is paged out beside the model is told of once all workers have acknowledged it; one
that is paged out within a step when it has its place, up to a step before its bytes are there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any

from aqualib.engines.vllm.paging.block_table import BlockTable


class TierEvents:
    """Follows a table; `take` says what has changed since it was last asked."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._changed: set[Hashable] = table.follow()
        self._told: set[Hashable] = set()

    def take(self) -> tuple[list[Hashable], list[Hashable]]:
        """Keys of shared blocks stored and removed since; each is one and not the other."""
        shared = [key for key in self._changed if _hash_of(key) is not None]
        self._changed.clear()
        there = {key for key in shared if self._table.present((key,))}
        stored = [key for key in shared if key in there and key not in self._told]
        removed = [key for key in shared if key not in there and key in self._told]
        self._told.update(stored)
        self._told.difference_update(removed)
        return stored, removed


def _hash_of(key: Hashable) -> tuple[bytes, int] | None:
    """A shared block's hash and group; None for a request's own."""
    if isinstance(key, bytes):
        return key, 0
    if isinstance(key, tuple) and isinstance(key[0], bytes):
        return key[0], int(key[1])
    return None


def as_vllm_events(stored: Iterable[Hashable], removed: Iterable[Hashable]) -> Iterator[Any]:
    """The same as vLLM publishes it; versions differ in the fields that events have.

    Args:
        stored: Keys, as `TierEvents.take` gives them.
        removed: Likewise.
    """
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    for kind, keys in ((BlockRemoved, removed), (BlockStored, stored)):
        for key in keys:
            found = _hash_of(key)
            assert found is not None, key
            content = {
                "block_hashes": [maybe_convert_block_hash(found[0])],
                "parent_block_hash": None,
                "token_ids": [],
                "block_size": 0,
                "lora_id": None,
                "lora_name": None,
                "medium": "CPU",
                "group_idx": found[1],
            }
            names = set(kind.__struct_fields__)
            yield kind(**{name: value for name, value in content.items() if name in names})
