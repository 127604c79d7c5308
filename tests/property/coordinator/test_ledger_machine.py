"""The books against a model, over every history that Hypothesis can think of, on a real Valkey.

The model is one producer's truth: which slabs are lent to whom. The machine lets a consumer, the
producer, an operator, the clock and the loss of the books act in any order, with messages repeated,
late or never sent, and asks after every step:

- free + leased == offered, and every other rule of the audit script;
- what the books have leased covers what the producer has really lent, as of its last report: no
  byte is leased twice;
- epochs only ever grow, and no lease id comes back;
- a replayed request or report changes nothing, an older one is refused;
- the state of every lease is one the table leads to.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Iterator
from typing import ClassVar, Final, TypeAlias, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.store import Pipeline, open_pool
from aqua_coordinator.store.keys import KEYS
from aqua_coordinator.store.rows import Grant
from aqua_protocol import (
    CapacityError,
    LeaseLostError,
    LeaseState,
    ProtocolError,
    UnknownResourceError,
)
from aqua_protocol.errors import BooksRebuildingError, IdempotencyConflictError, StaleRevisionError
from aqua_protocol.leases import LeaseView
from aqua_protocol.members import ProducerReport
from harness.bounds import HANG_S
from harness.ledger_room import LedgerRoom
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer
from harness.slices import examples
from harness.store_servers import running_store

T = TypeVar("T")
Request: TypeAlias = tuple[str, int, dict[str, int]]
"""Consumer, slabs, and what else was asked."""

MAX_SLABS: Final = 12
CONSUMERS: Final = ("llm-0", "llm-1")
RARELY: Final = st.integers(0, 4).map(lambda number: number == 4)
"""Of events that undo most of a history; at full rate no history would get anywhere."""


class LedgerMachine(RuleBasedStateMachine):
    """One producer, two consumers, and everything that can happen to their leases."""

    url = ""
    happened: ClassVar[Counter[str]] = Counter()
    """What the histories were made of; a machine that does nothing breaks no rule."""
    grants: Bundle[Grant] = Bundle("grants")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.clock_us = 10**15
        self.runner.run(self._open())
        self.producer = PaperProducer(slabs=8)
        self.consumers = {name: PaperConsumer(name=name) for name in CONSUMERS}
        self.last_report: ProducerReport | None = None
        self.reported_held = 0
        self.seen_epochs: set[int] = set()
        self.highest_epoch = 0
        self.requests: dict[str, tuple[Request, Grant]] = {}
        self.numbers = iter(range(10**9))

    async def _open(self) -> None:
        pipeline = Pipeline(
            open_pool(self.url, connect_timeout_s=HANG_S, max_connections=8), timeout_s=HANG_S
        )
        pipeline.start()
        self.room = LedgerRoom(self.url, pipeline)
        await self.room.lose_books()

    def run(self, work: Awaitable[T]) -> T:
        """Wait for a coroutine, at the machine's time."""

        async def wait() -> T:
            await self.room.hold_clock(self.clock_us)
            return await work

        return self.runner.run(wait())

    def teardown(self) -> None:
        """Check for keys left behind, and disconnect."""
        self.run(self.room.check())
        self.runner.run(self.room.pipeline.close())
        self.runner.close()

    @initialize(strangers=RARELY)
    def begin(self, *, strangers: bool) -> None:
        """Most histories start with members that know the books."""
        if not strangers:
            self.producer_reports()
            self.producer_reports()
            for name in CONSUMERS:
                self.consumer_reports(name)

    # --- What the producer does ------------------------------------------------------

    @rule()
    def producer_reports(self) -> None:
        report = self.producer.report()
        booked = self.run(self.room.ledger.report_producer(report))
        self.producer.books_id = booked.books_id
        self.last_report = report
        self.reported_held = self._booked_of(report)
        for notice in booked.ended:
            assert notice.lease_id in self.producer.held
            self.happened[f"ended: {notice.reason}"] += 1

    @rule()
    def producer_repeats_its_last_report(self) -> None:
        if self.last_report is None:
            return
        try:
            self.run(self.room.ledger.report_producer(self.last_report))
        except StaleRevisionError:
            assert self.last_report.incarnation != self.producer.incarnation
        else:
            # After a loss of the books even old news is news.
            self.reported_held = self._booked_of(self.last_report)

    @precondition(lambda self: self.last_report is not None and self.producer.revision > 0)
    @rule()
    def an_older_report_arrives_late(self) -> None:
        assert self.last_report is not None
        late = self.last_report.model_copy(update={"revision": self.last_report.revision - 1})
        if late.revision < 0 or not self._books_know_the_producer():
            return
        with pytest.raises(StaleRevisionError):
            self.run(self.room.ledger.report_producer(late))

    @rule(slabs=st.integers(0, MAX_SLABS) | st.just(MAX_SLABS))
    def producer_changes_its_offer(self, slabs: int) -> None:
        held = sum(lease.held_bytes for lease in self.producer.held.values()) // SLAB
        self.producer.slabs = max(slabs, held)

    @rule(grant=grants, slabs=st.integers(1, 4), told=st.booleans())
    def consumer_attaches(self, grant: Grant, slabs: int, *, told: bool) -> None:
        """The producer hands out what it has, if the token is for this life of it."""
        lease = grant.lease
        held = sum(lease.held_bytes for lease in self.producer.held.values()) // SLAB
        free = self.producer.slabs - held
        slabs = min(slabs, lease.bytes // SLAB, free)
        same_life = grant.incarnation == self.producer.incarnation
        if slabs > 0 and same_life and lease.lease_id not in self.producer.held:
            self.producer.hand_out(lease, slabs=slabs)
            self.consumers[lease.consumer_id].use(lease)
            if told:
                self.producer_reports()

    @rule(
        grant=grants,
        reclaiming=st.booleans(),
        lost=RARELY,
        back=st.integers(0, 2),
        told=st.booleans(),
    )
    def slabs_come_back(
        self, grant: Grant, *, reclaiming: bool, lost: bool, back: int, told: bool
    ) -> None:
        held = self.producer.held.get(grant.lease.lease_id)
        if held is None:
            return
        left = held.held_bytes // SLAB - back
        if left <= 0:
            self.producer.take_back(grant.lease)
        else:
            self.producer.hand_out(
                grant.lease,
                slabs=left,
                reclaiming_bytes=SLAB if reclaiming else 0,
                consumer_lost=lost or held.consumer_lost,
            )
        if told:
            self.producer_reports()

    @rule(really=RARELY)
    def producer_restarts(self, *, really: bool) -> None:
        if really:
            self.producer.restart()

    # --- What consumers do -----------------------------------------------------------

    @rule(name=st.sampled_from(CONSUMERS))
    def consumer_reports(self, name: str) -> None:
        consumer = self.consumers[name]
        heard = self.run(self.room.hear(consumer))
        for notice in heard.ended:
            consumer.used.pop(notice.lease_id)

    @rule(
        target=grants,
        name=st.sampled_from(CONSUMERS),
        slabs=st.integers(1, 4),
        all_or_nothing=st.booleans(),
        attaches=st.booleans(),
    )
    def consumer_asks(
        self, name: str, slabs: int, *, all_or_nothing: bool, attaches: bool
    ) -> Grant | MultipleResults[Grant]:
        key = f"key-{next(self.numbers)}"
        changes = {} if all_or_nothing else {"min_bytes": SLAB}
        request = (name, slabs, changes)
        try:
            grant = self._ask(key, request)
        except (CapacityError, BooksRebuildingError, UnknownResourceError):
            return multiple()
        lease = grant.lease
        assert lease.epoch > self.highest_epoch
        assert lease.epoch not in self.seen_epochs
        assert SLAB <= lease.bytes <= slabs * SLAB
        self.seen_epochs.add(lease.epoch)
        self.requests[key] = (request, grant)
        self.happened["granted"] += 1
        if attaches:
            self.consumer_attaches(grant, slabs, told=True)
        return grant

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def a_request_is_replayed(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.requests)))
        (name, slabs, changes), grant = self.requests[key]
        assert self._ask(key, (name, slabs, changes)) == grant
        with pytest.raises(IdempotencyConflictError):
            self._ask(key, (name, slabs + 1, changes))

    @rule(grant=grants, current=st.booleans())
    def consumer_releases(self, grant: Grant, *, current: bool) -> None:
        self._act(grant, current=current, action="release")

    @rule(grant=grants, current=st.booleans())
    def consumer_renews(self, grant: Grant, *, current: bool) -> None:
        self._act(grant, current=current, action="renew")

    @rule(grant=grants, current=st.booleans())
    def operator_revokes(self, grant: Grant, *, current: bool) -> None:
        self._act(grant, current=current, action="revoke")

    # --- What nobody does ------------------------------------------------------------

    @rule(seconds=st.sampled_from([1.0, 11.0, 21.0, 40.0]), swept=st.booleans())
    def time_passes(self, seconds: float, *, swept: bool) -> None:
        self.clock_us += round(seconds * 1e6)
        if swept:
            self.a_coordinator_sweeps()

    @rule()
    def a_coordinator_sweeps(self) -> None:
        self.run(self.room.sweep())

    @rule(really=RARELY)
    def the_books_are_lost(self, *, really: bool) -> None:
        if not really:
            return
        self.run(self.room.lose_books())
        self.requests = {}
        self.reported_held = 0

    @rule()
    def scripts_are_flushed(self) -> None:
        self.run(self.room.command("FUNCTION", "FLUSH"))

    # --- What must hold --------------------------------------------------------------

    @invariant()
    def the_books_agree_with_themselves(self) -> None:
        if not self._books_exist():
            return
        assert self.run(self.room.ledger.audit()) == []
        raw = self.run(self.room.command("HGET", KEYS["books"], "epoch"))
        assert int(raw) >= self.highest_epoch
        self.highest_epoch = int(raw)

    @invariant()
    def no_byte_is_leased_twice(self) -> None:
        if not self._books_know_the_producer():
            return
        view = self.run(self.room.ledger.producer("producer"))
        leases = self.run(self._all_leases())
        assert sum(lease.bytes for lease in leases) == view.leased_bytes
        assert view.free_bytes + view.leased_bytes == view.offered_bytes
        for lease in leases:
            self.happened[lease.state] += 1
        held = [lease for lease in leases if lease.state is not LeaseState.GRANTED]
        assert sum(lease.bytes for lease in held) == self.reported_held

    # --- Inside ----------------------------------------------------------------------

    def _ask(self, key: str, request: Request) -> Grant:
        name, slabs, changes = request
        return self.run(self.room.grant(self.consumers[name], slabs, key=key, **changes))

    def _act(self, grant: Grant, *, current: bool, action: str) -> None:
        lease_id, epoch = grant.lease.lease_id, grant.lease.epoch
        ledger = self.room.ledger
        try:
            before = self.run(ledger.lease(lease_id))
        except UnknownResourceError:
            return
        if current:
            epoch = before.epoch
        try:
            if action == "release":
                after = self.run(ledger.release_lease(lease_id, epoch=epoch, as_consumer=None))
            elif action == "renew":
                after = self.run(
                    ledger.renew_lease(lease_id, epoch=epoch, ttl_s=30, as_consumer=None)
                )
            else:
                after = self.run(ledger.revoke_lease(lease_id, epoch=epoch))
        except (ProtocolError, LeaseLostError):
            after = self.run(ledger.lease(lease_id))
            assert (after.state, after.epoch, after.bytes) == (
                before.state,
                before.epoch,
                before.bytes,
            )
        assert after.epoch >= before.epoch
        if action == "renew" and after.state != before.state:
            raise AssertionError(f"a renewal made {before.state} {after.state}")

    def _booked_of(self, report: ProducerReport) -> int:
        """Bytes that the report says are held, but of ended leases that would push out a grant."""
        booked = 0
        for held in report.leases:
            if self.run(self.room.ledger.lease(held.lease_id)).state is LeaseState.RELEASED:
                assert held.reclaiming_bytes == held.held_bytes
            else:
                booked += held.held_bytes
        return booked

    async def _all_leases(self) -> list[LeaseView]:
        leases, cursor = await self.room.ledger.leases(limit=1000)
        assert cursor is None
        return leases

    def _books_exist(self) -> bool:
        return bool(self.run(self.room.command("EXISTS", KEYS["books"])))

    def _books_know_the_producer(self) -> bool:
        if not self._books_exist():
            return False
        known = self.run(self.room.command("HGET", KEYS["producer"] + "producer", "incarnation"))
        return bool(
            known is not None
            and self.last_report is not None
            and known.decode() == self.last_report.incarnation
        )


@pytest.fixture(scope="module")
def store() -> Iterator[EmbeddedValkey]:
    with running_store() as server:
        yield server


def test_no_history_makes_the_books_disagree_with_the_world(store: EmbeddedValkey) -> None:
    LedgerMachine.url = store.url
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=examples(25, whole=100),
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert {"granted", LeaseState.ACTIVE, LeaseState.FENCED} <= LedgerMachine.happened.keys()
