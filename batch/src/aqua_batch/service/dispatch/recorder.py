"""Writes down how requests ended: many in one transaction, none before it is on the disk.

What ends within a moment, and while the transaction before runs, goes into one: a transaction costs
more than its rows, and a slow disk makes it larger and not answers slower. A database that does not
answer is asked again until it does: an answer that an engine has worked for is not given up. If the
process dies first, the request runs again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final

import structlog

from aqua_batch.service.rows.database import Database
from aqua_batch.service.rows.request_rows import RequestOutcome, Return, settle
from aqua_protocol.errors import StoreUnavailableError
from aqua_protocol.supervision import resting

log = structlog.get_logger(__name__)

RETRY_S: Final = 0.5
"""Seconds between attempts at a database that does not answer. Doubled, answers are recorded up to
half a second later once it is back."""
MOST_AT_ONCE: Final = 512
"""Outcomes of one transaction: some 10 ms. Doubled, other writers wait twice as long."""
GATHER_S: Final = 0.1
"""Seconds in which outcomes gather for a transaction, whose cost is that of some hundred of them.
Doubled, half as many transactions are written where engines are fast, and a process that is killed
loses the work of another 100 ms."""
GATHER_SHARE: Final = 0.1
"""Of a worker's life, at most, for the same: with the end of the life, what it has not recorded is
late. Doubled, a worker that lives for less than a second loses more where machines stand still."""


class Recorder:
    """Takes outcomes and returns, and records them in order.

    Args:
        life_s: How long the worker is thought alive after it was last heard of.
        recorded: Called after a transaction with how many of its entries were late.

    Attributes:
        waiting_bytes: Of records that are not on the disk.
    """

    def __init__(
        self,
        database: Database,
        life_s: float,
        now_s: Callable[[], float],
        recorded: Callable[[int], None],
    ) -> None:
        self._database = database
        self._gather_s = min(GATHER_S, GATHER_SHARE * life_s)
        self._now_s = now_s
        self._recorded = recorded
        self._waiting: list[RequestOutcome | Return] = []
        self._writing: list[RequestOutcome | Return] = []
        self._came = asyncio.Event()
        self.waiting_bytes = 0

    def __len__(self) -> int:
        """Entries that are not on the disk."""
        return len(self._waiting) + len(self._writing)

    def keys(self) -> set[tuple[int, int, int]]:
        """Keys of the requests whose entries are not on the disk."""
        return {each.request.key for each in (*self._writing, *self._waiting)}

    def put(self, entry: RequestOutcome | Return) -> None:
        """Have an entry recorded."""
        self._waiting.append(entry)
        self.waiting_bytes += _size_of(entry)
        self._came.set()

    async def run(self) -> None:
        """Record until cancelled."""
        while True:
            if not self._writing and not self._waiting:
                self._came.clear()
                with resting():
                    await self._came.wait()
            with resting():
                await asyncio.sleep(self._gather_s)
            await self._record()
            while len(self._waiting) >= MOST_AT_ONCE:
                await self._record()

    async def flush(self) -> None:
        """Record all there is."""
        while self._writing or self._waiting:
            await self._record()

    async def _record(self) -> None:
        """Write one transaction, however often it takes; its entries wait until it is written.

        What a transaction that was cut short may have written is late the second time.
        """
        if not self._writing:
            self._writing = self._waiting[:MOST_AT_ONCE]
            del self._waiting[:MOST_AT_ONCE]
        outcomes = [each for each in self._writing if isinstance(each, RequestOutcome)]
        returns = [each for each in self._writing if isinstance(each, Return)]
        while True:
            work = partial(settle, outcomes=outcomes, returns=returns, now_s=self._now_s())
            try:
                late = await self._database.write(work)
                break
            except StoreUnavailableError as error:
                log.warning("outcomes not recorded yet", count=len(self), error=str(error))
                with resting():
                    await asyncio.sleep(RETRY_S)
        self.waiting_bytes -= sum(map(_size_of, self._writing))
        self._writing = []
        self._recorded(len(late))


def _size_of(entry: RequestOutcome | Return) -> int:
    return len(entry.record) if isinstance(entry, RequestOutcome) else 0
