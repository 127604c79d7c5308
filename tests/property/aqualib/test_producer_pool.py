"""The slab pool under every history: nothing is lent twice, nothing is lost, ids and bytes hold."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from aqua_protocol.ids import ConsumerId, LeaseId
from aqua_protocol.slab import HELD_STATES, SlabEvent, SlabState
from aqualib.producer.pool import LentSlab, SlabPool
from harness.memory import PaperSlab

SLAB = 64 * 1024
consumers = st.sampled_from([ConsumerId("a"), ConsumerId("b")])


class PoolHistory(RuleBasedStateMachine):
    """Lends and takes back at random, beside a model of who has what mapped and written."""

    loans: Bundle[LentSlab] = Bundle("loans")

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlabPool(SLAB)
        self.made = 0
        self.gone: list[PaperSlab] = []
        self.seen_ids: set[int] = set()
        # What is really in each slab: the last consumer that could write, None for zeros.
        self.contents: dict[int, str | None] = {}
        self.mapped: dict[int, LeaseId] = {}
        self.lease_count = 0

    @initialize(count=st.integers(0, 8))
    def start(self, count: int) -> None:
        self.grow(count)

    @rule(count=st.integers(1, 4))
    def grow(self, count: int) -> None:
        for _ in range(count):
            slab = self.pool.add(PaperSlab(SLAB))
            assert slab.slab_id not in self.seen_ids
            self.seen_ids.add(slab.slab_id)
            self.contents[slab.slab_id] = None
            self.made += 1

    @rule(target=loans, consumer=consumers, count=st.integers(0, 6))
    def lend(self, consumer: ConsumerId, count: int) -> Any:  # noqa: ANN401 - hypothesis' own type
        self.lease_count += 1
        lease_id = LeaseId(f"lease-{self.lease_count}")
        free = self.pool.count(SlabState.FREE)
        loans = self.pool.lend(lease_id, consumer, count)
        assert len(loans) == min(count, free)
        for loan in loans:
            number = loan.slab.slab_id
            assert number not in self.mapped, "lent while somebody has it mapped"
            # What the next consumer can read is zeros or its own bytes.
            assert loan.scrub or self.contents[number] in {None, consumer}
            self.contents[number] = consumer
            self.mapped[number] = lease_id
        assert [slab.slab_id for slab in self.pool.held_by(lease_id)] == [
            loan.slab.slab_id for loan in loans
        ]
        return multiple(*loans)

    @rule(loan=loans)
    def ask(self, loan: LentSlab) -> None:
        if loan.slab.state in {SlabState.LEASED, SlabState.RECLAIMING} and self._current(loan):
            self.pool.ask(loan.slab)

    @rule(loan=loans, event=st.sampled_from([SlabEvent.DEADLINE, SlabEvent.HOLDER_SILENT]))
    def quarantine(self, loan: LentSlab, event: SlabEvent) -> None:
        late = loan.slab.state in {SlabState.RECLAIMING, SlabState.QUARANTINED}
        silent = event is SlabEvent.HOLDER_SILENT and loan.slab.state is SlabState.LEASED
        if self._current(loan) and (late or silent):
            self.pool.quarantine(loan.slab, event)

    @rule(loan=loans)
    def answer(self, loan: LentSlab) -> None:
        lease_id = self.mapped.get(loan.slab.slab_id)
        was_quarantined = loan.slab.state is SlabState.QUARANTINED
        slab = self.pool.find(lease_id or LeaseId("nobody"), loan.slab.slab_id, loan.generation)
        assert (slab is not None) == self._current(loan)
        if slab is None:
            return
        del self.mapped[slab.slab_id]
        free = self.pool.take_back(slab)
        assert free == (not was_quarantined)
        if not free:
            self.retire(slab.memory)

    @rule(loan=loans)
    def undo(self, loan: LentSlab) -> None:
        if not self._current(loan):
            return
        # The handle never left, so the holder wrote nothing; it may or may not be zeroed.
        self.contents[loan.slab.slab_id] = loan.bytes_of
        del self.mapped[loan.slab.slab_id]
        if not self.pool.hand_back(loan):
            self.retire(loan.slab.memory)

    @rule(loan=loans)
    def die(self, loan: LentSlab) -> None:
        lease_id = self.mapped.get(loan.slab.slab_id)
        if lease_id is None:
            return
        held = self.pool.held_by(lease_id)
        assert self.pool.bury(lease_id) == held
        for slab in held:
            del self.mapped[slab.slab_id]
            self.retire(slab.memory)

    @rule(count=st.integers(1, 4))
    def withdraw(self, count: int) -> None:
        free = self.pool.count(SlabState.FREE)
        taken = self.pool.withdraw(count)
        assert len(taken) == min(count, free)
        for slab in taken:
            assert slab.slab_id not in self.mapped
            self.retire(slab.memory)

    @precondition(lambda self: self.made > 0)
    @rule()
    def recount(self) -> None:
        self.pool.audit()

    @invariant()
    def nothing_is_lost(self) -> None:
        counts = {state: self.pool.count(state) for state in SlabState}
        assert counts[SlabState.RETIRED] == 0
        assert sum(counts.values()) == self.pool.offered_count == self.made - len(self.gone)
        assert sum(counts[state] for state in HELD_STATES) == len(self.mapped)

    def teardown(self) -> None:
        self.pool.audit()
        left = self.pool.drain()
        assert len(left) == self.made - len(self.gone)

    def retire(self, memory: Any) -> None:  # noqa: ANN401 - a PaperSlab behind its protocol
        memory.close()
        self.gone.append(memory)

    def _current(self, loan: LentSlab) -> bool:
        slab = loan.slab
        return (
            slab.slab_id in self.mapped
            and slab.generation == loan.generation
            and slab.state in HELD_STATES
        )


TestPoolHistory = PoolHistory.TestCase
TestPoolHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
