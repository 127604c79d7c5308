"""The console's answers, made once for all who look at the same time.

The only thing that a process keeps of the console: an answer of each kind for each tenant. It is
given again as long as no event has been written since, for a second at most, and in any case for
some times as long as it took to make; so a large cluster is drawn less often, and however many
people look, drawing takes a bounded part of the coordinator's time.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from pydantic import BaseModel, Field

from aqua_coordinator.console import batch_markup, markup, reasons
from aqua_coordinator.console.batch_watch import BatchWatch
from aqua_coordinator.console.snapshot import Snapshot, read_snapshot
from aqua_coordinator.store import Ledger
from aqua_coordinator.store.history import History, Sample
from aqua_protocol import UnavailableError, UnknownResourceError
from aqua_protocol.leases import EndedReclaim

AnswerT = TypeVar("AnswerT")

MAX_AGE_S: Final = 1.0
"""Of an answer: what no event tells of (what is spilled) changes with reports, one a second by
default. Doubled, it is seen a second later."""
REST: Final = 4.0
"""Times as long as an answer took to make, it is given again. Doubled, drawing takes a ninth of the
coordinator's time at most instead of a fifth, and large clusters are redrawn half as often."""
MAX_ANSWERS: Final = 64
"""Kept, some hundred kilobytes each for a large cluster. Doubled, so is that."""
HOUR_S: Final = 3600.0
"""What the timeline shows; fixed by its name."""
MAX_RECLAIMS: Final = 1000
"""On the timeline: more cannot be told apart. Doubled, its answer has half a megabyte."""
EVENTS_READ: Final = 400
"""To find those among them that are shown, 4 ms. Doubled, so is that."""
EVENTS_SHOWN: Final = 60
"""Of what happened, chosen by hand: three screens. Doubled, its answer has 16 KiB."""


class TimelineReclaim(BaseModel):
    """A reclaim on the timeline."""

    at_s: float = Field(description="Unix time at which the books heard of its end.")
    sentence: str = Field(description="How it went and who wanted it, for people.")
    reclaim: EndedReclaim


class ConsoleTimeline(BaseModel):
    """The last hour; columns of equal length, oldest first, and reclaims, latest first."""

    now_s: float = Field(description="Unix time of the coordinator.")
    at_s: list[float] = Field(description="Unix times of the sums; the last one is now.")
    offered_bytes: list[int]
    leased_bytes: list[int]
    spilled_bytes: list[int]
    wanted_bytes: list[int]
    reclaims: list[TimelineReclaim]


@dataclass(slots=True)
class _Kept:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    answer: Any = None
    event_id: str = ""
    made_s: float = -MAX_AGE_S
    took_s: float = 0.0


class ConsoleViews:
    """Makes what the page asks for."""

    def __init__(
        self,
        ledger: Ledger,
        history: History,
        clock: Callable[[], float] = time.monotonic,
        batch_watch: BatchWatch | None = None,
    ) -> None:
        self._clock = clock
        self._batch_watch = batch_watch
        self._ledger = ledger
        self._history = history
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()

    async def cluster(self, tenant: str) -> str:
        """Figures and domains, as HTML.

        Raises:
            UnavailableError: Redis does not answer.
        """

        async def make() -> str:
            parts = []
            for part in markup.cluster_markup(await self._snapshot(tenant)):
                parts.append(part)
                await asyncio.sleep(0)  # Reports come between two domains.
            return "".join(parts)

        return await self._once("cluster", tenant, make)

    async def happened(self, tenant: str) -> str:
        """What happened of late, as HTML, latest first.

        Raises:
            UnavailableError: Redis does not answer.
        """

        async def make() -> str:
            events = [
                event
                for event in await self._history.latest_events(EVENTS_READ)
                if event.is_visible(tenant)
            ]
            return markup.happened_markup(events[:EVENTS_SHOWN])

        return await self._once("happened", tenant, make)

    async def batches(self) -> str:
        """How batches of all tenants are going, as HTML; nothing where there is no batch service.

        It has a sentence where the service does not answer: that is no fault of the page's.
        """
        if self._batch_watch is None:
            return ""
        try:
            return batch_markup.batches_markup(await self._batch_watch.overview())
        except UnavailableError as error:
            return batch_markup.no_batches_markup(error.message)

    async def member(self, tenant: str, role: str, name: str) -> str:
        """Everything there is to say of a member, as HTML.

        Raises:
            UnavailableError: Redis does not answer.
            UnknownResourceError: The tenant sees no such member.
        """
        snapshot = await self._snapshot(tenant)
        if role == "producers":
            for producer in snapshot.producers:
                if producer.producer_id == name:
                    return markup.member_markup(name, reasons.producer_reasons(snapshot, producer))
        else:
            for consumer in snapshot.consumers:
                if consumer.consumer_id == name:
                    return markup.member_markup(name, reasons.consumer_reasons(snapshot, consumer))
        raise UnknownResourceError(f"there is no member {name}", noun="member", name=name)

    async def timeline(self, tenant: str) -> ConsoleTimeline:
        """The last hour; to a tenant its reclaims, and sums of now alone.

        Raises:
            UnavailableError: Redis does not answer.
        """
        return await self._once("timeline", tenant, lambda: self._timeline(tenant))

    async def _timeline(self, tenant: str) -> ConsoleTimeline:
        snapshot = await self._snapshot(tenant)
        since_s = snapshot.at_s - HOUR_S
        samples = [] if tenant else await self._history.samples(since_s)
        producers, consumers = snapshot.producers, snapshot.consumers
        samples.append(
            Sample(
                max(snapshot.at_s, samples[-1].at_s if samples else 0.0),
                sum(row.offered_bytes for row in producers),
                sum(row.leased_bytes for row in producers),
                sum(row.wanted_bytes for row in consumers),
                sum(row.spilled_bytes for row in consumers),
            )
        )
        past = await self._history.reclaims(since_s, MAX_RECLAIMS)
        at_s, offered, leased, wanted, spilled = (
            list(column) for column in zip(*samples, strict=True)
        )
        return ConsoleTimeline(
            now_s=snapshot.at_s,
            at_s=at_s,
            offered_bytes=offered,
            leased_bytes=leased,
            wanted_bytes=wanted,
            spilled_bytes=spilled,
            reclaims=[
                TimelineReclaim(
                    at_s=one.at_s,
                    sentence=reasons.reclaim_sentence(one.reclaim),
                    reclaim=one.reclaim,
                )
                for one in past
                if tenant in {"", one.tenant}
            ],
        )

    async def _snapshot(self, tenant: str) -> Snapshot:
        return await self._once("snapshot", tenant, lambda: read_snapshot(self._ledger, tenant))

    async def _once(
        self, kind: str, tenant: str, make: Callable[[], Awaitable[AnswerT]]
    ) -> AnswerT:
        """The answer that is there, or a new one; who comes meanwhile waits for it."""
        kept = self._kept.setdefault((kind, tenant), _Kept())
        self._kept.move_to_end((kind, tenant))
        while len(self._kept) > MAX_ANSWERS:
            self._kept.popitem(last=False)
        async with kept.lock:
            age_s = self._clock() - kept.made_s
            event_id = await self._ledger.last_event_id()
            is_new = age_s < REST * kept.took_s
            if not is_new and not (event_id == kept.event_id and age_s < MAX_AGE_S):
                begun_s = self._clock()
                kept.answer = await make()
                kept.event_id, kept.made_s = event_id, self._clock()
                kept.took_s = min(kept.made_s - begun_s, MAX_AGE_S)
            answer: AnswerT = kept.answer
            return answer
