"""Quotas: what each tenant and consumer may lease, and what comes back to its owner."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from aqua_coordinator.access.quotas import MAX_COHORT, QuotasFile, read_quotas
from aqua_coordinator.store.keys import KEYS
from aqua_protocol import CapacityError, ConfigError, UnknownResourceError
from aqua_protocol.errors import ForbiddenError, QuotaExceededError
from harness.members_on_paper import SLAB, PaperProducer
from harness.quota_room import QuotaRoom


def quota(nominal: int, cohort: str | None = "cohort", **slabs: int) -> dict[str, object]:
    """A tenant's quota in slabs."""
    limits = {name: count * SLAB for name, count in slabs.items()}
    return {"nominal": nominal * SLAB, "cohort": cohort, **limits}


@pytest.fixture
def room() -> QuotaRoom:
    """Tenants of twelve slabs."""
    room = QuotaRoom(12)
    room.join("a", "a-0", "a-1")
    room.join("b", "b-0")
    room.join("", "free")
    return room


TENANTS = {"a-0": "a", "a-1": "a", "b-0": "b", "free": ""}


def test_without_a_cohort_the_nominal_quota_is_the_limit(room: QuotaRoom) -> None:
    room.put(a=quota(4, None))
    room.grant("a", "a-0", 3)
    with pytest.raises(QuotaExceededError) as caught:
        room.grant("a", "a-1", 2)
    error = caught.value
    assert error.details == {
        "quota": "tenant",
        "of": "a",
        "limit_bytes": 4 * SLAB,
        "used_bytes": 3 * SLAB,
        "available_bytes": SLAB,
        "borrowed_bytes": 0,
    }
    assert "Release" in error.remedy
    assert room.grant("a", "a-1", 2, least=1).bytes == SLAB
    assert room.grant("b", "b-0", 5).bytes == 5 * SLAB, "not named, no limit"
    assert room.grant("", "free", 3).bytes == 3 * SLAB


def test_a_consumer_has_a_limit_of_its_own(room: QuotaRoom) -> None:
    consumers = {"a-1": SLAB, "free": 2 * SLAB}
    a = quota(10, None, consumer_limit=3)
    room.put_file(QuotasFile.model_validate({"tenants": {"a": a}, "consumers": consumers}))
    for tenant, name, slabs in (("a", "a-0", 3), ("a", "a-1", 1), ("", "free", 2)):
        with pytest.raises(QuotaExceededError, match=f"consumer {name} has"):
            room.grant(tenant, name, slabs + 1)
        room.grant(tenant, name, slabs)


def test_others_are_tenants_that_are_not_named(room: QuotaRoom) -> None:
    room.put_file(QuotasFile.model_validate({"tenants": {"a": quota(6)}, "others": quota(2, None)}))
    room.grant("a", "a-0", 6)
    with pytest.raises(QuotaExceededError):
        room.grant("b", "b-0", 3)
    room.grant("", "free", 3)


def test_what_is_unused_is_borrowed_up_to_both_limits(room: QuotaRoom) -> None:
    room.put(a=quota(4, borrowing_limit=3), b=quota(8, lending_limit=2))
    with pytest.raises(QuotaExceededError, match="cohort"):
        room.grant("a", "a-0", 7)
    room.put(a=quota(4, borrowing_limit=3), b=quota(8, lending_limit=5))
    with pytest.raises(QuotaExceededError, match="tenant a"):
        room.grant("a", "a-0", 8)
    room.grant("a", "a-0", 7)
    assert [(view.borrowed_bytes, view.available_bytes) for view in room.views()] == [
        (3 * SLAB, 0),
        (0, 5 * SLAB),
    ]


def test_an_owner_gets_back_what_was_borrowed_and_no_more(room: QuotaRoom) -> None:
    room.put(a=quota(6), b=quota(6))
    for name in ("a-0", "a-1", "a-0", "a-1", "a-0", "a-1"):
        room.grant("a", name, 2)
    assert room.leased("a") == 12
    for asked in (3, 4):
        with pytest.raises(CapacityError) as caught:
            room.grant("b", "b-0", asked)
        assert caught.value.details["borrowed_bytes"] == 6 * SLAB
        assert caught.value.retry_after_s == 1.0
    room.report()
    assert room.leased("a") == 8, "whole leases, for the first request alone"
    with pytest.raises(QuotaExceededError, match="cohort"):
        room.grant("a", "a-0", 1)
    room.grant("b", "b-0", 3)
    room.grant("b", "b-0", 1)
    assert room.faults() == []


def test_no_borrower_gives_back_what_is_its_own(room: QuotaRoom) -> None:
    room.join("c", "c-0")
    room.put(a=quota(4), b=quota(4), c=quota(4))
    for tenant, name in (("c", "c-0"), ("a", "a-0")):
        for _ in range(3):
            room.grant(tenant, name, 2)
    with pytest.raises(CapacityError):
        room.grant("b", "b-0", 4)
    room.report()
    room.grant("b", "b-0", 4)
    assert [room.leased(tenant) for tenant in "abc"] == [4, 4, 4]


def test_what_is_left_is_lent_in_whole_slabs(room: QuotaRoom) -> None:
    room.put(a={"nominal": 5 * SLAB // 2})
    with pytest.raises(QuotaExceededError):
        room.grant("a", "a-0", 3)
    assert room.grant("a", "a-0", 3, least=1).bytes == 2 * SLAB
    request = room.consumers["a-0"].request(1, bytes=SLAB // 4)
    with pytest.raises(QuotaExceededError):
        room.run(room.ledger.grant_lease(request, idempotency_key="part", attach_window_s=1.0))


def test_a_cohort_borrows_again_when_its_owner_asks_no_more(room: QuotaRoom) -> None:
    room.put(a=quota(6), b=quota(6))
    for _ in range(6):
        room.grant("a", "a-0", 2)
    with pytest.raises(CapacityError):
        room.grant("b", "b-0", 2)
    room.report()
    with pytest.raises(QuotaExceededError):
        room.grant("a", "a-0", 2)
    room.let_pass(12.0, TENANTS)
    room.grant("a", "a-0", 2)


def test_a_wait_without_end_holds_neither_borrowers_nor_owners(room: QuotaRoom) -> None:
    room.put(a=quota(6), b=quota(6))
    waits = KEYS["quota_waits"] + "cohort"
    room.store.redis.command("ZADD", waits, "inf", "b")
    for _ in range(6):
        room.grant("a", "a-0", 2)
    with pytest.raises(CapacityError):
        room.grant("b", "b-0", 2)
    room.report()
    room.grant("b", "b-0", 2)


def test_nobody_loses_a_lease_in_vain(room: QuotaRoom) -> None:
    """An owner asks for more than can be lent to it, or for what others own."""
    room.put(a=quota(2), b=quota(10))
    room.grant("", "free", 8)
    room.grant("a", "a-0", 4)
    with pytest.raises(CapacityError):
        room.grant("b", "b-0", 10)
    room.put(a=quota(4), b=quota(8))
    with pytest.raises(CapacityError):
        room.grant("b", "b-0", 1)
    room.report()
    assert room.leased("a") == 4


def test_a_quota_that_is_lowered_ends_nothing_but_lends_what_is_above(room: QuotaRoom) -> None:
    room.put(a=quota(12), b=quota(0))
    room.grant("a", "a-0", 6)
    room.grant("a", "a-0", 6)
    room.put(a=quota(3), b=quota(9))
    assert room.leased("a") == 12
    with pytest.raises(QuotaExceededError):
        room.grant("a", "a-1", 1)
    with pytest.raises(CapacityError):
        room.grant("b", "b-0", 6)
    room.report()
    room.grant("b", "b-0", 6)


def test_quotas_that_were_lowered_below_what_is_leased_are_made_up_for_first(
    room: QuotaRoom,
) -> None:
    room.put(a=quota(6), b=quota(6))
    room.grant("a", "a-0", 1)
    last = room.grant("a", "a-0", 1)
    epoch = last.epoch
    room.run(room.ledger.release_lease(last.lease_id, epoch=epoch, as_consumer=None))
    room.put(a=quota(0), b=quota(1))
    with pytest.raises(QuotaExceededError):
        room.grant("b", "b-0", 1)
    room.report()
    room.grant("b", "b-0", 1)


def test_a_consumer_is_told_what_it_could_lease_under_its_quota(room: QuotaRoom) -> None:
    """It asks for no more than that, so it has to be told of what is lent as well."""
    room.put(a=quota(6), b=quota(6))
    assert room.hear("a", room.consumers["a-0"]) == 12 * SLAB
    for _ in range(6):
        room.grant("a", "a-0", 2)
    assert room.hear("a", room.consumers["a-1"]) == 0
    assert room.hear("b", room.consumers["b-0"]) == 6 * SLAB


def test_what_is_lost_of_the_sums_is_made_anew_from_the_leases(room: QuotaRoom) -> None:
    room.put(a=quota(6), b=quota(6))
    room.grant("a", "a-0", 2)
    room.grant("a", "a-1", 3)
    total, each = KEYS["tenants"], KEYS["tenant_leased"] + "a"
    for lost in ((total,), (each,), (total, each)):
        room.store.redis.forget(lost)
        assert room.faults()
        assert room.faults() == []
        assert [view.leased_bytes for view in room.views()] == [5 * SLAB, 0]


def test_what_a_tenant_must_not_see_does_not_exist_for_it(room: QuotaRoom) -> None:
    ledger = room.ledger
    lease = room.grant("a", "a-0", 1)
    for call in (
        ledger.lease(lease.lease_id, as_tenant="b"),
        ledger.consumer("a-0", as_tenant="b"),
        ledger.producer("producer", as_tenant="b"),
        ledger.release_lease(lease.lease_id, epoch=lease.epoch, as_consumer=None, as_tenant="b"),
        ledger.renew_lease(
            lease.lease_id, epoch=lease.epoch, ttl_s=9.0, as_consumer=None, as_tenant="b"
        ),
        ledger.remove_consumer("a-0", "life-1", as_tenant="b"),
        ledger.remove_producer("producer", "life-1", as_tenant="b"),
    ):
        with pytest.raises(UnknownResourceError):
            room.run(call)
    with pytest.raises(UnknownResourceError):
        room.grant("b", "a-0", 1)
    for tenant, names in (("a", ["a-0", "a-1"]), ("b", ["b-0"]), ("", sorted(TENANTS))):
        views = room.run(ledger.consumers(as_tenant=tenant))
        assert [view.consumer_id for view in views] == names
    assert room.run(ledger.leases(as_tenant="b"))[0] == []


def test_a_name_is_its_tenants_as_long_as_a_trace_of_it_is_booked(room: QuotaRoom) -> None:
    room.grant("a", "a-0", 1)
    with pytest.raises(ForbiddenError):
        room.hear("b", room.consumers["a-0"])
    assert room.hear("", room.consumers["a-0"])
    assert room.hear("a", room.consumers["a-0"]), "an operator's report leaves it where it was"
    room.store.redis.command("ZADD", KEYS["consumers_seen"], "0", "a-0")
    room.run(room.ledger.sweep(silent_s=5.0))
    with pytest.raises(ForbiddenError):
        room.hear("b", room.consumers["a-0"])
    room.give_back(next(iter(room.leases)))
    room.report()
    assert room.hear("b", room.consumers["a-0"])


def test_only_a_bound_token_takes_a_member_into_its_tenant(room: QuotaRoom) -> None:
    lease, free = room.grant("", "free", 2), room.consumers["free"]
    with pytest.raises(ForbiddenError):
        room.hear("a", free)
    room.run(room.ledger.report_consumer(free.report(), as_tenant="a", is_bound=1))
    assert room.leased("a") == 2
    assert room.run(room.ledger.lease(lease.lease_id, as_tenant="a")).bytes == lease.bytes
    assert room.faults() == []


def test_a_tenant_has_so_many_members_at_once(room: QuotaRoom) -> None:
    files = {"tenants": {"b": quota(4)}, "others": {"nominal": 0, "members": 2}}
    room.put_file(QuotasFile.model_validate(files))
    for late in (room.join, lambda tenant, name: room.lend(tenant, PaperProducer(name=name))):
        with pytest.raises(QuotaExceededError, match="2 members of 2"):
            late("a", "a-2")
    room.join("b", "b-1", "b-2")
    room.join("", "free-1")
    room.hear("a", room.consumers["a-0"])
    life = room.consumers["a-1"].incarnation
    room.run(room.ledger.remove_consumer("a-1", life, as_tenant="a"))
    room.lend("a", PaperProducer(name="a-2"))
    with pytest.raises(QuotaExceededError):
        room.join("a", "a-1")
    room.put()
    room.join("a", "a-1")


def test_an_idempotency_key_is_its_tenants(room: QuotaRoom) -> None:
    request = room.consumers["a-0"].request(1)
    ask = partial(room.ledger.grant_lease, request, idempotency_key="key", attach_window_s=10.0)
    room.run(ask(as_tenant="a"))
    with pytest.raises(UnknownResourceError):
        room.run(ask(as_tenant="b"))


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("{", "JSON"),
        ('{"tenants": {"a": {"nominal": "4 bananas"}}}', "4 bananas"),
        ('{"tenants": {"a": {"nominal": 1, "borrowing_limit": 1}}}', "cohort"),
        ('{"tenants": {"a": {"cohort": "c"}}}', "nominal"),
        ('{"tenants": {"a b": {}}}', "pattern"),
        ('{"others": {"nominal": 1, "cohort": "c"}}', "cohort"),
        ('{"tenants": {"a": {"nominl": 1}}}', "nominl"),
        ('{"consumers": {"llm-0": -1}}', "llm-0"),
    ],
)
def test_a_file_that_is_no_good_is_refused_with_the_place(
    tmp_path: Path, content: str, fault: str
) -> None:
    path = tmp_path / "quotas.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=fault):
        read_quotas(path)


def test_a_cohort_is_small_enough_to_be_looked_at_for_each_grant(tmp_path: Path) -> None:
    path = tmp_path / "quotas.json"
    path.write_text(json.dumps({"tenants": {f"t{n}": quota(1) for n in range(MAX_COHORT + 1)}}))
    with pytest.raises(ConfigError, match=str(MAX_COHORT)):
        read_quotas(path)
