"""The lending lending under every history of consumers that lie, fall silent, die, and are slow.

The model is the truth that the lending cannot see: which process really has which slab mapped. What
must hold whatever happens: a slab that is mapped is never lent to another, its memory is never
closed before its holder has let go, every slab is closed once, and reclaims get what they asked.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from aqua_protocol import CapacityError, TransportKind
from aqua_protocol.capability import Claims
from aqua_protocol.ids import LeaseId, ReclaimId, Revision
from aqua_protocol.members import ProducerReport
from aqua_protocol.slab import SlabState
from aqualib.peers import ProcessIdentity
from aqualib.producer.escalation import Escalation
from aqualib.producer.lending_state import Effects, LendingState, RetiredSlab
from aqualib.producer.reclaims import ReclaimTicket
from harness.memory import PaperSlab
from harness.producers import IDENTITY

SLAB = 64 * 1024
LIVES = (None, ProcessIdentity(1000, 7, 70), ProcessIdentity(1000, 7, 71))
GRACE_S = 3.0


@dataclass
class Process:
    """A consumer as it really is."""

    lease_id: LeaseId
    epoch: int
    mapped: dict[int, int] = field(default_factory=dict)
    alive: bool = True
    connected: bool = True
    asked: set[int] = field(default_factory=set)


class DeskHistory(RuleBasedStateMachine):
    """Drives the lending as server, custodian and engine would."""

    policy = Escalation.WAIT

    def __init__(self) -> None:
        super().__init__()
        self.lending = LendingState(SLAB, self.policy, GRACE_S)
        self.now_s = 0.0
        self.numbers = itertools.count(1)
        self.processes: list[Process] = []
        self.retired: list[RetiredSlab] = []
        self.closed: set[int] = set()
        self.made = 0
        self.reclaims: list[ReclaimTicket] = []
        self.killed: list[LeaseId] = []

    # --- The engine -------------------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def offer(self, count: int) -> None:
        goal = (
            self.lending.pool.offered_count
            - self.lending.missing_count
            + self.lending.owed_count
            + count
        )
        assert self.lending.shortfall(goal * SLAB) == count
        for _ in range(count):
            self.lending.pool.add(PaperSlab(SLAB))
            self.made += 1

    @rule(count=st.integers(1, 6), deadline_s=st.sampled_from([1.0, 5.0]))
    def reclaim(self, count: int, deadline_s: float) -> None:
        free = self.lending.pool.count(SlabState.FREE)
        lasting = self.lending.pool.offered_count - self.lending.missing_count
        reclaim, effects = self.lending.reclaim(
            ReclaimId(f"r{next(self.numbers)}"), count * SLAB, deadline_s, self.now_s
        )
        assert reclaim.slab_count == min(count, lasting)
        assert len(effects.retired) == min(free, count, lasting)
        self.reclaims.append(reclaim)
        self.carry_out(effects)

    # --- Consumers --------------------------------------------------------------------

    @rule(count=st.integers(1, 5))
    def attach(self, count: int) -> None:
        epoch = next(self.numbers)
        lease_id = LeaseId(f"lease-{epoch}")
        claims = Claims(
            lease_id=lease_id,
            epoch=epoch,
            producer_id="p",
            consumer_id=f"consumer-{epoch % 2}",
            bytes=count * SLAB,
            not_after_s=0.0,
        )
        free = self.lending.pool.count(SlabState.FREE)
        try:
            loans = self.lending.lend(claims, LIVES[epoch % 3])
        except CapacityError:
            assert free == 0
            return
        assert len(loans) == min(count, free)
        process = Process(lease_id, epoch)
        for loan in loans:
            if loan.is_foreign:
                loan.slab.memory.close()
                loan.slab.memory = PaperSlab(SLAB)
            assert not self.mapped_by_anyone(loan.slab.slab_id), "lent while mapped"
            assert loan.slab.slab_id not in self.closed
            process.mapped[loan.slab.slab_id] = loan.generation
        self.processes.append(process)

    @precondition(lambda self: any(p.mapped and p.connected for p in self.processes))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        process = self.draw(data, lambda p: bool(p.mapped) and p.connected)
        slab_id = data.draw(st.sampled_from(sorted(process.mapped)))
        generation = process.mapped.pop(slab_id)
        self.carry_out(self.lending.released(process.lease_id, slab_id, generation))

    @precondition(lambda self: bool(self.processes))
    @rule(data=st.data(), slab_id=st.integers(0, 20), generation=st.integers(1, 4))
    def lie(self, data: st.DataObject, slab_id: int, generation: int) -> None:
        """An answer for something that this process does not hold at that generation."""
        process = self.draw(data, lambda _: True)
        if process.mapped.get(slab_id) == generation:
            return
        effects = self.lending.released(process.lease_id, slab_id, generation)
        assert effects == Effects()

    @precondition(lambda self: any(p.connected for p in self.processes))
    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        process = self.draw(data, lambda p: p.connected)
        process.connected = False
        self.carry_out(self.lending.silent(process.lease_id))
        assert all(
            slab.state is SlabState.QUARANTINED
            for slab in self.lending.pool.held_by(process.lease_id)
        )

    @precondition(lambda self: any(p.alive for p in self.processes))
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        process = self.draw(data, lambda p: p.alive)
        self.end_process(process)

    @precondition(lambda self: any(p.mapped for p in self.processes))
    @rule(data=st.data())
    def lease_ends_in_the_books(self, data: st.DataObject) -> None:
        process = self.draw(data, lambda p: bool(p.mapped))
        self.carry_out(self.lending.end(process.lease_id, process.epoch, 2.0, self.now_s))
        assert self.lending.end(process.lease_id, process.epoch, 2.0, self.now_s) == Effects()

    # --- Time and the custodian -------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 2.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.carry_out(self.lending.tick(self.now_s))
        assert self.lending.due_at_s() > self.now_s

    @precondition(lambda self: bool(self.retired))
    @rule()
    def close_memory(self) -> None:
        slab = self.retired.pop(0)
        assert not self.mapped_by_anyone(slab.slab.slab_id), "closed while mapped"
        slab.slab.memory.close()
        self.closed.add(slab.slab.slab_id)
        if slab.reclaim is not None:
            slab.reclaim.slab_closed(self.now_s)

    @precondition(lambda self: self.lending.owed_count > 0)
    @rule()
    def replace(self) -> None:
        assert self.lending.deliver(PaperSlab(SLAB))
        self.made += 1

    @rule()
    def report(self) -> None:
        report = ProducerReport(
            **IDENTITY.stamp(Revision(next(self.numbers)), None),
            producer_id="producer",
            endpoint="/run/aqua/p.sock",
            transport=TransportKind.MEMFD,
            slab_bytes=SLAB,
            offered_bytes=self.lending.pool.offered_count * SLAB,
            leases=self.lending.held_leases(),
            reclaims=self.lending.reclaim_reports(self.now_s),
        )
        told = {lease.lease_id for lease in report.leases}
        assert told >= set(self.lending.pool.leases())
        self.lending.acknowledged(report)
        # What is over and was told is not told again.
        over = told - set(self.lending.pool.leases())
        assert not over & {lease.lease_id for lease in self.lending.held_leases()}

    # --- What always holds ------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        pool = self.lending.pool
        pool.audit()
        assert self.made == pool.offered_count + len(self.retired) + len(self.closed)
        assert 0 <= self.lending.missing_count <= pool.offered_count
        held = {slab.slab_id for lease in pool.leases() for slab in pool.held_by(lease)}
        assert held == {slab_id for p in self.processes for slab_id in p.mapped}

    @invariant()
    def reclaims_are_done_when_their_memory_is_back(self) -> None:
        for reclaim in self.reclaims:
            assert reclaim.done == (reclaim.returned_count == reclaim.slab_count)

    @invariant()
    def nobody_is_killed_under_wait(self) -> None:
        assert not self.killed or self.policy is Escalation.KILL

    def teardown(self) -> None:
        """Once every process has ended, every reclaim completes."""
        for process in self.processes:
            if process.alive:
                self.end_process(process)
        while self.retired:
            self.close_memory()
        assert all(reclaim.done for reclaim in self.reclaims), self.reclaims
        assert self.lending.missing_count == 0

    # --- Inside -----------------------------------------------------------------------

    def end_process(self, process: Process) -> None:
        process.alive = process.connected = False
        process.mapped.clear()
        self.carry_out(self.lending.dead(process.lease_id))

    def carry_out(self, effects: Effects) -> None:
        self.retired += effects.retired
        for notice in effects.notices:
            (process,) = (p for p in self.processes if p.lease_id == notice.lease_id)
            assert process.connected, "asked a consumer that cannot hear"
            for slab_id, generation in notice.slabs:
                assert process.mapped[slab_id] == generation
                assert slab_id not in process.asked, "asked twice"
                process.asked.add(slab_id)
        for lease_id in effects.finished:
            assert not self.lending.pool.held_by(lease_id)
        self.killed += effects.kills
        for lease_id in effects.kills:
            (process,) = (p for p in self.processes if p.lease_id == lease_id)
            assert process.alive
            assert process.mapped, "killed a process that holds nothing"

    def mapped_by_anyone(self, slab_id: int) -> bool:
        return any(slab_id in process.mapped for process in self.processes)

    def draw(self, data: st.DataObject, condition: object) -> Process:
        assert callable(condition)
        return data.draw(st.sampled_from([p for p in self.processes if condition(p)]))


class KillingDeskHistory(DeskHistory):
    """The same under the `kill` policy."""

    policy = Escalation.KILL


TestDeskHistory = DeskHistory.TestCase
TestDeskHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestKillingDeskHistory = KillingDeskHistory.TestCase
TestKillingDeskHistory.settings = TestDeskHistory.settings
