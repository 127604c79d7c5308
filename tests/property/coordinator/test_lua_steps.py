"""Every step of the books, over records and with arguments that nobody would have thought of.

Steps check, and then write. So an error that a step raises has changed nothing: all of Redis is
then what it was, bit for bit. And records, whatever they hold, are no reason for an error at all.

The steps are those that the library has, each with arguments that suit the books; a new one has to
be called here, or the first test says so.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.store import Ledger
from aqua_coordinator.store.keys import KEYS
from aqua_coordinator.store.scripts import SCRIPTS, load_library
from aqua_protocol.leases import (
    AttachFailure,
    LeaseView,
    Pairing,
    PlacementPlan,
    ReclaimRequest,
)
from aqua_protocol.members import OfferUpdate, ReclaimReport
from aqua_protocol.profile import ModelProfile, ProfileLabel
from harness.ledger_room import ATTACH_WINDOW_S, LedgerRoom, ledger_room
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer
from harness.poison import ODD, Snapshot, poison, restore, snapshot_of
from harness.slices import examples
from harness.store_servers import running_store

Call: TypeAlias = tuple[str, tuple[Any, ...]]
"""A step, and its arguments."""

LIBRARY: Final = load_library()
QUOTAS: Final = [
    *("team-a", f"{4 * SLAB} - 0 - cohort", "team-b", f"{60 * SLAB} - 0 - cohort"),
    *("@cohort", f"{64 * SLAB}|team-a 0 {4 * SLAB} team-b 0 {60 * SLAB}"),
    *("/consumer-1", str(40 * SLAB)),
]
"""What `put_quotas` is given: one tenant has borrowed of the other."""
BRIEF: Final = settings(
    max_examples=examples(100, whole=3000), deadline=None, suppress_health_check=list(HealthCheck)
)


class _Captured(BaseException):
    """A step was about to be called."""


class _Capture:
    """A pipeline that notes the first call, which is then not made."""

    library_name = LIBRARY.name

    def script(self, name: str, *arguments: object) -> Awaitable[Any]:
        raise _Captured(name, arguments)


@dataclass
class Stage:
    """Books with something of everything in them, which can be had anew for each example."""

    client: redis.Redis
    books: Snapshot
    calls: list[Call]

    def reset(self) -> None:
        restore(self.client, self.books)

    def call(self, name: str, *arguments: Any) -> Any:  # noqa: ANN401 - as redis-py has them
        return self.client.fcall(LIBRARY.function(name), 1, KEYS["books"], *arguments)

    def fault(self, name: str, *arguments: Any) -> str:  # noqa: ANN401 - as above
        """The error that the step raises, or nothing."""
        try:
            self.call(name, *arguments)
        except redis.ResponseError as error:
            return str(error)
        return ""


async def furnish(room: LedgerRoom) -> list[Call]:
    """Fill the books, and say how each step can be called on them."""
    lender, other = (PaperProducer(name=f"lender-{n}") for n in range(2))
    llm, rival = (PaperConsumer(name=f"consumer-{n}") for n in range(2))
    idle = PaperProducer(name="idle", domain="elsewhere")
    for producer in (lender, other, idle):
        await room.join(producer)
    await room.ledger.put_quotas(json.dumps(QUOTAS), "v")
    for consumer, tenant in ((llm, "team-a"), (rival, "team-b")):
        await room.ledger.report_consumer(consumer.report(), as_tenant=tenant)
    pairs = ((llm, [lender, other]), (rival, [other]))
    pairings = [
        Pairing(consumer_id=one.name, producers=[p.name for p in some], reason="near")
        for one, some in pairs
    ]
    plan = PlacementPlan(plan_hash="plan", pairings=pairings)
    await room.ledger.put_placements(plan)
    profile = ModelProfile(model="m", label=ProfileLabel.CONSUMER, needed_bytes=SLAB)
    await room.ledger.put_profile("m", profile.model_dump_json())
    active, back, lost = [await room.attached(lender, llm, 2) for _ in range(3)]
    granted = [(await room.grant(llm, 1)).lease for _ in range(2)]
    await room.attached(other, rival, 2)
    ended = await room.attached(lender, llm, 1)
    lender.take_back(ended)
    order = ReclaimRequest(producer_id=lender.name, bytes=SLAB)
    orders = [await room.ledger.open_reclaim(order, idempotency_key=f"o{n}") for n in range(2)]
    lender.reclaims = [_reclaim("own"), _reclaim(orders[0].reclaim_id)]
    llm.use(LeaseView(**(active.model_dump() | {"lease_id": "lease-nobody-has"})))
    await room.ledger.release_lease(
        granted[1].lease_id,
        epoch=granted[1].epoch,
        as_consumer=None,
        failure=AttachFailure.UNREACHABLE,
        voice="token",
    )
    await room.ledger.put_placements(plan.model_copy(update={"pairings": pairings[:1]}))
    await room.tell(lender)
    await room.hear(llm)
    await room.sweep()
    lender.take_back(back)
    lender.hand_out(lost, consumer_lost=True, reclaiming_bytes=SLAB)
    lender.hand_out(granted[0])
    lender.reclaims = [_reclaim("own", total_ms=2.5), _reclaim("new")]
    silent = PaperProducer(name="stranger", domain="elsewhere")
    reborn = PaperProducer(name=other.name, incarnation="life-2")
    update = OfferUpdate(
        incarnation=other.incarnation, revision=other.revision + 1, offered_bytes=8 * SLAB
    )
    ledger = Ledger(_Capture())  # type: ignore[arg-type] # all of it that steps use
    where = {"epoch": active.epoch}
    page: dict[str, Any] = {"limit": 10}
    works: list[Any] = [
        *(ledger.report_producer(p.report()) for p in (lender, other, silent, reborn)),
        *(ledger.report_consumer(c.report()) for c in (llm, rival, PaperConsumer(name="third"))),
        ledger.update_offer(other.name, update),
        *(ledger.remove_producer(p.name, p.incarnation) for p in (lender, idle)),
        *(ledger.remove_consumer(c.name, c.incarnation) for c in (llm, rival)),
        ledger.grant_lease(
            llm.request(2), idempotency_key="fresh", attach_window_s=ATTACH_WINDOW_S
        ),
        ledger.grant_lease(
            rival.request(40, min_bytes=SLAB),
            idempotency_key="next",
            attach_window_s=ATTACH_WINDOW_S,
        ),
        ledger.grant_lease(
            llm.request(1), idempotency_key="key-0", attach_window_s=ATTACH_WINDOW_S
        ),
        *(
            ledger.renew_lease(lease.lease_id, epoch=lease.epoch, ttl_s=30, as_consumer=None)
            for lease in (active, granted[0], ended)
        ),
        *(
            ledger.release_lease(
                lease.lease_id, epoch=lease.epoch, as_consumer=None, failure=failure, voice="v"
            )
            for lease in (active, granted[0], granted[1], ended)
            for failure in (None, AttachFailure.UNREACHABLE, AttachFailure.UNUSABLE)
        ),
        *(ledger.revoke_lease(lease.lease_id, epoch=lease.epoch) for lease in (active, ended)),
        *(ledger.open_reclaim(order, idempotency_key=key) for key in ("o0", "fresh")),
        ledger.put_placements(plan),
        ledger.put_quotas(json.dumps(QUOTAS), "v"),
        ledger.quotas(),
        ledger.put_profile("m", profile.model_dump_json()),
        *(read(**page) for read in (ledger.producers, ledger.consumers, ledger.leases)),
        *(read(**page) for read in (ledger.reclaims, ledger.placements, ledger.profiles)),
        ledger.summary(),
        ledger.keep_sample("4 3 2 1"),
        ledger.lease(active.lease_id),
        ledger.reclaim("own"),
        ledger.leases(cursor=f"{lender.name}@{where['epoch']}", **page),
        *(
            ledger.advance_clock(
                silent_s=20, max_stop_s=60, is_refusing=refusing, is_present=1 - refusing
            )
            for refusing in (0, 1)
        ),
    ]
    calls: list[Call] = [
        ("report_producer", (lender.report().model_dump_json(exclude_none=True), "{}", "", 0)),
        ("reclaim_borrowed", (rival.request(20).model_dump_json(exclude_none=True), "team-b")),
        *(("lose_silent_members", (silent_us, 10)) for silent_us in (20_000_000, -(10**12))),
        *((step, (10,)) for step in ("expire_leases", "forget_reclaims")),
        ("announce_library", (LIBRARY.name,)),
        ("create_books", ("books-1", "00ff")),
        *(("audit_books", (at, 2)) for at in ("", "p lender-0", "c ", "d 0", "r 0")),
        ("audit_books", ("", 256)),
    ]
    for work in works:
        try:
            await work
        except _Captured as captured:
            calls.append((captured.args[0], captured.args[1]))
    return calls


def _reclaim(name: str, **changes: object) -> ReclaimReport:
    fields = {"reclaim_id": name, "requested_bytes": SLAB, "returned_bytes": 0, "age_s": 1.0}
    return ReclaimReport.model_validate({"deadline_s": 2.5, **fields, **changes})


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with running_store() as store:
        calls, books = asyncio.run(_prepared(store))
        path = store.url.removeprefix("unix://").partition("?")[0]
        with redis.Redis(unix_socket_path=path, protocol=2) as client:
            client.function_load(LIBRARY.source, replace=True)
            yield Stage(client, books, calls)


async def _prepared(store: EmbeddedValkey) -> tuple[list[Call], Snapshot]:
    async with ledger_room(store.url) as room:
        calls = await furnish(room)
        path = store.url.removeprefix("unix://").partition("?")[0]
        with redis.Redis(unix_socket_path=path, protocol=2) as client:
            # What expires does so long after the test: each example begins with the same.
            for key in client.keys("*"):
                if client.pttl(key) > 0:
                    client.pexpire(key, 10**9)
            return calls, snapshot_of(client)


def test_every_step_is_called_and_all_calls_suit_the_books(stage: Stage) -> None:
    assert {name for name, _ in stage.calls} == set(SCRIPTS)
    answers = set()
    for name, arguments in stage.calls:
        stage.reset()
        answer = stage.call(name, *arguments)
        answers.add((name, answer[0]))
    assert {name for name, word in answers if word == b"ok"} == set(SCRIPTS)


def changed_but_set_aside(client: redis.Redis, before: Snapshot) -> set[bytes]:
    """Keys that are not what they were, but for bad records that were set aside, and the note."""
    after = snapshot_of(client)
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    noted = KEYS["quarantine"].encode(), KEYS["books"].encode()
    if after.get(noted[0]) == before.get(noted[0]):
        return changed
    entries: Any = client.xrange(noted[0])
    return changed - {entry[b"key"] for _, entry in entries}.union(noted)


@BRIEF
@given(draw=st.randoms(use_true_random=False), spoilt=st.integers(1, 3))
def test_no_record_makes_a_step_fail(stage: Stage, draw: random.Random, spoilt: int) -> None:
    stage.reset()
    words = [poison(stage.client, draw) for _ in range(spoilt)]
    for name, arguments in draw.sample(stage.calls, 20):
        fault = stage.fault(name, *arguments)
        # A reading step sets nothing aside.
        if not (name.startswith("read_") and "WRONGTYPE" in fault):
            assert not fault, f"{name}{arguments} over {words}"


@BRIEF
@given(draw=st.randoms(use_true_random=False), spoilt=st.integers(0, 1))
def test_a_step_that_fails_has_changed_nothing(
    stage: Stage, draw: random.Random, spoilt: int
) -> None:
    stage.reset()
    for _ in range(spoilt):
        poison(stage.client, draw)
    for name, arguments in draw.sample(stage.calls, 10):
        odd = list(arguments)
        for _ in range(draw.randint(1, 2)):
            if odd:
                at = draw.randrange(len(odd))
                odd[at : at + 1] = draw.choice([[draw.choice(ODD)], []])
        before = snapshot_of(stage.client)
        if fault := stage.fault(name, *odd):
            assert not changed_but_set_aside(stage.client, before), f"{name}{odd}: {fault}"
