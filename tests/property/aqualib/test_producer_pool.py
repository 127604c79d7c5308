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
from aqualib.peers import ProcessIdentity
from aqualib.producer.pool import LentSlab, Slab, SlabPool, SlabTenant
from aqualib.transports.base import OwnedSlab
from harness.memory import PaperSlab

SLAB = 64 * 1024
tenants = st.builds(
    SlabTenant,
    st.builds(ProcessIdentity, uid=st.just(1000), pid=st.just(7), started_ticks=st.integers(0, 1)),
    st.sampled_from([ConsumerId("a"), ConsumerId("b")]),
)


class PoolHistory(RuleBasedStateMachine):
    """Lends and takes back at random, beside a model of who has what mapped and written."""

    loans: Bundle[LentSlab] = Bundle("loans")

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlabPool(SLAB)
        self.made = 0
        self.gone: list[OwnedSlab] = []
        self.seen_ids: set[int] = set()
        # Who ever could write to memory, and so may still: a holder may keep its mapping.
        self.writers: dict[int, set[SlabTenant]] = {}
        # Keeps what is numbered above from being collected.
        self.memory: list[object] = []
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
            self.make(slab)
            self.made += 1

    @rule(target=loans, tenant=tenants, count=st.integers(0, 6), fails=st.booleans())
    def lend(self, tenant: SlabTenant, count: int, *, fails: bool) -> Any:  # noqa: ANN401 - hypothesis' own type
        self.lease_count += 1
        lease_id = LeaseId(f"lease-{self.lease_count}")
        free = self.pool.count(SlabState.FREE)
        loans = self.pool.lend(lease_id, tenant, count)
        assert len(loans) == min(count, free)
        for loan in loans:
            number = loan.slab.slab_id
            assert number not in self.mapped, "lent while somebody has it mapped"
            self.mapped[number] = lease_id
        assert [slab.slab_id for slab in self.pool.held_by(lease_id)] == [
            loan.slab.slab_id for loan in loans
        ]
        return multiple(*[loan for loan in loans if self.hand_out(loan, tenant, fails=fails)])

    def hand_out(self, loan: LentSlab, tenant: SlabTenant, *, fails: bool) -> bool:
        if loan.is_foreign:
            assert loan.slab.slab_id not in self.seen_ids, "a new slab has a new number"
            self.seen_ids.add(loan.slab.slab_id)
            loan.slab.memory.close()
            if fails:
                del self.mapped[loan.slab.slab_id]
                assert not self.pool.hand_back(loan)
                self.gone.append(loan.slab.memory)
                return False
            loan.slab.memory = PaperSlab(SLAB)
            self.make(loan.slab)
        writers = self.writers[id(loan.slab.memory)]
        assert writers <= {tenant}, "another tenant may have it mapped"
        writers.add(tenant)
        return True

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
        # The handle never left, so the holder wrote nothing.
        self.writers[id(loan.slab.memory)] = {loan.tenant} if loan.tenant else set()
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

    def make(self, slab: Slab) -> None:
        self.memory.append(slab.memory)
        self.writers[id(slab.memory)] = set()

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
