"""Quotas over any history of grants, ends, losses and changes of the quotas.

After every step the sums of the books are those of the leases' records. No grant takes a tenant
beyond its nominal quota and borrowing limit, nor a cohort beyond what its tenants lend. And where
there is memory for all nominal quotas, an owner gets its own after it has asked: at once, or when
the producer has back what others borrowed.
"""

from __future__ import annotations

from typing import Final

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from aqua_coordinator.access.quotas import TenantQuota
from aqua_coordinator.store.keys import KEYS
from aqua_protocol import CapacityError
from aqua_protocol.errors import QuotaExceededError
from harness.members_on_paper import SLAB
from harness.quota_room import STEP_S, QuotaRoom
from harness.slices import examples

SLABS: Final = 24
CONSUMERS: Final = {"a-0": "a", "a-1": "a", "b-0": "b", "b-1": "b", "c-0": "c", "lone": "d"}
TENANTS: Final = sorted(set(CONSUMERS.values()))
NAMES: Final = st.sampled_from(sorted(CONSUMERS))
SOME_SLABS: Final = st.integers(1, 6)
LIMITS: Final = st.none() | st.integers(0, 6)
QUOTAS: Final = st.tuples(
    *(st.tuples(st.integers(0, SLABS // 4), LIMITS, LIMITS) for _ in TENANTS),
)


class QuotaMachine(RuleBasedStateMachine):
    """Three tenants of a cohort and one alone, on one producer."""

    def __init__(self) -> None:
        super().__init__()
        self.room = QuotaRoom(SLABS)
        for name, tenant in CONSUMERS.items():
            self.room.join(tenant, name)
        self.change_quotas([(SLABS // 4, None, None)] * len(TENANTS))

    @rule(quotas=QUOTAS)
    def change_quotas(self, quotas: list[tuple[int, int | None, int | None]]) -> None:
        """Other quotas, which are lower or higher than what is leased."""
        self.room.put(
            **{
                tenant: {"nominal": nominal * SLAB}
                if tenant == "d"
                else {
                    "nominal": nominal * SLAB,
                    "cohort": "cohort",
                    "borrowing_limit": None if borrowing is None else borrowing * SLAB,
                    "lending_limit": None if lending is None else lending * SLAB,
                }
                for tenant, (nominal, borrowing, lending) in zip(TENANTS, quotas, strict=True)
            }
        )

    def quota(self, tenant: str) -> TenantQuota:
        """What is in force."""
        return self.room.quotas.tenants[tenant]

    @rule(name=NAMES, slabs=SOME_SLABS, least=SOME_SLABS)
    def ask(self, name: str, slabs: int, least: int) -> None:
        """Any consumer asks, and gets no more than its tenant may have."""
        tenant = CONSUMERS[name]
        try:
            self.room.grant(tenant, name, slabs, min(slabs, least))
        except CapacityError:
            return
        quota = self.quota(tenant)
        leased = self.room.leased(tenant) * SLAB
        if quota.cohort is None:
            assert leased <= quota.nominal
        elif quota.borrowing_limit is not None:
            assert leased <= quota.nominal + quota.borrowing_limit
        if leased > quota.nominal:
            members = self.room.quotas.cohorts()["cohort"]
            used = {one: self.room.leased(one) * SLAB for one in members}
            borrowed = sum(max(0, used[n] - one.guaranteed) for n, one in members.items())
            assert borrowed <= sum(one.lent for one in members.values())

    @rule(name=NAMES, slabs=SOME_SLABS)
    def an_owner_asks_for_its_own(self, name: str, slabs: int) -> None:
        """It gets it, once the producer has what others have beyond theirs."""
        tenant = CONSUMERS[name]
        owned = self.quota(tenant).nominal // SLAB - self.room.leased(tenant)
        if slabs > owned:
            return
        try:
            self.room.grant(tenant, name, slabs)
        except CapacityError:
            # One that is alone has nobody to ask back from.
            if self.quota(tenant).cohort is not None:
                self.room.let_pass(STEP_S, CONSUMERS)
                self.room.grant(tenant, name, slabs)

    @rule(number=st.integers(0, SLABS))
    def a_lease_ends(self, number: int) -> None:
        """By its consumer, whose slabs are back at once or with the next report."""
        if self.room.leases:
            lease_id = [*self.room.leases][number % len(self.room.leases)]
            lease = self.room.run(self.room.ledger.lease(lease_id))
            self.room.run(
                self.room.ledger.release_lease(lease_id, epoch=lease.epoch, as_consumer=None)
            )
            self.room.give_back(lease_id)

    @rule()
    def time_passes(self) -> None:
        """For long enough that an owner is waited for no more."""
        self.room.let_pass(12.0, CONSUMERS)

    @rule(each=st.sampled_from(["", *TENANTS]))
    def sums_are_lost(self, each: str) -> None:
        """The audit makes them anew."""
        key = KEYS["tenant_leased"] + each if each else KEYS["tenants"]
        self.room.store.redis.forget([key])
        self.room.faults()

    @invariant()
    def the_sums_are_those_of_the_leases(self) -> None:
        """And nothing else is wrong with the books."""
        for view in self.room.views():
            assert view.leased_bytes == self.room.leased(view.tenant) * SLAB
        assert self.room.faults() == []


def test_no_history_takes_a_tenant_beyond_its_quota_or_an_owner_from_its_own() -> None:
    run_state_machine_as_test(
        QuotaMachine,
        settings=settings(max_examples=examples(15, whole=400), stateful_step_count=20),
    )


def test_the_machine_sees_grants_refused_and_owners_served() -> None:
    """What the property is about happens at all."""
    machine = QuotaMachine()
    for _ in range(3):
        machine.ask("a-0", 6, 6)
    assert machine.room.leased("a") == 18
    refused = 0
    for name in ("b-0", "c-0"):
        try:
            machine.room.grant(CONSUMERS[name], name, 6)
        except QuotaExceededError:
            refused += 1
        machine.an_owner_asks_for_its_own(name, 6)
        assert machine.room.leased(CONSUMERS[name]) == 6
    assert refused
