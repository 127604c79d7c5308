"""The books at one moment, more or less, as far as a caller may see them.

Read page by page, each a bounded piece of Redis time, so reports do not wait for a huge cluster;
what is beyond the bounds is left out, and the snapshot says so. Members report at their own times,
so sums may differ by a heartbeat.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from aqua_coordinator.store import Ledger
from aqua_coordinator.store.rows import ProducerRow
from aqua_protocol.leases import LeaseView, Pairing, QuotaView, ReclaimView
from aqua_protocol.members import ConsumerView

RowT = TypeVar("RowT")

PAGE: Final = 250
"""Rows read at once, 2 ms of Redis time. Doubled, reports wait for 4."""
MAX_MEMBERS: Final = 4000
"""Of each role, chosen by hand: more than a screen has pixels for. Doubled, a look takes twice as
long and a page twice the memory."""
MAX_LEASES: Final = 8000
"""Two for each consumer. Doubled, so are the arrows."""
MAX_RECLAIMS: Final = 1000
"""Under way, or ended in the last two minutes. Doubled, reading them takes 8 ms more."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was read.

    Attributes:
        at_s: Unix time of the coordinator, when reading began.
        tenant: Whose members these are; '' for all.
        free_by_domain: Free bytes that can be granted, of all tenants' producers, as offers are.
        reclaims: Those under way.
        quotas: Of the tenant, if these are one's.
        is_cut: Whether there is more than is shown.
    """

    at_s: float
    tenant: str
    producers: Sequence[ProducerRow]
    consumers: Sequence[ConsumerView]
    leases: Sequence[LeaseView]
    pairings: dict[str, Pairing] = field(default_factory=dict)
    reclaims: Sequence[ReclaimView] = ()
    free_by_domain: Counter[str] = field(default_factory=Counter)
    quotas: Sequence[QuotaView] = ()
    is_cut: bool = False


async def read_snapshot(ledger: Ledger, tenant: str) -> Snapshot:
    """Read what a tenant may see, or everything for ''.

    Raises:
        UnavailableError: Redis does not answer.
    """
    at_s = time.time()
    everyone = await _by_name(
        lambda cursor: ledger.producers(cursor=cursor, limit=PAGE), lambda row: row.producer_id
    )
    producers = everyone
    if tenant:
        producers = await _by_name(
            lambda cursor: ledger.producers(cursor=cursor, limit=PAGE, as_tenant=tenant),
            lambda row: row.producer_id,
        )
    consumers = await _by_name(
        lambda cursor: ledger.consumers(cursor=cursor, limit=PAGE, as_tenant=tenant),
        lambda row: row.consumer_id,
    )
    leases = await _by_cursor(
        lambda cursor: ledger.leases(cursor=cursor, limit=PAGE, as_tenant=tenant), MAX_LEASES
    )
    reclaims = await _by_cursor(
        lambda cursor: ledger.reclaims(cursor=cursor, limit=PAGE, as_tenant=tenant), MAX_RECLAIMS
    )
    free = Counter[str]()
    for row in everyone:
        free[row.domain] += row.free_bytes if row.grantable else 0
    return Snapshot(
        at_s=at_s,
        tenant=tenant,
        producers=producers,
        consumers=consumers,
        leases=leases,
        pairings=await _pairings(ledger, tenant),
        reclaims=[one for one in reclaims if not one.done],
        free_by_domain=free,
        quotas=await ledger.quotas(limit=1, as_tenant=tenant) if tenant else (),
        is_cut=max(len(everyone), len(consumers)) >= MAX_MEMBERS or len(leases) >= MAX_LEASES,
    )


async def _pairings(ledger: Ledger, tenant: str) -> dict[str, Pairing]:
    found: dict[str, Pairing] = {}
    cursor: str | None = ""
    while cursor is not None and len(found) < MAX_MEMBERS:
        plan, _, cursor = await ledger.placements(cursor=cursor, limit=PAGE, as_tenant=tenant)
        found |= {pairing.consumer_id: pairing for pairing in plan.pairings}
    return found


async def _by_name(
    read: Callable[[str], Awaitable[list[RowT]]], name: Callable[[RowT], str]
) -> list[RowT]:
    """Pages of members, by the name of the last before."""
    found: list[RowT] = []
    page = await read("")
    while page and len(found) + len(page) < MAX_MEMBERS:
        found += page
        page = await read(name(page[-1])) if len(page) == PAGE else []
    return found + page[: MAX_MEMBERS - len(found)]


async def _by_cursor(
    read: Callable[[str | None], Awaitable[tuple[list[RowT], str | None]]], limit: int
) -> list[RowT]:
    """Pages by a cursor; those of a tenant may be short with more to come."""
    found, cursor = await read(None)
    while cursor is not None and len(found) < limit:
        page, cursor = await read(cursor)
        found += page
    return found[:limit]
