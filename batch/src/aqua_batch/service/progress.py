"""How batches are going: their rates, when they will have ended, and which may miss their deadline.

A rate is what has ended over the last minute or so. This service sees that in the database, where
the work of all services is, so any of them tells the same; until it has watched for some seconds,
it tells the mean since the batch began. Deadline risk is the dispatcher's own rule
(`request_rows.is_late`): what is said to be late here is what goes first there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection, select

from aqua_batch.service.rows.batch_rows import BatchJob, BatchStatus, count_batches
from aqua_batch.service.rows.request_rows import is_late, open_work
from aqua_batch.service.rows.schema import BATCHES
from aqua_protocol.batches import MOST_BATCHES, BatchSummary, JobView

NOTE_S: Final = 5.0
"""Seconds between two looks at how far batches are. Doubled, there are half as many."""
LOOK_BACK_S: Final = 60.0
"""Seconds that a rate is taken over. Doubled, it is smoother, and a stop is seen a minute later."""
SHORTEST_S: Final = 10.0
"""Seconds that were watched, at the least; fewer say little. Doubled, so is the time in which a
rate is the mean since the beginning."""
ENDED_SHOWN: Final = 10
"""Of batches that have ended, chosen by hand: those somebody still waits for. Doubled, half a
screen more of them."""
OPEN: Final = (
    *(BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS),
    *(BatchStatus.FINALIZING, BatchStatus.CANCELLING),
)


def ended_by_batch(connection: Connection) -> dict[int, int]:
    """How many requests of each running batch have ended, by its row."""
    query = select(BATCHES.c.seq, BATCHES.c.completed + BATCHES.c.failed)
    rows = connection.execute(query.where(BATCHES.c.status == BatchStatus.IN_PROGRESS))
    return {int(seq): int(ended) for seq, ended in rows}


class BatchRates:
    """How far running batches were at some moments of the last minute."""

    def __init__(self) -> None:
        self._notes: deque[tuple[float, Mapping[int, int]]] = deque(
            maxlen=1 + round(LOOK_BACK_S / NOTE_S)
        )

    def is_due(self, now_s: float) -> bool:
        """Whether it is time to look again."""
        return not self._notes or not 0 <= now_s - self._notes[-1][0] < NOTE_S

    def note(self, now_s: float, ended: Mapping[int, int]) -> None:
        """Remember how many requests of each batch have ended by now."""
        if self._notes and now_s < self._notes[-1][0]:  # The clock was set back.
            self._notes.clear()
        self._notes.append((now_s, ended))

    def rate_per_s(self, batch: int, ended: int, now_s: float) -> float | None:
        """Requests of a batch that ended per second of late; None where too little was seen."""
        for at_s, known in self._notes:
            if batch in known and SHORTEST_S <= now_s - at_s <= LOOK_BACK_S + NOTE_S:
                return max(0, ended - known[batch]) / (now_s - at_s)
        return None


def overview(
    connection: Connection,
    tenant: str | None,
    batch_rates: BatchRates,
    now_s: float,
    engines: tuple[int, int],
) -> BatchSummary:
    """Tell how batches are going: of a tenant, or of all for None.

    Args:
        engines: How many there are, and how many of them are absent.
    """
    whose = select(BATCHES) if tenant is None else select(BATCHES).where(BATCHES.c.tenant == tenant)
    is_open = BATCHES.c.status.in_(OPEN)
    urgent = whose.where(is_open).order_by(BATCHES.c.expires_s, BATCHES.c.seq)
    last = whose.where(~is_open).order_by(BATCHES.c.seq.desc()).limit(ENDED_SHOWN)
    rows = [
        BatchJob(**row)
        for query in (urgent.limit(MOST_BATCHES - ENDED_SHOWN), last)
        for row in connection.execute(query).mappings()
    ]
    open_requests, late_batches = open_work(connection, now_s, tenant)
    return BatchSummary(
        at_s=now_s,
        batches=[_progress(row, batch_rates, now_s) for row in rows],
        counts=count_batches(connection, tenant),
        open_requests=open_requests,
        late_batches=late_batches,
        engines=engines[0],
        absent_engines=engines[1],
    )


def _progress(row: BatchJob, batch_rates: BatchRates, now_s: float) -> JobView:
    ended = row.completed + row.failed
    rate = left_s = None
    late = False
    if row.status == BatchStatus.IN_PROGRESS and row.in_progress_s is not None:
        rate = batch_rates.rate_per_s(row.seq, ended, now_s)
        watched_s = now_s - row.in_progress_s
        if rate is None and watched_s >= SHORTEST_S:
            rate = ended / watched_s
        left_s = (row.total - ended) / rate if rate else None
        late = is_late(row.in_progress_s, row.expires_s, ended, row.total, now_s)
    return JobView(
        batch_id=row.batch_id,
        tenant=row.tenant,
        endpoint=row.endpoint,
        model=None if row.model is None else row.model[:512],
        status=row.status,
        created_s=row.created_s,
        expires_s=row.expires_s,
        total=row.total,
        completed=row.completed,
        failed=row.failed,
        fault=str(row.errors[0].get("code"))[:256] if row.errors else None,
        requests_per_s=rate,
        seconds_left=left_s,
        is_late=late,
    )
