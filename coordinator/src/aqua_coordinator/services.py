"""What an operation works with, and how FastAPI hands it over.

Operations are plain async functions. Their parameters are path names, a `body`, and whichever of
the three below they need, so that a hot route can call the same functions without FastAPI.
"""

from __future__ import annotations

import asyncio
import base64
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Final

from fastapi import Depends, Header, Query, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import Field, SecretStr

from aqua_client.tracing import Tracer
from aqua_coordinator.access.audit import AuditLog
from aqua_coordinator.access.auth import Authenticator, Caller
from aqua_coordinator.access.quotas import Quotas
from aqua_coordinator.access.rates import CallerRates
from aqua_coordinator.console.views import ConsoleViews
from aqua_coordinator.event_watcher import EventWatcher
from aqua_coordinator.metrics import Metrics
from aqua_coordinator.settings import CoordinatorSettings
from aqua_coordinator.store import Ledger
from aqua_coordinator.store.history import History
from aqua_coordinator.store.member_totals import MemberTotals
from aqua_coordinator.store.rows import Grant
from aqua_protocol.capability import Claims, producer_key, sign
from aqua_protocol.ids import MAX_EPOCH, Name

MAX_CACHED_KEYS: Final = 4096
"""Producers whose key is kept, 100 bytes each: more than a coordinator serves. Without it each
grant derives a key anew, 4 us."""


class CapabilitySigner:
    """Signs capability tokens and hands producers the keys that check them.

    One secret per life of the books signs everything, so all coordinators of one Redis agree
    without talking; it is in the ledger, unless one is configured. Each producer's key is derived
    from it (`aqua_protocol.capability`), and kept: deriving one costs as much as the rest of an
    answer. While coordinators replace their secret, one after the other, producers get the keys of
    both, so it does not matter which of them signs.
    """

    def __init__(self, ledger: Ledger, settings: CoordinatorSettings) -> None:
        self._ledger = ledger
        self._secret = _bytes_of(settings.capability_secret)
        self._other = _bytes_of(settings.capability_secret_other)
        self._key = lru_cache(MAX_CACHED_KEYS)(producer_key)

    async def capability(self, grant: Grant) -> str:
        """The token for a fresh lease; the same whenever the grant is the same."""
        secret = self._secret or await self._ledger.secret_of(grant.books_id)
        lease = grant.lease
        claims = Claims(
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            producer_id=lease.producer_id,
            consumer_id=lease.consumer_id,
            bytes=lease.bytes,
            not_after_s=grant.not_after_s,
            proof=self._ledger.adoption.prove(grant),
        )
        return sign(claims, self._key(secret, lease.producer_id, grant.incarnation))

    async def checking_key(self, books_id: str, producer_id: str, incarnation: str) -> str:
        """The key that one life of a producer checks its tokens with, or both, in base64."""
        secret = self._secret or await self._ledger.secret_of(books_id)
        key = self._key(secret, producer_id, incarnation)
        if self._other is not None:
            key += self._key(self._other, producer_id, incarnation)
        return base64.b64encode(key).decode()


def _bytes_of(secret: SecretStr | None) -> bytes | None:
    return None if secret is None else secret.get_secret_value().encode()


HEARTBEAT_JITTER: Final = 0.2
"""Part of a heartbeat by which a member's own is shorter at most, so that none keep step. Doubled,
there are an eighth more reports."""
REPORT_SLOT_S: Final = 0.04
"""Reports are asked for at multiples of this, so that some come together: what comes alone costs
twice as much, by waking up (docs/measurements/scale.md). Doubled, twice as many wait for each
other, 0.2 to 0.4 ms each."""
SLOTS_IN_HEARTBEAT: Final = 20
"""At least, so that a short heartbeat is shortened by a twentieth at most, chosen by hand. Doubled,
fewer reports of short heartbeats come together."""


@dataclass(slots=True)
class HeartbeatRate:
    """How far apart reports are, and whether there is room for them: between requests and sweep.

    Attributes:
        shortest_s: Seconds between two reports of a member, as configured.
        spread_s: Seconds that the number of members asks for.
        is_refusing: Whether there was no room for a report since the last sweep.
        clock: Seconds, monotonic.
    """

    shortest_s: float
    spread_s: float = 0.0
    is_refusing: bool = False
    clock: Callable[[], float] = time.monotonic

    @property
    def longest_s(self) -> float:
        """Seconds between two reports of a member, at most."""
        return max(self.shortest_s, self.spread_s)

    def next_s(self, member: str) -> float:
        """Within how many seconds a member should report again.

        Its own time, so that none keep step, but for the few whose time is in the same slot.
        """
        part = zlib.crc32(member.encode()) / 2**32
        own_s = self.longest_s * (1 - HEARTBEAT_JITTER * part)
        return own_s - (self.clock() + own_s) % min(REPORT_SLOT_S, own_s / SLOTS_IN_HEARTBEAT)


@dataclass(frozen=True, slots=True)
class Services:
    """Everything behind the operations; lives as long as the process."""

    settings: CoordinatorSettings
    ledger: Ledger
    signer: CapabilitySigner
    authenticator: Authenticator
    event_watcher: EventWatcher
    metrics: Metrics
    audit: AuditLog | None
    member_totals: MemberTotals
    heartbeats: HeartbeatRate
    quotas: Quotas
    rates: CallerRates
    history: History
    console: ConsoleViews
    tracer: Tracer | None = None
    started_s: float = field(default_factory=time.monotonic)
    scraping: asyncio.Lock = field(default_factory=asyncio.Lock)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)


_bearer = HTTPBearer(auto_error=False, description="A token made by `aqua-coordinator token`.")


# Coroutines although they wait for nothing: FastAPI runs plain functions in a thread pool.


async def _services(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services), "the application has no services"
    return services


async def _caller(
    request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Caller:
    # `RequestLimits` has authenticated; the dependency on the header is for the OpenAPI document.
    caller = request.user
    assert isinstance(caller, Caller), f"{request.url.path} was served without its caller"
    return caller


ServicesDep = Annotated[Services, Depends(_services)]
CallerDep = Annotated[Caller, Depends(_caller)]

MAX_KEY_LENGTH = 128
"""Characters: a UUID takes 36. Doubled, a kept answer takes 128 bytes more."""
KeyText = Annotated[str, Field(min_length=1, max_length=MAX_KEY_LENGTH, pattern=r"^[!-~]+$")]
IdempotencyKey = Annotated[
    KeyText,
    Header(
        alias="Idempotency-Key",
        description="Fresh and random for every new request; the same when it is retried.",
    ),
]

MAX_PAGE: Final = 1000
"""Entries, chosen by hand: some 300 KiB. Doubled, a page keeps other callers waiting longer."""

NameCursor = Annotated[
    Name | None, Query(description="`next_cursor` of the page before; names in ascending order.")
]
PositionCursor = Annotated[
    int | None,
    Query(ge=0, le=MAX_EPOCH, description="`next_cursor` of the page before; oldest first."),
]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Entries on a page, at most.")]


def next_name(names: list[str], limit: int) -> str | None:
    """The cursor after a page of names; a short page is the last."""
    return names[-1] if len(names) == limit else None
