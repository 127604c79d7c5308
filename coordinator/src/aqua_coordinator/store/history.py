"""What has happened: streams of the books that look back, for people.

Three streams reach back as far as their lengths allow: events (some minutes of a busy cluster),
ended reclaims (an hour of one a second), and sums over all members (an hour, one every ten
seconds). They are in Redis, so every coordinator tells the same, also after a restart. What is
unreadable in them is passed over.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from aqua_coordinator.store import Ledger, rows
from aqua_coordinator.store.keys import KEYS
from aqua_coordinator.store.member_totals import MemberTotals
from aqua_coordinator.store.pipeline import Pipeline
from aqua_protocol.leases import EndedReclaim

TRY_EVERY_S: Final = 5.0
"""Half of the time between two samples, so that none is missed by much. Doubled, every other is
late by up to ten seconds."""
_SUMS: Final = ("offered_bytes", "leased_bytes", "wanted_bytes", "spilled_bytes")


class Sample(NamedTuple):
    """Sums over all members at one moment, Unix time by Redis."""

    at_s: float
    offered_bytes: int
    leased_bytes: int
    wanted_bytes: int
    spilled_bytes: int


class PastReclaim(NamedTuple):
    """A reclaim, when the books heard of its end, and whose its producer is."""

    at_s: float
    reclaim: EndedReclaim
    tenant: str


class History:
    """Reads and keeps the streams that look back."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._tried_s = -TRY_EVERY_S

    async def keep(self, ledger: Ledger, totals: MemberTotals) -> None:
        """Add a sample, if it is time for one.

        Raises:
            UnavailableError: Redis does not answer.
        """
        now_s = time.monotonic()
        if totals.sums and now_s - self._tried_s >= TRY_EVERY_S:
            self._tried_s = now_s
            await ledger.keep_sample(" ".join(str(totals.sums.get(name, 0)) for name in _SUMS))

    async def samples(self, since_s: float) -> list[Sample]:
        """Samples since a moment, oldest first.

        Raises:
            UnavailableError: Redis does not answer.
        """
        found = await self._pipeline.command("XRANGE", KEYS["samples"], _id(since_s), "+")
        return rows.entries(_sample, found)

    async def reclaims(self, since_s: float, limit: int) -> list[PastReclaim]:
        """The latest reclaims that ended since a moment, latest first.

        Raises:
            UnavailableError: Redis does not answer.
        """
        name = KEYS["reclaim_history"]
        found = await self._pipeline.command("XREVRANGE", name, "+", _id(since_s), "COUNT", limit)
        return rows.entries(_past_reclaim, found)

    async def latest_events(self, limit: int) -> list[rows.TenantEvent]:
        """The latest events, latest first.

        Raises:
            UnavailableError: Redis does not answer.
        """
        found = await self._pipeline.command("XREVRANGE", KEYS["events"], "+", "-", "COUNT", limit)
        return rows.entries(rows.event, found)


def _id(at_s: float) -> str:
    """The first position in a stream at a time."""
    return str(max(0, int(at_s * 1e3)))


def _sample(entry_id: bytes, fields: Sequence[bytes]) -> Sample:
    offered, leased, wanted, spilled = map(int, rows.entry(fields).get("sums", "").split(" "))
    return Sample(rows.entry_at_s(entry_id), offered, leased, wanted, spilled)


def _past_reclaim(entry_id: bytes, fields: Sequence[bytes]) -> PastReclaim:
    found = rows.entry(fields)
    reclaim = rows.ended_reclaim(found.get("reclaim", ""))
    return PastReclaim(rows.entry_at_s(entry_id), reclaim, found.get("tenant", ""))
