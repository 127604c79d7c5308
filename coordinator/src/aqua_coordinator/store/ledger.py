"""The ledger: every transition of the books as a typed call.

Each Lua step is one atomic transition; the header of its script says what it refuses, as a typed
error of `aqua_protocol`. Time is Redis time, so several coordinators over one Redis agree. When the
books are gone (an empty Redis after a loss), the next call opens new ones and goes on: producers
and consumers report within a heartbeat and fill them again, and until a producer has confirmed
them nothing of it is granted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import structlog

from aqua_coordinator.store import rows
from aqua_coordinator.store.adoption import AdoptionKeys
from aqua_coordinator.store.keys import KEYS
from aqua_coordinator.store.lua_step import lua_step
from aqua_coordinator.store.pipeline import PROBE_TTL_MS, RETRY_AFTER_S, Argument, Pipeline
from aqua_coordinator.store.scripts import CONSTANTS
from aqua_coordinator.store.server_checks import CONFIG_READ, find_faults
from aqua_protocol import CapacityError, ConfigError, LeaseState, UnknownResourceError
from aqua_protocol.errors import StoreUnavailableError
from aqua_protocol.findings import FindingLevel
from aqua_protocol.leases import (
    AttachFailure,
    LeaseRequest,
    LeaseView,
    PlacementPlan,
    QuarantinedRecord,
    QuotaView,
    ReclaimRequest,
    ReclaimView,
)
from aqua_protocol.members import (
    ConsumerReport,
    ConsumerView,
    OfferUpdate,
    OfferView,
    ProducerReport,
)
from aqua_protocol.profile import ModelProfile

if TYPE_CHECKING:
    from aqua_coordinator.settings import CoordinatorSettings

log = structlog.get_logger(__name__)

RowT = TypeVar("RowT")

SECRET_BYTES: Final = 32
"""As long as the SHA-256 of the signatures; doubled, it adds nothing."""
MAX_CACHED_SECRETS: Final = 4
"""Books whose secret is remembered. One is in use; a few, while a loss is being noticed.
Doubled, it keeps more of what no call asks for."""
BORROWED_RETRY_S: Final = 1.0
"""A heartbeat by default: then producers know that they get memory back. Doubled, an owner waits a
second longer for it."""
BORROWED_REMEDY: Final = (
    "Others have borrowed it, and it is asked back; ask again, and spill so far."
)
SEED_BYTES: Final = 16
"""Of randomness that ids are drawn from, as many as a UUID has; doubled, it adds nothing."""
MAX_LOGGED_FAULTS: Final = 10
"""Of one sweep's audit; the quarantine has them all. Doubled, a line of the log is longer."""
SWEEP_BATCH: Final = 256
"""Leases handled in one script of the sweep, about 5 ms of Redis time; doubled, a sweep of many
keeps other callers waiting for 10 ms."""
AUDIT_BATCH: Final = 64
"""Members and leases that one sweep looks at beside its work, or keys of Redis where it looks for
records by name: 0.5 ms of Redis time. Doubled, reports wait twice as long for it, and all of the
books, 20,000 in 160 s and as many keys in 160 s more, are seen in half the time."""


class Ledger:
    """Typed access to the books over a pipeline, which it closes.

    Args:
        pipeline: Closed with the ledger.
        adoption: Keys that leases are proven with to books that were lost.
    """

    def __init__(self, pipeline: Pipeline, adoption: AdoptionKeys | None = None) -> None:
        self._pipeline = pipeline
        self.adoption = adoption or AdoptionKeys.of_this_process()
        self._secrets: dict[str, bytes] = {}
        self._audited_until: str | None = None

    async def open(self, settings: CoordinatorSettings | None = None) -> rows.CurrentBooks:
        """Check what Redis this is and open the books, making them if Redis has none.

        Raises:
            ConfigError: It does not fit; see `server_checks`.
            UnavailableError: Redis does not answer, or takes no writes.
        """
        info: bytes = await self._pipeline.command("INFO")
        said = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
        told: list[bytes] = []
        # Managed services refuse it, each by an error of its own.
        with contextlib.suppress(AssertionError, StoreUnavailableError):
            told = await self._pipeline.command("CONFIG", "GET", *CONFIG_READ)
        words = [word.decode() for word in told]
        config = dict(zip(words[::2], words[1::2], strict=True))
        for fault in find_faults(said, config, settings):
            if fault.level is FindingLevel.FAIL:
                raise ConfigError(fault.message, remedy=fault.remedy)
            log.warning(fault.message, remedy=fault.remedy)
        return await self._create()

    async def probe(self) -> rows.CurrentBooks:
        """Make sure that Redis answers and takes writes.

        Raises:
            UnavailableError: It does not.
        """
        await self._pipeline.command("SET", KEYS["probe"], "1", "PX", PROBE_TTL_MS)
        return await self._create()

    async def close(self) -> None:
        """Close the pipeline."""
        await self._pipeline.close()

    async def secret_of(self, books_id: str) -> bytes:
        """The secret that the books with this name sign capability tokens with.

        Raises:
            StoreUnavailableError: These books were lost a moment ago.
        """
        if books_id not in self._secrets:
            await self._create()
        if books_id not in self._secrets:
            raise StoreUnavailableError("the books were lost during the call", retry_after_s=0.1)
        return self._secrets[books_id]

    # --- Members ---------------------------------------------------------------------

    async def report_producer(
        self, report: ProducerReport, *, as_tenant: str = "", is_bound: int = 0
    ) -> rows.ProducerBooked:
        """Book a producer's full state; what lost books should know again is proven on the way."""
        booked = await self._report_producer(report, "", as_tenant, is_bound)
        if isinstance(booked, list):
            verdicts = json.dumps(self.adoption.verdicts(report, booked))
            booked = await self._report_producer(report, verdicts, as_tenant, is_bound)
        assert isinstance(booked, rows.ProducerBooked), "asked twice for proofs"
        return booked

    @lua_step("report_producer.lua", rows.producer_booked)
    async def _report_producer(
        self, report: ProducerReport, verdicts: str, as_tenant: str, is_bound: int
    ) -> rows.ProducerBooked | list[str]: ...

    @lua_step("report_consumer.lua", rows.consumer_booked)
    async def report_consumer(
        self, report: ConsumerReport, *, as_tenant: str = "", is_bound: int = 0
    ) -> rows.ConsumerBooked:
        """Book a consumer's full state and renew what it names."""

    @lua_step("update_offer.lua", rows.offer)
    async def update_offer(
        self, producer_id: str, update: OfferUpdate, *, as_tenant: str = ""
    ) -> OfferView:
        """Change an offer between two reports."""

    @lua_step("remove_producer.lua", rows.nothing)
    async def remove_producer(
        self, producer_id: str, incarnation: str, *, as_tenant: str = ""
    ) -> None:
        """Remove a producer that has nothing lent."""

    @lua_step("remove_consumer.lua", rows.nothing)
    async def remove_consumer(
        self, consumer_id: str, incarnation: str, *, as_tenant: str = ""
    ) -> None:
        """Remove a consumer and end its rights."""

    # --- Leases ----------------------------------------------------------------------

    async def grant_lease(
        self,
        request: LeaseRequest,
        *,
        idempotency_key: str,
        attach_window_s: float,
        as_tenant: str = "",
    ) -> rows.Grant:
        """Book bytes of one producer under a new lease.

        Where others have borrowed what the tenant may have, it is asked back, and the refusal says
        when to ask again.
        """
        seed = secrets.token_hex(SEED_BYTES)
        try:
            return await self._grant_lease(
                request, idempotency_key, attach_window_s, seed, as_tenant
            )
        except CapacityError as error:
            if error.details.get("borrowed_bytes"):
                await self._reclaim_borrowed(request, as_tenant)
                error.remedy, error.retry_after_s = BORROWED_REMEDY, BORROWED_RETRY_S
            raise

    @lua_step("grant_lease.lua", rows.grant)
    async def _grant_lease(
        self,
        request: LeaseRequest,
        idempotency_key: str,
        attach_window_s: float,
        seed: str,
        as_tenant: str,
    ) -> rows.Grant: ...

    @lua_step("reclaim_borrowed.lua", rows.nothing)
    async def _reclaim_borrowed(self, request: LeaseRequest, as_tenant: str) -> None: ...

    @lua_step("renew_lease.lua", rows.one(rows.lease))
    async def renew_lease(
        self,
        lease_id: str,
        *,
        epoch: int,
        ttl_s: float,
        as_consumer: str | None,
        as_tenant: str = "",
    ) -> LeaseView:
        """Start the time to live anew."""

    @lua_step("release_lease.lua", rows.one(rows.lease))
    async def release_lease(
        self,
        lease_id: str,
        *,
        epoch: int,
        as_consumer: str | None,
        failure: AttachFailure | None = None,
        voice: str = "",
        as_tenant: str = "",
    ) -> LeaseView:
        """Give up the right; harmless when repeated."""

    @lua_step("revoke_lease.lua", rows.one(rows.lease))
    async def revoke_lease(self, lease_id: str, *, epoch: int) -> LeaseView:
        """End the right on an operator's word."""

    # --- Operators -------------------------------------------------------------------

    async def open_reclaim(self, request: ReclaimRequest, *, idempotency_key: str) -> ReclaimView:
        """Ask a producer to take memory back."""
        return await self._open_reclaim(request, idempotency_key, secrets.token_hex(SEED_BYTES))

    @lua_step("open_reclaim.lua", rows.one(rows.reclaim))
    async def _open_reclaim(
        self, request: ReclaimRequest, idempotency_key: str, seed: str
    ) -> ReclaimView: ...

    @lua_step("put_placements.lua", rows.nothing)
    async def put_placements(self, plan: PlacementPlan) -> None:
        """Replace the placer's plan."""

    @lua_step("read_placements.lua", rows.placements)
    async def placements(
        self, *, cursor: str = "", limit: int = 1000, as_tenant: str = ""
    ) -> tuple[PlacementPlan, int, str | None]:
        """The plan in force by consumer, after `cursor`; its size, and the cursor to go on from."""

    @lua_step("put_profile.lua", rows.nothing)
    async def put_profile(self, model: str, profile: str) -> None:
        """Keep a model's profile, JSON, instead of any before."""

    @lua_step("read_profiles.lua", rows.rows(ModelProfile.model_validate_json))
    async def profiles(
        self, *, cursor: str = "", limit: int = 1000, model: str = ""
    ) -> list[ModelProfile]:
        """Profiles by model, after `cursor`; or only of this one."""

    @lua_step("put_quotas.lua", rows.nothing)
    async def put_quotas(self, quotas: str, version: str) -> None:
        """Replace the quotas; see `Quotas.fields` for the JSON."""

    @lua_step("read_quotas.lua", rows.rows(rows.quota))
    async def quotas(
        self, *, cursor: str = "", limit: int = 100, as_tenant: str = ""
    ) -> list[QuotaView]:
        """Tenants by name with their quotas, after `cursor`; or only this one."""

    # --- Reading ---------------------------------------------------------------------

    @lua_step("read_books.lua", rows.summary)
    async def summary(
        self, producers_after: str = "", consumers_after: str = "", limit: int = 100
    ) -> rows.BooksSummary:
        """Counts of the books as a whole, and sums over a part of the members."""

    @lua_step("read_producers.lua", rows.rows(rows.producer))
    async def producers(
        self, *, cursor: str = "", limit: int = 100, producer_id: str = "", as_tenant: str = ""
    ) -> list[rows.ProducerRow]:
        """Producers by name, after `cursor`; or only this one."""

    async def producer(self, producer_id: str, *, as_tenant: str = "") -> rows.ProducerRow:
        """Read one producer."""
        found = await self.producers(producer_id=producer_id, as_tenant=as_tenant)
        return _only(found, "producer", producer_id)

    @lua_step("read_consumers.lua", rows.rows(rows.consumer))
    async def consumers(
        self, *, cursor: str = "", limit: int = 100, consumer_id: str = "", as_tenant: str = ""
    ) -> list[ConsumerView]:
        """Consumers by name, after `cursor`; or only this one."""

    async def consumer(self, consumer_id: str, *, as_tenant: str = "") -> ConsumerView:
        """Read one consumer."""
        found = await self.consumers(consumer_id=consumer_id, as_tenant=as_tenant)
        return _only(found, "consumer", consumer_id)

    @lua_step("read_leases.lua", rows.page(rows.lease))
    async def leases(
        self,
        *,
        cursor: str | None = None,
        limit: int = 100,
        lease_id: str = "",
        state: LeaseState | None = None,
        producer_id: str = "",
        consumer_id: str = "",
        as_tenant: str = "",
    ) -> tuple[list[LeaseView], str | None]:
        """Booked leases by producer and grant, and the cursor to go on from (None at the end)."""

    async def lease(self, lease_id: str, *, as_tenant: str = "") -> LeaseView:
        """One lease, also for a while after its end."""
        found, _ = await self.leases(lease_id=lease_id, as_tenant=as_tenant)
        return _only(found, "lease", lease_id)

    @lua_step("read_reclaims.lua", rows.page(rows.reclaim))
    async def reclaims(
        self,
        *,
        cursor: int | str | None = None,
        limit: int = 100,
        reclaim_id: str = "",
        as_tenant: str = "",
    ) -> tuple[list[ReclaimView], str | None]:
        """Reclaims in the order they were opened, and the cursor to go on from."""

    async def reclaim(self, reclaim_id: str, *, as_tenant: str = "") -> ReclaimView:
        """One reclaim, also for a while after its end."""
        found, _ = await self.reclaims(reclaim_id=reclaim_id, as_tenant=as_tenant)
        return _only(found, "reclaim", reclaim_id)

    async def events(self, *, after: str, limit: int = 256) -> list[rows.TenantEvent]:
        """Events after a position, oldest first; `0` is before the first."""
        found = await self._pipeline.command(
            "XRANGE", KEYS["events"], f"({after}", "+", "COUNT", limit
        )
        return rows.entries(rows.event, found)

    async def last_event_id(self) -> str:
        """Position of the latest event, `0-0` when there is none."""
        entries = await self._pipeline.command("XREVRANGE", KEYS["events"], "+", "-", "COUNT", 1)
        return str(entries[0][0].decode()) if entries else "0-0"

    async def quarantined(
        self, *, cursor: str | None = None, limit: int = 100
    ) -> tuple[list[QuarantinedRecord], str | None]:
        """Records that were set aside, oldest first, and the cursor to go on from."""
        start = f"({cursor}" if cursor else "-"
        entries = await self._pipeline.command(
            "XRANGE", KEYS["quarantine"], start, "+", "COUNT", limit
        )
        records = [rows.quarantined(*entry) for entry in entries]
        return records, records[-1].position if len(records) == limit else None

    # --- Keeping ---------------------------------------------------------------------

    @lua_step("advance_clock.lua", rows.durations)
    async def advance_clock(
        self, *, silent_s: float, max_stop_s: float, is_refusing: int, is_present: int
    ) -> list[float]:
        """Let the clock go on since the last call, or stand.

        Gives the seconds between two reports of a member that the number of members asks for, and
        the seconds of silence after which one is lost.
        """

    async def sweep(self, *, silent_s: float) -> int:
        """One round of expiry and a page of the audit, for any number of coordinators at once.

        Returns:
            How many leases and members it ended.
        """
        ended = await _until_done(self._expire_leases)
        ended += await _until_done(partial(self._lose_silent_members, silent_s))
        await _until_done(self._forget_reclaims)
        gone = await self._announce_library(self._pipeline.library_name)
        await self._pipeline.forget_libraries(gone)
        faults, self._audited_until = await self._audit_books(self._audited_until, AUDIT_BATCH)
        if faults:
            log.warning("books put right", count=len(faults), faults=faults[:MAX_LOGGED_FAULTS])
        return ended

    async def audit(self) -> list[str]:
        """Look at all of the books at once; returns what was wrong until now, as sentences."""
        faults, cursor = await self._audit_books("", SWEEP_BATCH)
        while cursor:
            more, cursor = await self._audit_books(cursor, SWEEP_BATCH)
            faults += more
        return faults

    @lua_step("expire_leases.lua", rows.one(int))
    async def _expire_leases(self, limit: int) -> int: ...

    @lua_step("lose_silent_members.lua", rows.one(int))
    async def _lose_silent_members(self, silent_s: float, limit: int) -> int: ...

    @lua_step("forget_reclaims.lua", rows.one(int))
    async def _forget_reclaims(self, limit: int) -> int: ...

    @lua_step("announce_library.lua", rows.rows(rows.text))
    async def _announce_library(self, library: str) -> list[str]: ...

    @lua_step("audit_books.lua", rows.page(rows.text))
    async def _audit_books(
        self, cursor: str | None, limit: int
    ) -> tuple[list[str], str | None]: ...

    @lua_step("keep_sample.lua", rows.nothing)
    async def keep_sample(self, sums: str) -> None:
        """Remember sums over all members, for who looks back, unless that was done just now."""

    async def run(self, script: str, *arguments: Argument) -> Sequence[Any]:
        """Run a script over the books, which are opened anew if they are gone.

        Raises:
            AquaError: The script refuses.
            UnavailableError: Redis does not answer, or takes no writes.
        """
        answer: Sequence[Any] = await self._pipeline.script(script, *arguments)
        if answer[0] == b"no_books":
            await self._create()
            answer = await self._pipeline.script(script, *arguments)
        if answer[0] == b"schema":
            raise StoreUnavailableError(
                f"the books are of schema {answer[1]}, this version reads "
                f"{CONSTANTS['min_schema']} to {CONSTANTS['max_schema']}",
                remedy="Run the version that the other coordinators of this Redis run.",
                retry_after_s=RETRY_AFTER_S,
            )
        if answer[0] != b"ok":
            raise rows.refusal(answer)
        return answer

    @lua_step("create_books.lua", rows.opened)
    async def _create_books(self, books_id: str, secret: str) -> rows.CurrentBooks: ...

    async def _create(self) -> rows.CurrentBooks:
        name, secret = f"books-{secrets.token_hex(8)}", secrets.token_hex(SECRET_BYTES)
        opened = await self._create_books(name, secret)
        self._secrets[opened.books_id] = opened.secret
        while len(self._secrets) > MAX_CACHED_SECRETS:
            self._secrets.pop(next(iter(self._secrets)))
        return opened


async def _until_done(step: Callable[[int], Awaitable[int]]) -> int:
    """Repeat a step of the sweep until it finds less than it may handle; counts what it handled."""
    total = handled = await step(SWEEP_BATCH)
    while handled == SWEEP_BATCH:
        await asyncio.sleep(0)
        handled = await step(SWEEP_BATCH)
        total += handled
    return total


def _only(found: Sequence[RowT], noun: str, name: str) -> RowT:
    if not found:
        raise UnknownResourceError(f"there is no {noun} {name}", noun=noun, name=name)
    return found[0]
