"""The GPU that is not there, where the walks and scenarios over it cannot tell."""

from __future__ import annotations

from collections.abc import ItemsView
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch

from harness.cuda.stand_in import stand_in


def test_what_threads_share_is_looked_at_under_its_lock() -> None:
    """Else a thread that reserves addresses ends the look of one that launches a kernel."""
    with stand_in() as standing:
        lock = standing.machine.lock

        def can_take() -> bool:
            is_free = lock.acquire(blocking=False)
            if is_free:
                lock.release()
            return is_free

        looks: list[bool] = []

        class Watched(dict[int, int]):
            def items(self) -> ItemsView[int, int]:  # type: ignore[override] # the class of a view
                with ThreadPoolExecutor(1) as other:
                    looks.append(other.submit(can_take).result())
                return super().items()

        standing.machine.space.reserved = Watched(standing.machine.space.reserved)
        torch.ones(4, device="cuda").copy_(torch.zeros(4))
        assert looks
        assert not any(looks)


@pytest.mark.parametrize(("rows", "is_wrong"), [((1,), False), ((1, 0), True)])
def test_a_kernel_reads_the_rows_that_its_index_on_the_gpu_names(
    rows: tuple[int, ...], *, is_wrong: bool
) -> None:
    """Another's unfinished write to a row beside them is no race."""
    broken = pytest.raises(AssertionError, match=r"index_select.* is not ordered after the write")
    with broken if is_wrong else nullcontext(), stand_in() as standing:
        table = torch.zeros(2, 4, device="cuda")
        index = torch.tensor(rows, pin_memory=True)
        torch.cuda.synchronize()
        with torch.cuda.stream(standing.stream()):
            table[0].fill_(1.0)
        where = torch.empty(len(rows), dtype=torch.int64, device="cuda")
        where.copy_(index, non_blocking=True)
        torch.index_select(table, 0, where)
