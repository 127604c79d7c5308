"""What a producer decides without I/O: whom to ask, when to escalate, whom to admit."""

from __future__ import annotations

import time

import pytest

from aqua_protocol import CapacityError, TransportKind, UnavailableError
from aqua_protocol.capability import Claims
from aqua_protocol.errors import CapabilityError, InvalidTransitionError
from aqua_protocol.ids import (
    ConsumerId,
    Generation,
    LeaseId,
    ProducerId,
    ReclaimId,
    Revision,
    SlabId,
)
from aqua_protocol.members import MAX_RECLAIMS_PER_REPORT, ProducerReport
from aqua_protocol.slab import SlabState
from aqualib.peers import ProcessIdentity
from aqualib.producer import admission, lending_state
from aqualib.producer.admission import Admission
from aqualib.producer.escalation import (
    Escalation,
)
from aqualib.producer.lending_state import LendingState
from aqualib.producer.pool import Slab, SlabPool, SlabTenant
from aqualib.producer.reclaims import ReclaimTicket, choose
from harness.memory import PaperSlab
from harness.producers import IDENTITY
from harness.raw_consumer import TokenIssuer

SLAB = 64 * 1024


LIFE = ProcessIdentity(uid=1000, pid=7, started_ticks=70)
A, B = SlabTenant(LIFE, ConsumerId("a")), SlabTenant(LIFE, ConsumerId("b"))


def slab(number: int) -> Slab:
    return Slab(SlabId(number), PaperSlab(SLAB), Generation(1))


def claims(slab_count: int, *, lease_id: str = "lease", epoch: int = 1) -> Claims:
    return Claims(
        lease_id=lease_id,
        epoch=epoch,
        producer_id="producer",
        consumer_id="consumer",
        bytes=slab_count * SLAB,
        not_after_s=0.0,
    )


def lending_of(slab_count: int, policy: Escalation = Escalation.WAIT) -> LendingState:
    made = LendingState(SLAB, policy, grace_s=3.0)
    for _ in range(slab_count):
        made.pool.add(PaperSlab(SLAB))
    return made


def report_of(made: LendingState) -> ProducerReport:
    return ProducerReport(
        **IDENTITY.stamp(Revision(0), None),
        producer_id="producer",
        endpoint="/run/aqua/p.sock",
        transport=TransportKind.MEMFD,
        slab_bytes=SLAB,
        offered_bytes=made.pool.offered_count * SLAB,
        leases=made.held_leases(),
        reclaims=made.reclaim_reports(1.0),
    )


# --- Whom to ask -------------------------------------------------------------------------------


def test_the_newest_lease_is_asked_first_and_its_last_slab_before_the_others() -> None:
    old, new = [slab(0), slab(1)], [slab(2), slab(3)]
    assert [s.slab_id for s in choose([old, new], 3)] == [3, 2, 1]


def test_no_more_is_chosen_than_there_is() -> None:
    assert len(choose([[slab(0)], []], 5)) == 1
    assert choose([], 5) == []


# --- Escalation --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", Escalation)
def test_quarantine_comes_before_a_kill_and_nothing_happens_twice(policy: Escalation) -> None:
    made = lending_of(1, policy)
    made.lend(claims(1))
    reclaim, _ = made.reclaim(ReclaimId("r"), SLAB, 10.0, now_s=0.0)
    kills: list[tuple[float, LeaseId]] = []
    for now_s in (9.9, 10.0, 12.9, 13.0, 99.0):
        was_due = made.due_at_s() <= now_s
        effects = made.tick(now_s)
        kills += [(now_s, lease_id) for lease_id in effects.kills]
        assert was_due == (now_s == 10.0 or bool(effects.kills))
        assert reclaim.escalated == (now_s >= 10.0)
        assert made.pool.count(SlabState.QUARANTINED) == (now_s >= 10.0)
    assert kills == ([(13.0, LeaseId("lease"))] if policy is Escalation.KILL else [])


def test_a_producer_that_was_stopped_itself_grants_the_whole_grace() -> None:
    made = lending_of(1, Escalation.KILL)
    made.lend(claims(1))
    made.reclaim(ReclaimId("r"), SLAB, 5.0, now_s=0.0)
    assert made.tick(1000.0).kills == []
    assert made.tick(1002.9).kills == []
    assert made.tick(1003.0).kills == [LeaseId("lease")]
    assert made.tick(9999.0).kills == []


def test_a_silent_holder_is_killed_only_for_a_reclaim_that_waits_for_it() -> None:
    made = lending_of(1, Escalation.KILL)
    made.lend(claims(1))
    made.silent(LeaseId("lease"))
    assert made.due_at_s() == float("inf")
    reclaim, effects = made.reclaim(ReclaimId("r"), SLAB, 5.0, now_s=0.0)
    assert effects.notices == []
    made.tick(5.0)
    assert reclaim.escalated
    assert made.tick(8.0).kills == [LeaseId("lease")]


# --- The pool ----------------------------------------------------------------------------------


def test_a_free_slab_cannot_be_quarantined_and_a_lent_one_not_withdrawn() -> None:
    pool = SlabPool(SLAB)
    free = pool.add(PaperSlab(SLAB))
    with pytest.raises(InvalidTransitionError):
        pool.ask(free)
    pool.lend(LeaseId("lease"), A, 1)
    assert pool.withdraw(1) == []


def test_a_lease_cannot_be_lent_to_twice() -> None:
    pool = SlabPool(SLAB)
    for _ in range(2):
        pool.add(PaperSlab(SLAB))
    pool.lend(LeaseId("lease"), A, 1)
    with pytest.raises(AssertionError, match="already holds"):
        pool.lend(LeaseId("lease"), A, 1)


def test_slabs_that_need_not_be_made_anew_are_lent_first_and_withdrawn_last() -> None:
    pool = SlabPool(SLAB)
    for _ in range(2):
        pool.add(PaperSlab(SLAB))
    (loan,) = pool.lend(LeaseId("first"), A, 1)
    pool.take_back(loan.slab)
    (other,) = pool.lend(LeaseId("second"), B, 1)
    assert other.slab is not loan.slab
    (again,) = pool.lend(LeaseId("third"), A, 1)
    assert again.slab is loan.slab
    assert not again.is_foreign
    pool.take_back(again.slab)
    pool.add(PaperSlab(SLAB))
    assert pool.withdraw(1) == [loan.slab]


@pytest.mark.parametrize(
    "other",
    [
        B,
        A._replace(process=LIFE._replace(uid=1001)),
        A._replace(process=LIFE._replace(pid=8)),
        A._replace(process=LIFE._replace(started_ticks=71)),
        A._replace(process=LeaseId("unknown")),
    ],
    ids=["name", "user", "process", "life", "unknown"],
)
def test_a_slab_of_another_tenant_is_retired_and_a_new_one_lent(other: SlabTenant) -> None:
    pool = SlabPool(SLAB)
    pool.add(PaperSlab(SLAB))
    (first,) = pool.lend(LeaseId("first"), A, 1)
    pool.take_back(first.slab)
    (second,) = pool.lend(LeaseId("second"), other, 1)
    assert second.is_foreign
    assert (first.slab.state, second.slab.state) == (SlabState.RETIRED, SlabState.LEASED)
    assert second.slab.slab_id != first.slab.slab_id
    pool.audit()


def test_a_loan_that_never_left_is_made_anew_for_the_same_consumer_next_time() -> None:
    pool = SlabPool(SLAB)
    pool.add(PaperSlab(SLAB))
    (first,) = pool.lend(LeaseId("first"), A, 1)
    pool.take_back(first.slab)
    (second,) = pool.lend(LeaseId("second"), B, 1)
    assert pool.hand_back(second)
    (third,) = pool.lend(LeaseId("third"), B, 1)
    assert third.is_foreign


def test_a_slab_that_could_not_be_made_anew_is_owed() -> None:
    made = lending_of(1)
    (first,) = made.lend(claims(1), LIFE)
    made.released(LeaseId("lease"), first.slab.slab_id, first.generation)
    (second,) = made.lend(claims(1, lease_id="other"), LIFE._replace(pid=8))
    second.slab.memory.close()
    effects = made.hand_back(LeaseId("other"), [second])
    assert [retired.slab for retired in effects.retired] == [second.slab]
    assert (effects.finished, made.pool.offered_count, made.owed_count) == (["other"], 0, 1)


# --- The lending ----------------------------------------------------------------------------------


def test_an_offer_counts_only_what_lasts() -> None:
    made = lending_of(4)
    made.lend(claims(4))
    assert made.shortfall(4 * SLAB) == 0
    made.reclaim(ReclaimId("r"), SLAB, 5.0, 0.0)
    assert made.shortfall(4 * SLAB) == 1


def test_a_slab_that_is_owed_is_not_made_once_everything_is_wanted_back() -> None:
    made = lending_of(1)
    made.lend(claims(1))
    made.dead(LeaseId("lease"))
    assert made.owed_count == 1
    reclaim, _ = made.reclaim(ReclaimId("r"), SLAB, 5.0, 0.0)
    assert reclaim.done
    assert not made.deliver(PaperSlab(SLAB))
    assert made.pool.offered_count == 0


def test_a_retired_slab_serves_an_open_reclaim_before_it_is_replaced() -> None:
    made = lending_of(2)
    made.lend(claims(2))
    reclaim, _ = made.reclaim(ReclaimId("r"), SLAB, 5.0, 0.0)
    effects = made.dead(LeaseId("lease"))
    assert [slab.reclaim for slab in effects.retired] == [reclaim, None]
    assert made.owed_count == 1


def test_two_reclaims_never_ask_for_the_same_slab() -> None:
    made = lending_of(2)
    made.lend(claims(2))
    _, first = made.reclaim(ReclaimId("r1"), SLAB, 5.0, 0.0)
    _, second = made.reclaim(ReclaimId("r2"), SLAB, 5.0, 0.0)
    (one,), (two,) = first.notices, second.notices
    assert not set(one.slabs) & set(two.slabs)


def test_a_slab_asked_back_for_an_ended_lease_serves_a_reclaim_without_a_second_packet() -> None:
    made = lending_of(1)
    made.lend(claims(1))
    made.end(LeaseId("lease"), 1, 5.0, 0.0)
    reclaim, effects = made.reclaim(ReclaimId("r"), SLAB, 5.0, 0.0)
    assert effects.notices == []
    (slab,) = made.released(LeaseId("lease"), 0, 1).retired
    assert slab.reclaim is reclaim
    assert made.due_at_s() == float("inf")


def test_reports_say_what_is_asked_back_and_who_is_lost() -> None:
    made = lending_of(4)
    made.lend(claims(4))
    made.reclaim(ReclaimId("r"), 3 * SLAB, 5.0, 0.0)
    made.silent(LeaseId("lease"))
    (held,) = made.held_leases()
    assert (held.held_bytes, held.reclaiming_bytes) == (4 * SLAB, 3 * SLAB)
    assert held.consumer_lost


def test_finished_reclaims_are_reported_until_acknowledged_and_bounded_meanwhile() -> None:
    made = lending_of(0)
    for number in range(100):
        made.reclaim(ReclaimId(f"r{number}"), SLAB, 5.0, 0.0)
    reports = made.reclaim_reports(1.0)
    assert len(reports) == MAX_RECLAIMS_PER_REPORT
    assert reports[-1].reclaim_id == "r99"
    made.acknowledged(report_of(made))
    assert made.reclaim_reports(1.0) == []


def test_an_open_reclaim_stays_in_the_report_after_an_acknowledgement() -> None:
    made = lending_of(1)
    made.lend(claims(1))
    made.reclaim(ReclaimId("r"), SLAB, 5.0, 0.0)
    made.acknowledged(report_of(made))
    (report,) = made.reclaim_reports(2.0)
    assert report.total_ms is None
    assert report.age_s == 2.0


def test_a_lease_that_came_and_went_between_two_reports_is_reported_once() -> None:
    made = lending_of(2)
    made.lend(claims(2))
    made.dead(LeaseId("lease"))
    assert made.held_leases() == []  # Nothing is offered for the moment, so nothing fits.
    for _ in range(2):
        made.deliver(PaperSlab(SLAB))
    (told,) = made.held_leases()
    assert (told.lease_id, told.held_bytes, told.reclaiming_bytes) == ("lease", SLAB, SLAB)
    made.acknowledged(report_of(made))
    assert made.held_leases() == []


def test_a_lease_that_the_books_have_seen_is_gone_from_the_report_when_it_ends() -> None:
    made = lending_of(1)
    made.lend(claims(1))
    made.acknowledged(report_of(made))
    made.released(LeaseId("lease"), 0, 1)
    assert made.held_leases() == []


def test_a_lease_that_ended_while_its_first_report_was_under_way_is_not_reported_again() -> None:
    made = lending_of(1)
    made.lend(claims(1))
    under_way = report_of(made)
    made.released(LeaseId("lease"), 0, 1)
    made.acknowledged(under_way)
    assert made.held_leases() == []


def test_leases_that_no_books_have_seen_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending_state, "MAX_LEASES_PER_MEMBER", 2)
    made = lending_of(3)
    for number in range(5):
        made.lend(claims(1, lease_id=f"lease-{number}", epoch=number + 1))
        for slab in made.pool.held_by(LeaseId(f"lease-{number}")):
            made.released(LeaseId(f"lease-{number}"), slab.slab_id, slab.generation)
    assert [lease.lease_id for lease in made.held_leases()] == ["lease-3", "lease-4"]


def test_a_ticket_tells_when_the_first_and_the_last_slab_were_back() -> None:
    ticket = ReclaimTicket(
        ReclaimId("r"),
        requested_bytes=2 * SLAB,
        slab_count=2,
        slab_bytes=SLAB,
        deadline_s=5.0,
        began_at_s=10.0,
    )
    for now_s in (10.25, 10.5):
        ticket.assign()
        assert not ticket.wait(0)
        ticket.slab_closed(now_s)
    assert ticket.wait(0)
    assert (ticket.first_slab_ms, ticket.total_ms) == (250.0, 500.0)


def test_leases_per_producer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending_state, "MAX_LEASES_PER_MEMBER", 1)
    made = lending_of(2)
    made.lend(claims(1))
    with pytest.raises(CapacityError, match="hold slabs"):
        made.lend(claims(1, lease_id="other"))
    assert made.pool.count(SlabState.FREE) == 1


# --- Admission ---------------------------------------------------------------------------------


def test_spent_tokens_are_remembered_until_they_expire_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "MAX_SPENT_TOKENS", 2)
    issuer, gate = TokenIssuer(), Admission(ProducerId("producer"))
    gate.trust(issuer.key, 1)
    now_s = time.time()
    for _ in range(2):
        gate.admit(issuer.token(SLAB, valid_s=10), "consumer", now_s)
    with pytest.raises(CapacityError, match="within their tokens"):
        gate.admit(issuer.token(SLAB), "consumer", now_s)
    gate.admit(issuer.token(SLAB), "consumer", now_s + 20)


def test_a_clock_that_is_set_back_revives_no_token() -> None:
    issuer, gate = TokenIssuer(), Admission(ProducerId("producer"))
    gate.trust(issuer.key, 1)
    now_s = time.time()
    expired = issuer.token(SLAB, valid_s=10)
    gate.admit(issuer.token(SLAB), "consumer", now_s + 60)
    with pytest.raises(CapabilityError, match="expired"):
        gate.admit(expired, "consumer", now_s)


def test_without_a_key_the_refusal_names_the_coordinator() -> None:
    gate = Admission(ProducerId("producer"))
    with pytest.raises(UnavailableError, match="has not reached a coordinator"):
        gate.admit("any", "consumer", 0.0)


def test_a_refused_token_moves_no_clock() -> None:
    issuer, gate = TokenIssuer(), Admission(ProducerId("producer"))
    gate.trust(issuer.key, 1)
    now_s = time.time()
    good = issuer.token(SLAB, valid_s=10)
    payload, signature = good.split(".")
    refused = [
        "junk",
        f"{payload}.",
        f"{payload}.{signature[::-1]}",
        f"{payload[:-4]}.{signature}",
        TokenIssuer().token(SLAB, valid_s=7200),
        good,  # Too late by that clock.
        issuer.token(SLAB, consumer_id="another", valid_s=7200),
        issuer.token(SLAB, epoch=1, valid_s=-1),
    ]
    for token in refused:
        with pytest.raises(CapabilityError):
            gate.admit(token, "consumer", now_s + 3600)
    assert gate.admit(good, "consumer", now_s).bytes == SLAB


def test_no_clock_however_wrong_bars_tokens_that_outlast_the_good_ones() -> None:
    issuer, gate = TokenIssuer(), Admission(ProducerId("producer"))
    gate.trust(issuer.key, 1)
    now_s = time.time()
    gate.admit(issuer.token(SLAB, valid_s=10), "consumer", now_s + 9)
    for ahead_s in (10.5, 60, 3600, 1e9):
        with pytest.raises(CapabilityError, match="expired"):
            gate.admit(issuer.token(SLAB, valid_s=10), "consumer", now_s + ahead_s)
    assert gate.admit(issuer.token(SLAB, valid_s=10), "consumer", now_s).bytes == SLAB


def test_a_reclaim_of_days_is_told_within_the_bounds_of_the_wire() -> None:
    ticket = ReclaimTicket(
        ReclaimId("r"),
        requested_bytes=SLAB,
        slab_count=1,
        slab_bytes=SLAB,
        deadline_s=5.0,
        began_at_s=10.0,
    )
    days_s = 3 * 86_400.0
    assert ticket.report(10.0 + days_s).age_s == 86_400.0
    ticket.assign()
    ticket.slab_closed(10.0 + days_s)
    assert ticket.report(10.0 + days_s).total_ms == 86_400e3
    assert ticket.report(10.0 + days_s).first_slab_ms == 86_400e3


def test_a_reclaim_that_began_after_the_clock_was_read_is_told() -> None:
    # By a reporter that then waited for the lock.
    ticket = ReclaimTicket(
        ReclaimId("r"),
        requested_bytes=SLAB,
        slab_count=1,
        slab_bytes=SLAB,
        deadline_s=5.0,
        began_at_s=10.0,
    )
    assert ticket.report(9.99).age_s == 0
