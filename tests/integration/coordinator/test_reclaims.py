"""Reclaims: measured by producers, ordered by operators."""

from __future__ import annotations

import pytest

from aqua_coordinator.store.keys import KEYS
from aqua_protocol import CapacityError, ProtocolError, RequestInvalidError, UnknownResourceError
from aqua_protocol.errors import IdempotencyConflictError
from aqua_protocol.leases import ReclaimOrigin, ReclaimRequest
from aqua_protocol.members import MAX_RECLAIMS_PER_REPORT, ReclaimReport
from harness.ledger_room import LedgerRoom
from harness.members_on_paper import SLAB, PaperProducer


def measured(reclaim_id: str, **changes: object) -> ReclaimReport:
    """A reclaim of two slabs, of which one is back."""
    fields: dict[str, object] = {
        "reclaim_id": reclaim_id,
        "requested_bytes": 2 * SLAB,
        "returned_bytes": SLAB,
        "deadline_s": 5.0,
        "age_s": 0.1,
        "first_slab_ms": 3.5,
    }
    return ReclaimReport.model_validate(fields | changes)


def finished(reclaim_id: str, **changes: object) -> ReclaimReport:
    """The same, when both are back."""
    return measured(reclaim_id, returned_bytes=2 * SLAB, total_ms=12.25, **changes)


@pytest.fixture
async def producer(room: LedgerRoom) -> PaperProducer:
    """A producer to take memory back."""
    return await room.join(PaperProducer())


async def test_a_producers_own_reclaim_is_booked_as_it_goes(
    room: LedgerRoom, producer: PaperProducer
) -> None:
    producer.reclaims = [measured("mine")]
    assert (await room.tell(producer)).reclaimed == []
    view = await room.ledger.reclaim("mine")
    assert (view.origin, view.done, view.first_slab_ms) == (ReclaimOrigin.PRODUCER, False, 3.5)
    assert (await room.ledger.summary()).open_reclaim_count == 1
    producer.reclaims = [finished("mine")]
    assert (await room.tell(producer)).reclaimed == [("returned", 0.01225, 0.0035)]
    view = await room.ledger.reclaim("mine")
    assert (view.done, view.returned_bytes, view.total_ms) == (True, 2 * SLAB, 12.25)
    assert (await room.ledger.summary()).open_reclaim_count == 0


async def test_a_zero_with_a_sign_is_a_zero(room: LedgerRoom, producer: PaperProducer) -> None:
    producer.reclaims = [
        finished("mine", deadline_s=-0.0, first_slab_ms=-0.0).model_copy(update={"total_ms": -0.0})
    ]
    assert (await room.tell(producer)).reclaimed == [("returned", 0, 0)]
    view = await room.ledger.reclaim("mine")
    assert (view.deadline_s, view.first_slab_ms, view.total_ms) == (0, 0, 0)


async def test_a_finished_reclaim_counts_once_however_often_it_is_reported(
    room: LedgerRoom, producer: PaperProducer
) -> None:
    producer.reclaims = [finished("mine", escalated=True)]
    counted = [(await room.tell(producer)).reclaimed for _ in range(3)]
    assert counted == [[("escalated", 0.01225, 0.0035)], [], []]


async def test_an_order_is_repeated_until_the_producer_takes_it_up(
    room: LedgerRoom, producer: PaperProducer
) -> None:
    request = ReclaimRequest(producer_id="producer", bytes=2 * SLAB, deadline_s=2.5)
    order = await room.ledger.open_reclaim(request, idempotency_key="key")
    assert await room.ledger.open_reclaim(request, idempotency_key="key") == order
    for _ in range(2):
        told = (await room.tell(producer)).orders
        assert [(o.reclaim_id, o.bytes, o.deadline_s) for o in told] == [
            (order.reclaim_id, 2 * SLAB, 2.5)
        ]
    producer.reclaims = [measured(order.reclaim_id)]
    assert (await room.tell(producer)).orders == []
    producer.reclaims = [finished(order.reclaim_id)]
    await room.tell(producer)
    view = await room.ledger.reclaim(order.reclaim_id)
    assert (view.origin, view.done) == (ReclaimOrigin.OPERATOR, True)


async def test_a_reclaim_that_is_no_longer_reported_is_closed_as_dropped(
    room: LedgerRoom, producer: PaperProducer
) -> None:
    producer.reclaims = [measured("mine")]
    await room.tell(producer)
    producer.reclaims = []
    assert (await room.tell(producer)).reclaimed == [("dropped", None, None)]
    view = await room.ledger.reclaim("mine")
    assert view.done
    assert view.total_ms is None


async def test_a_lost_producer_closes_its_reclaims(
    room: LedgerRoom, producer: PaperProducer
) -> None:
    order = await room.ledger.open_reclaim(
        ReclaimRequest(producer_id="producer", bytes=SLAB), idempotency_key="key"
    )
    await room.ledger.remove_producer("producer", producer.incarnation)
    assert (await room.ledger.reclaim(order.reclaim_id)).done


async def test_the_reclaim_of_another_producer_cannot_be_reported(
    room: LedgerRoom, producer: PaperProducer
) -> None:
    producer.reclaims = [measured("mine")]
    await room.tell(producer)
    thief = PaperProducer(name="thief", reclaims=[measured("mine")])
    with pytest.raises(ProtocolError):
        await room.tell(thief)


async def test_nonsense_orders_are_refused(room: LedgerRoom, producer: PaperProducer) -> None:
    with pytest.raises(UnknownResourceError):
        await room.ledger.open_reclaim(
            ReclaimRequest(producer_id="nobody", bytes=SLAB), idempotency_key="a"
        )
    with pytest.raises(RequestInvalidError):
        await room.ledger.open_reclaim(
            ReclaimRequest(producer_id="producer", bytes=17 * SLAB), idempotency_key="b"
        )
    for number in range(MAX_RECLAIMS_PER_REPORT):
        await room.ledger.open_reclaim(
            ReclaimRequest(producer_id="producer", bytes=SLAB), idempotency_key=f"c{number}"
        )
    with pytest.raises(CapacityError):
        await room.ledger.open_reclaim(
            ReclaimRequest(producer_id="producer", bytes=SLAB), idempotency_key="d"
        )
    with pytest.raises(IdempotencyConflictError):
        await room.ledger.open_reclaim(
            ReclaimRequest(producer_id="producer", bytes=2 * SLAB), idempotency_key="c0"
        )


async def test_reclaims_are_listed_in_order_and_leave_the_list_after_a_while(
    room: LedgerRoom, producer: PaperProducer
) -> None:
    producer.reclaims = [finished("one"), measured("two")]
    await room.tell(producer)
    first, cursor = await room.ledger.reclaims(limit=1)
    rest, _ = await room.ledger.reclaims(cursor=cursor, limit=2)
    assert [view.reclaim_id for view in first + rest] == ["one", "two"]
    # Ended long ago, and its record has expired.
    await room.pipeline.command("ZADD", KEYS["ended_reclaims"], "1", "one")
    await room.pipeline.command("DEL", KEYS["reclaim"] + "one")
    await room.sweep()
    left, _ = await room.ledger.reclaims()
    assert [view.reclaim_id for view in left] == ["two"]
