"""Memory lent between simulated engines, on the real lease table."""

from __future__ import annotations

import pytest

from aqua_protocol.errors import CapacityError, InvalidTransitionError
from aqua_protocol.lease import LeaseEvent, LeaseState
from aqua_simulator.serving.cluster import Cluster, PlannedReclaim, Routing
from aqua_simulator.serving.engine import Engine, EngineSettings
from aqua_simulator.serving.lending import LeaseLedger
from aqua_simulator.serving.memory import PagedMemory
from aqua_simulator.serving.request import Arrival
from aqua_simulator.timing.iteration import IterationTime

SLAB = 1024


def engine(name: str, blocks: int) -> Engine:
    steady = IterationTime("steady", lambda _tokens: 1.0, lambda _b: 0.0, lambda _c: 0.0)
    settings = EngineSettings(max_num_batched_tokens=200, steps_in_flight=1, kv_bytes_per_token=8)
    return Engine(name, settings, steady, PagedMemory(blocks, 16))


def cluster() -> Cluster:
    return Cluster(
        [engine("borrower", 8), engine("lender", 400)],
        routing=Routing.ROUND_ROBIN,
        books=LeaseLedger(slab_bytes=SLAB),
        host_bytes_per_s=100.0,
    )


def test_what_is_offered_is_free_or_leased_at_every_transition() -> None:
    books = LeaseLedger(slab_bytes=SLAB)
    books.offer("lender", 10 * SLAB + 5)
    assert books.free_bytes("lender") == 10 * SLAB
    lease = books.grant("borrower", 4 * SLAB, now_s=0.0)
    assert books.free_bytes("lender") + books.leased_bytes("lender") == 10 * SLAB
    books.follow(lease, LeaseEvent.RECLAIM, 1.0)
    assert lease.state == "reclaiming"
    assert books.leased_bytes("lender") == 4 * SLAB
    books.follow(lease, LeaseEvent.RETURN_ALL, 3.0)
    assert lease.state == "released"
    assert books.free_bytes("lender") == 10 * SLAB


def test_a_released_lease_cannot_be_reclaimed() -> None:
    books = LeaseLedger(slab_bytes=SLAB)
    books.offer("lender", SLAB)
    lease = books.grant("borrower", SLAB, now_s=0.0)
    books.follow(lease, LeaseEvent.RETURN_ALL, 1.0)
    with pytest.raises(InvalidTransitionError):
        books.follow(lease, LeaseEvent.RECLAIM, 2.0)


def test_released_bytes_stay_booked_until_the_lender_has_them() -> None:
    books = LeaseLedger(slab_bytes=SLAB)
    books.offer("lender", SLAB)
    lease = books.grant("borrower", SLAB, now_s=0.0)
    books.follow(lease, LeaseEvent.RELEASE, 1.0)
    assert lease.state is LeaseState.FENCED
    assert books.free_bytes("lender") == 0


def test_nobody_is_granted_what_nobody_has() -> None:
    books = LeaseLedger(slab_bytes=SLAB)
    with pytest.raises(CapacityError):
        books.grant("borrower", SLAB, now_s=0.0)
    books.offer("lender", SLAB - 1)
    with pytest.raises(CapacityError):
        books.grant("borrower", SLAB, now_s=0.0)


def test_an_offer_cannot_shrink_below_what_is_leased() -> None:
    books = LeaseLedger(slab_bytes=SLAB)
    books.offer("lender", 2 * SLAB)
    books.grant("borrower", 2 * SLAB, now_s=0.0)
    with pytest.raises(CapacityError, match="Reclaim first"):
        books.offer("lender", SLAB)


def test_a_borrower_pages_into_lent_memory_and_the_lender_gets_it_back() -> None:
    room = cluster()
    lender = room.engine("lender")
    whole = lender.memory.block_count
    lease = room.lend("lender", "borrower", 20 * SLAB, link_bytes_per_s=1e6)
    assert lender.memory.block_count < whole
    # Routed by turns: even ones to the borrower, whose eight blocks cannot hold two of them.
    arrivals = [Arrival(str(index), 0.0, 40, 60) for index in range(4)]
    served = room.run(arrivals, [PlannedReclaim(30.0, "lender")])
    assert len(served) == 4
    store = room.engine("borrower").store
    assert store is not None
    assert store.paged_out_tokens > 0
    assert lease.state is LeaseState.RELEASED
    assert lender.memory.block_count == whole
    events = [event for _, _, event, _ in room.books.history]
    assert events == [LeaseEvent.ATTACH, LeaseEvent.RECLAIM, LeaseEvent.RETURN_ALL]


def test_asking_twice_for_the_same_memory_returns_it_once() -> None:
    room = cluster()
    room.lend("lender", "borrower", 20 * SLAB, link_bytes_per_s=1e6)
    room.run([], [PlannedReclaim(1.0, "lender"), PlannedReclaim(1.0, "lender")])
    assert room.engine("lender").memory.block_count == 400


def test_the_router_prefers_the_engine_with_fewer_requests() -> None:
    room = Cluster([engine("a", 100), engine("b", 100)])
    room.run([Arrival("0", 0.0, 100, 50), Arrival("1", 1.0, 10, 1), Arrival("2", 2.5, 10, 1)])
    assert [row.request_id for row in room.engine("a").finished] == ["0"]
    assert len(room.engine("b").finished) == 2
