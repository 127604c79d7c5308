"""What a tenant may have and ask for: bytes of files, open requests of batches, requests a minute.

Rows of the database, so that all services keep to the same and a change counts at once. Without a
row, or where a limit of it is empty, there is none. Bytes and open requests are counted from the
rows of files and batches, in the transaction that adds to them, so that two at once are never both
the last. The rate of online requests is counted by each service for itself: of several behind one
address, each lets a tenant have it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Final

from sqlalchemy import Connection, delete, func, insert, select

from aqua_batch.service.refusals import RateLimitError, TenantQuotaError
from aqua_batch.service.rows.schema import BATCHES, FILES, QUOTAS

MINUTE_S: Final = 60.0
"""Fixed: seconds of a minute."""
MOST_TENANTS: Final = 10_000
"""Tenants whose rate is remembered. Doubled, a service of that many takes 2 MiB more."""
OPEN_RETRY_S: Final = 60.0
"""Seconds after which a refused batch may try again: requests end by the thousand in a minute.
Doubled, clients try half as often."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """A tenant's limits; None where there is none.

    Attributes:
        stored_bytes: Of all its files, inputs and outputs; outputs are written even beyond it.
        open_requests: Requests of its batches that have not ended.
        requests_per_minute: Online requests.
    """

    tenant: str
    stored_bytes: int | None = None
    open_requests: int | None = None
    requests_per_minute: int | None = None


def quota_of(connection: Connection, tenant: str, *, holds: bool = False) -> TenantLimits:
    """The limits of a tenant.

    Args:
        holds: Whether other transactions that ask so wait for the end of this one. On PostgreSQL
            another service would count what is there without what this one is adding; SQLite has
            one writer anyway.
    """
    query = select(QUOTAS).where(QUOTAS.c.tenant == tenant)
    found = connection.execute(query.with_for_update() if holds else query)
    row = found.mappings().one_or_none()
    return TenantLimits(tenant) if row is None else TenantLimits(**row)


def list_quotas(connection: Connection) -> list[TenantLimits]:
    """All tenants with limits."""
    query = select(QUOTAS).order_by(QUOTAS.c.tenant)
    return [TenantLimits(**row) for row in connection.execute(query).mappings()]


def set_quota(connection: Connection, quota: TenantLimits) -> None:
    """Let a tenant have these limits, and no others."""
    connection.execute(delete(QUOTAS).where(QUOTAS.c.tenant == quota.tenant))
    if any(limit is not None for name, limit in asdict(quota).items() if name != "tenant"):
        connection.execute(insert(QUOTAS).values(**asdict(quota)))


def require_room(connection: Connection, tenant: str, more_bytes: int) -> None:
    """Check that a tenant may store so many bytes more.

    Raises:
        TenantQuotaError: It would have too many.
    """
    quota = quota_of(connection, tenant, holds=True).stored_bytes
    if quota is None:
        return
    query = select(func.coalesce(func.sum(FILES.c.size_bytes), 0)).where(FILES.c.tenant == tenant)
    stored = int(connection.execute(query).scalar_one())
    if stored + more_bytes > quota or stored >= quota:
        raise TenantQuotaError(
            f"the files of tenant {tenant} would exceed {quota} bytes",
            param="file",
            remedy="Delete files that are no longer needed.",
        )


def open_room(connection: Connection, tenant: str) -> int | None:
    """How many requests more the tenant's batches may have; None where there is no limit."""
    quota = quota_of(connection, tenant, holds=True).open_requests
    if quota is None:
        return None
    left = func.sum(BATCHES.c.total - BATCHES.c.completed - BATCHES.c.failed)
    query = select(func.coalesce(left, 0)).where(
        BATCHES.c.tenant == tenant, BATCHES.c.status == "in_progress"
    )
    return quota - int(connection.execute(query).scalar_one())


def require_open_room(connection: Connection, tenant: str) -> None:
    """Check that a tenant may have another batch.

    Raises:
        RateLimitError: Its batches have as many open requests as they may.
    """
    room = open_room(connection, tenant)
    if room is not None and room <= 0:
        raise RateLimitError(
            f"batches of tenant {tenant} have as many open requests as they may",
            remedy="Wait until some have ended.",
            retry_after_s=OPEN_RETRY_S,
        )


class RequestRates:
    """Counts online requests by tenant: a bucket each, which fills up evenly over a minute.

    Args:
        clock_s: Monotonic.
    """

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._full_at_s: dict[str, float] = {}

    def count(self, quota: TenantLimits) -> None:
        """Count a request of a tenant.

        Raises:
            RateLimitError: It has had its share; says when the next may come.
        """
        rate = quota.requests_per_minute
        if rate is None:
            return
        now_s = self._clock_s()
        # The bucket lacks a request for each `MINUTE_S / rate` until it is full.
        full_at_s = max(now_s, self._full_at_s.pop(quota.tenant, now_s)) + MINUTE_S / rate
        excess_s = full_at_s - now_s - MINUTE_S
        if excess_s > 1e-9:  # noqa: PLR2004 - rounding
            full_at_s -= MINUTE_S / rate
        self._full_at_s[quota.tenant] = full_at_s
        if len(self._full_at_s) > MOST_TENANTS:  # The one that asked longest ago.
            del self._full_at_s[next(iter(self._full_at_s))]
        if excess_s > 1e-9:  # noqa: PLR2004 - as above
            raise RateLimitError(
                f"tenant {quota.tenant} has had its {rate} requests of this minute",
                retry_after_s=excess_s,
            )
