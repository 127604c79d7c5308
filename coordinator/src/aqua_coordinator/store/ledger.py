"""The books: every transition as a typed call.

Each method is one script, hence one atomic step; the script's header says what it refuses. Time is
Redis time, so several coordinators over one Redis agree. When the books are gone (an empty Redis
after a loss), the next call opens new ones and goes on: producers and consumers report within a
heartbeat and fill them again, and until a producer has confirmed them nothing of it is granted.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from aqua_coordinator.store import rows
from aqua_coordinator.store.keys import KEYS
from aqua_coordinator.store.pipeline import Argument, Pipeline
from aqua_coordinator.store.scripts import ScriptName
from aqua_protocol import (
    ConfigError,
    LeaseState,
    StoreUnavailableError,
    UnknownResourceError,
)
from aqua_protocol.leases import (
    Event,
    LeaseRequest,
    LeaseView,
    Pairing,
    PlacementPlan,
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

MIN_REDIS_VERSION: Final = (7, 0)
"""First with libraries of functions, whose flags make a refused write refuse the whole script."""
PROBE_TTL_MS: Final = 10_000
SECRET_BYTES: Final = 32
MAX_CACHED_SECRETS: Final = 4
SWEEP_BATCH: Final = 256
"""Leases handled in one script of the sweep: about 5 ms of Redis time."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The books that are open now."""

    books_id: str
    secret: bytes


LeaseCursor: TypeAlias = tuple[str, str]
"""A producer, and the grant epoch of the last lease of it that has been listed."""


class Ledger:
    """Typed access to the books over a pipeline, which it closes."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._secrets: dict[str, bytes] = {}

    async def open(self) -> Opened:
        """Check the Redis version and open the books, making them if Redis has none.

        Raises:
            ConfigError: Redis is too old.
            UnavailableError: Redis does not answer, or takes no writes.
        """
        info: bytes = await self._pipeline.command("INFO", "server")
        version = _version_in(info.decode())
        if version < MIN_REDIS_VERSION:
            raise ConfigError(
                f"this Redis is {'.'.join(map(str, version))}, Aqua needs 7.0 or newer",
                remedy="Upgrade it, use Valkey, or unset AQUA_REDIS_URL to run an embedded one.",
            )
        await self._pipeline.forget_other_libraries()
        return await self._create()

    async def probe(self) -> Opened:
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
        known = self._secrets.get(books_id)
        if known is None:
            await self._create()
            known = self._secrets.get(books_id)
        if known is None:
            raise StoreUnavailableError("the books were lost during the call", retry_after_s=0.1)
        return known

    # --- Members ---------------------------------------------------------------------

    async def report_producer(self, report: ProducerReport) -> rows.ProducerBooked:
        """Book a producer's full state."""
        text = report.model_dump_json(exclude_none=True)
        answer = await self._run(ScriptName.REPORT_PRODUCER, text, _fingerprint(text))
        return rows.producer_booked(answer)

    async def report_consumer(self, report: ConsumerReport) -> rows.ConsumerBooked:
        """Book a consumer's full state and renew what it names."""
        text = report.model_dump_json(exclude_none=True)
        answer = await self._run(ScriptName.REPORT_CONSUMER, text, _fingerprint(text))
        return rows.consumer_booked(answer)

    async def update_offer(self, producer_id: str, update: OfferUpdate) -> OfferView:
        """Change an offer between two reports."""
        answer = await self._run(
            ScriptName.UPDATE_OFFER,
            producer_id,
            update.incarnation,
            update.revision,
            update.offered_bytes,
        )
        return rows.offer_view(answer)

    async def remove_producer(self, producer_id: str, incarnation: str) -> None:
        """Let a producer go that has nothing lent."""
        await self._run(ScriptName.REMOVE_PRODUCER, producer_id, incarnation)

    async def remove_consumer(self, consumer_id: str, incarnation: str) -> None:
        """Let a consumer go; its rights end."""
        await self._run(ScriptName.REMOVE_CONSUMER, consumer_id, incarnation)

    # --- Leases ----------------------------------------------------------------------

    async def grant_lease(
        self, request: LeaseRequest, *, idempotency_key: str, attach_window_s: float
    ) -> rows.Grant:
        """Book bytes of one producer."""
        least = request.bytes if request.min_bytes is None else request.min_bytes
        ttl_us = round(request.ttl_s * rows.MICROSECONDS)
        answer = await self._run(
            ScriptName.GRANT_LEASE,
            idempotency_key,
            f"{request.consumer_id} {request.bytes} {least} {ttl_us}",
            request.consumer_id,
            request.bytes,
            least,
            ttl_us,
            round(attach_window_s * rows.MICROSECONDS),
        )
        return rows.grant(answer[1].decode(), answer[2].decode())

    async def renew_lease(
        self, lease_id: str, *, epoch: int, ttl_s: float, as_consumer: str | None
    ) -> LeaseView:
        """Start the time to live anew."""
        ttl_us = round(ttl_s * rows.MICROSECONDS)
        answer = await self._run(ScriptName.RENEW_LEASE, lease_id, epoch, ttl_us, as_consumer or "")
        return rows.lease_view(answer[1])

    async def release_lease(
        self, lease_id: str, *, epoch: int, as_consumer: str | None
    ) -> LeaseView:
        """Give up the right; harmless when repeated."""
        answer = await self._run(ScriptName.RELEASE_LEASE, lease_id, epoch, as_consumer or "")
        return rows.lease_view(answer[1])

    async def revoke_lease(self, lease_id: str, *, epoch: int) -> LeaseView:
        """End the right on an operator's word."""
        answer = await self._run(ScriptName.REVOKE_LEASE, lease_id, epoch)
        return rows.lease_view(answer[1])

    # --- Operators -------------------------------------------------------------------

    async def open_reclaim(self, request: ReclaimRequest, *, idempotency_key: str) -> ReclaimView:
        """Ask a producer to take memory back."""
        answer = await self._run(
            ScriptName.OPEN_RECLAIM,
            idempotency_key,
            f"{request.producer_id} {request.bytes} {request.deadline_s!r}",
            request.producer_id,
            request.bytes,
            repr(request.deadline_s),
        )
        return await self.reclaim(answer[1].decode())

    async def put_placements(self, plan: PlacementPlan) -> None:
        """Replace the placer's plan."""
        arguments: list[Argument] = [plan.plan_hash]
        for pairing in plan.pairings:
            arguments += [pairing.consumer_id, " ".join(pairing.producers), pairing.reason]
        await self._run(ScriptName.PUT_PLACEMENTS, *arguments)

    async def placements(self) -> PlacementPlan:
        """The plan in force."""
        _, plan_hash, pairings, reasons = await self._run(ScriptName.READ_PLACEMENTS)
        reason_of = {
            name.decode(): reason.decode()
            for name, reason in zip(reasons[::2], reasons[1::2], strict=True)
        }
        return PlacementPlan(
            plan_hash=plan_hash.decode(),
            pairings=[
                Pairing(
                    consumer_id=name.decode(),
                    producers=producers.decode().split(),
                    reason=reason_of.get(name.decode(), ""),
                )
                for name, producers in sorted(zip(pairings[::2], pairings[1::2], strict=True))
            ],
        )

    async def put_profile(self, profile: ModelProfile) -> None:
        """Keep a model's profile, instead of any before."""
        await self._run(ScriptName.PUT_PROFILE, profile.model, profile.model_dump_json())

    async def profiles(self, model: str = "") -> list[ModelProfile]:
        """Profiles by model; of one model, if it is named."""
        _, found = await self._run(ScriptName.READ_PROFILES, model)
        profiles = [ModelProfile.model_validate_json(text) for text in found]
        return sorted(profiles, key=lambda profile: profile.model)

    # --- Reading ---------------------------------------------------------------------

    async def summary(self) -> rows.BooksSummary:
        """Counts and names of the books as a whole."""
        return rows.summary(await self._run(ScriptName.READ_BOOKS))

    async def producers(self, *, cursor: str = "", limit: int = 100) -> list[rows.ProducerRow]:
        """Producers by name, after `cursor`."""
        answer = await self._run(ScriptName.READ_PRODUCERS, cursor, limit, "")
        return [rows.producer_row(row) for row in answer[1]]

    async def producer(self, producer_id: str) -> rows.ProducerRow:
        """One producer."""
        answer = await self._run(ScriptName.READ_PRODUCERS, "", 1, producer_id)
        row: Sequence[Any] = _only(answer[1], "producer", producer_id)
        return rows.producer_row(row)

    async def consumers(self, *, cursor: str = "", limit: int = 100) -> list[ConsumerView]:
        """Consumers by name, after `cursor`."""
        answer = await self._run(ScriptName.READ_CONSUMERS, cursor, limit, "")
        return [rows.consumer_view(row) for row in answer[1]]

    async def consumer(self, consumer_id: str) -> ConsumerView:
        """One consumer."""
        answer = await self._run(ScriptName.READ_CONSUMERS, "", 1, consumer_id)
        return rows.consumer_view(_only(answer[1], "consumer", consumer_id))

    async def leases(
        self,
        *,
        cursor: LeaseCursor | None = None,
        limit: int = 100,
        state: LeaseState | None = None,
        producer_id: str = "",
        consumer_id: str = "",
    ) -> tuple[list[LeaseView], LeaseCursor | None]:
        """Booked leases by producer and grant, and the cursor to go on from (None at the end)."""
        answer = await self._run(
            ScriptName.READ_LEASES,
            *(cursor or ("", "")),
            limit,
            "",
            state or "",
            producer_id,
            consumer_id,
        )
        _, at_producer, at_epoch, found = answer
        position = (at_producer.decode(), at_epoch.decode()) if at_producer else None
        return [rows.lease_view(row) for row in found], position

    async def lease(self, lease_id: str) -> LeaseView:
        """One lease, also for a while after its end."""
        answer = await self._run(ScriptName.READ_LEASES, "", "", 1, lease_id, "", "", "")
        return rows.lease_view(_only(answer[3], "lease", lease_id))

    async def reclaims(
        self, *, cursor: int | None = None, limit: int = 100
    ) -> tuple[list[ReclaimView], int | None]:
        """Reclaims in the order they were opened, and the cursor to go on from."""
        answer = await self._run(
            ScriptName.READ_RECLAIMS, "" if cursor is None else cursor, limit, ""
        )
        return [rows.reclaim_view(row) for row in answer[2]], _position(answer[1])

    async def reclaim(self, reclaim_id: str) -> ReclaimView:
        """One reclaim, also for a while after its end."""
        answer = await self._run(ScriptName.READ_RECLAIMS, "", 1, reclaim_id)
        return rows.reclaim_view(_only(answer[2], "reclaim", reclaim_id))

    async def events(self, *, after: str, limit: int = 256) -> list[Event]:
        """Events after a position, oldest first; `0` is before the first."""
        entries = await self._pipeline.command(
            "XRANGE", KEYS["events"], f"({after}", "+", "COUNT", limit
        )
        return [rows.event(event_id, fields[1]) for event_id, fields in entries]

    async def last_event_id(self) -> str:
        """Position of the latest event, `0-0` when there is none."""
        entries = await self._pipeline.command("XREVRANGE", KEYS["events"], "+", "-", "COUNT", 1)
        return str(entries[0][0].decode()) if entries else "0-0"

    # --- Keeping ---------------------------------------------------------------------

    async def sweep(self, *, silent_s: float) -> int:
        """One round of expiry, for any number of coordinators at once; counts what it ended."""
        ended = await self._repeat(ScriptName.EXPIRE_LEASES)
        ended += await self._repeat(
            ScriptName.LOSE_SILENT_MEMBERS, round(silent_s * rows.MICROSECONDS)
        )
        await self._repeat(ScriptName.FORGET_RECLAIMS)
        return ended

    async def audit(self) -> list[str]:
        """Rules that the books break, as sentences; empty when all is well."""
        answer = await self._run(ScriptName.AUDIT_BOOKS)
        return [fault.decode() for fault in answer[1]]

    async def _repeat(self, name: ScriptName, *arguments: Argument) -> int:
        total = 0
        while True:
            answer = await self._run(name, *arguments, SWEEP_BATCH)
            count = int(answer[1])
            total += count
            if count < SWEEP_BATCH:
                return total
            await asyncio.sleep(0)

    async def _run(self, name: ScriptName, *arguments: Argument) -> Sequence[Any]:
        answer: Sequence[Any] = await self._pipeline.script(name, *arguments)
        if answer[0] == b"ok":
            return answer
        if answer[0] == b"no_books":
            await self._create()
            answer = await self._pipeline.script(name, *arguments)
            if answer[0] == b"ok":
                return answer
        raise rows.refusal(answer)

    async def _create(self) -> Opened:
        name, secret = f"books-{secrets.token_hex(8)}", secrets.token_hex(SECRET_BYTES)
        answer = await self._pipeline.script(ScriptName.CREATE_BOOKS, name, secret)
        opened = Opened(answer[1].decode(), bytes.fromhex(answer[2].decode()))
        self._secrets[opened.books_id] = opened.secret
        while len(self._secrets) > MAX_CACHED_SECRETS:
            self._secrets.pop(next(iter(self._secrets)))
        return opened


def _only(found: Sequence[Sequence[Any]], noun: str, name: str) -> Sequence[Any]:
    if not found:
        raise UnknownResourceError(f"there is no {noun} {name}", noun=noun, name=name)
    return found[0]


def _position(raw: bytes) -> int | None:
    return int(float(raw)) if raw else None


def _fingerprint(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _version_in(info: str) -> tuple[int, ...]:
    for line in info.splitlines():
        name, _, value = line.partition(":")
        if name == "redis_version":
            return tuple(int(part) for part in value.split(".")[:2])
    raise ConfigError("the server at AQUA_REDIS_URL does not say its version")
