"""Outcomes gather for a transaction, unless there are enough for one."""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from aqua_batch.service.dispatch.recorder import MOST_AT_ONCE, Recorder
from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.request_rows import LeasedRequest, RequestOutcome
from harness.bounds import HANG_S

LIFE_S: Final = 0.2


def outcome(line: int) -> RequestOutcome:
    request = LeasedRequest(1, line, f"{line}", "t", "/v1/completions", "k", 0, 1, 1, 0, 0)
    return RequestOutcome(request, is_answer=True, record=b"{}")


class Books:
    """Notes how many outcomes each transaction has, and when it began.

    Args:
        coming: How many come while one is written.
    """

    def __init__(self, coming: int) -> None:
        self.sizes: list[int] = []
        self.began_s: list[float] = []
        self.recorder = Recorder(cast("Database", self), LIFE_S, lambda: 0.0, self._recorded)
        self._coming = coming
        self._wanted = 0
        self._is_over = asyncio.Event()

    async def write(self, work: Any) -> set[tuple[int, int, int]]:  # noqa: ANN401 - a partial
        self.began_s.append(asyncio.get_running_loop().time())
        self.sizes.append(len(work.keywords["outcomes"]))
        self.put(self._coming)
        return set()

    def put(self, count: int) -> None:
        for line in range(count):
            self.recorder.put(outcome(line))

    async def record(self, transactions: int) -> None:
        """Run the recorder until there were so many transactions."""
        self._wanted = transactions
        recording = asyncio.create_task(self.recorder.run())
        async with asyncio.timeout(HANG_S):
            await self._is_over.wait()
        recording.cancel()
        await asyncio.gather(recording, return_exceptions=True)

    def _recorded(self, _: int) -> None:
        if len(self.sizes) == self._wanted:
            self._is_over.set()


async def test_what_comes_while_one_is_written_gathers_for_the_next() -> None:
    books = Books(coming=1)
    books.put(1)
    await books.record(transactions=4)
    begun = zip(books.began_s, books.began_s[1:], strict=False)
    assert all(after - before > 0.05 * LIFE_S for before, after in begun)


async def test_full_transactions_wait_for_nothing_and_what_is_left_is_recorded_at_the_end() -> None:
    books = Books(coming=0)
    books.put(2 * MOST_AT_ONCE + 1)
    await books.record(transactions=2)
    assert books.sizes == [MOST_AT_ONCE, MOST_AT_ONCE]
    assert len(books.recorder) == 1
    await books.recorder.flush()
    assert (books.sizes[2:], len(books.recorder), books.recorder.waiting_bytes) == ([1], 0, 0)
