"""Loads of a real engine that is too small for them to be cut: a tiny model's come as columns too.

Its loads fit a staging buffer many times over; with one of a block, and copies of any length, they
are cut as those of a large model are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

from aqualib.engines.vllm.paging import rows, worker
from aqualib.engines.vllm.paging.rows import BlockCopier
from aqualib.engines.vllm.paging.worker import KvPagingWorker
from aqualib.transports.gpu_thresholds import CopyThresholds

if TYPE_CHECKING:
    from collections import Counter

    from aqualib.ranges import Range


def cut_loads(counts: Counter[str]) -> None:
    """Have all loads within steps of this process cut; counts columns and layers that waited."""
    shortest = CopyThresholds(device_run_bytes=1, host_run_bytes=1)
    cut, wait = BlockCopier.columns, KvPagingWorker.await_layer

    def count_columns(copier: BlockCopier, count: int, room_bytes: int) -> list[Range]:
        found = cut(copier, count, room_bytes)
        counts["columns"] += len(found) if len(found) > 1 else 0
        return found

    def count_layers(paging: KvPagingWorker, name: str) -> None:
        before_s = paging.step_wait_s
        wait(paging, name)
        counts["waits"] += paging.step_wait_s > before_s

    patches: tuple[tuple[Any, str, Any], ...] = (
        (rows, "CopyThresholds", lambda: shortest),
        (rows, "CUT_ON", {"cpu"}),
        (worker, "STAGING_BYTES", 1),
        (BlockCopier, "columns", count_columns),
        (KvPagingWorker, "await_layer", count_layers),
    )
    for owner, name, thing in patches:
        mock.patch.object(owner, name, thing).start()
