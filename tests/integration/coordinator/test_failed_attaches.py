"""Grants after attaches that failed: whom they avoid, for whom, how long; and terms of requests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import httpx
import pytest

from aqua_coordinator.store.rows import Grant
from aqua_protocol import CapacityError, TransportKind
from aqua_protocol.leases import AttachFailure, Pairing, PlacementPlan
from harness.ledger_room import LedgerRoom
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer

GRANTS = 12
UNREACHABLE_S = 10.0
"""Of the first failure; twice as long after the next."""


async def join(room: LedgerRoom, **slabs: int) -> dict[str, PaperProducer]:
    return {name: await room.join(PaperProducer(name=name, slabs=n)) for name, n in slabs.items()}


async def consumers(room: LedgerRoom, *names: str) -> list[PaperConsumer]:
    made = [PaperConsumer(name=name) for name in names]
    for consumer in made:
        await room.hear(consumer)
    return made


async def fail(
    room: LedgerRoom,
    grant: Grant,
    failure: AttachFailure | None = AttachFailure.UNREACHABLE,
    voice: str = "",
) -> None:
    """Give the lease up, for the reason given."""
    lease = grant.lease
    await room.ledger.release_lease(
        lease.lease_id, epoch=lease.epoch, as_consumer=None, failure=failure, voice=voice
    )


async def lender(room: LedgerRoom, consumer: PaperConsumer) -> str:
    """Who lends to the consumer now; the lease is given up again, without a word."""
    grant = await room.grant(consumer)
    await fail(room, grant, None)
    return grant.lease.producer_id


# --- A dead producer ---------------------------------------------------------------------------


@pytest.mark.parametrize("failure", AttachFailure)
async def test_a_dead_smallest_producer_gets_one_of_many_grants(
    room: LedgerRoom, failure: AttachFailure
) -> None:
    await join(room, dead=4, well=16)
    (consumer,) = await consumers(room, "consumer")
    got = Counter[str]()
    for _ in range(GRANTS):
        grant = await room.grant(consumer)
        got[grant.lease.producer_id] += 1
        await fail(room, grant, failure if grant.lease.producer_id == "dead" else None)
    assert got == {"dead": 1, "well": GRANTS - 1}


async def test_several_consumers_that_found_nothing_put_a_producer_last_for_all(
    room: LedgerRoom,
) -> None:
    await join(room, dead=4, well=16)
    *burnt, fresh = await consumers(room, "a", "b", "c", "fresh")
    for consumer in burnt:
        assert (await room.grant(fresh)).lease.producer_id == "dead"
        await fail(room, await room.grant(consumer))
    assert await lender(room, fresh) == "well"
    # It comes last, and is not barred: what no other has room for, it may lend.
    await room.grant(fresh, 16)
    assert await lender(room, fresh) == "dead"


async def test_a_suspected_producer_lends_only_when_no_other_has_the_least(
    room: LedgerRoom,
) -> None:
    await join(room, dead=8, well=4)
    *burnt, fresh = await consumers(room, "a", "b", "c", "fresh")
    for consumer in burnt:
        await fail(room, await room.grant(consumer, 5))
    grant = await room.grant(fresh, 8, min_bytes=SLAB)
    assert (grant.lease.producer_id, grant.lease.bytes) == ("well", 4 * SLAB)
    grant = await room.grant(fresh, 8, min_bytes=SLAB)
    assert (grant.lease.producer_id, grant.lease.bytes) == ("dead", 8 * SLAB)


# --- Liars -------------------------------------------------------------------------------------


async def test_one_consumer_says_so_for_itself_alone_however_often(room: LedgerRoom) -> None:
    await join(room, good=4, other=16)
    liar, honest = await consumers(room, "liar", "honest")
    grants = [await room.grant(liar) for _ in range(4)]
    for grant in [*grants, *grants]:
        assert grant.lease.producer_id == "good"
        await fail(room, grant)
        assert await lender(room, liar) == "other"
        assert await lender(room, honest) == "good"


async def test_one_token_is_one_voice_under_however_many_names(room: LedgerRoom) -> None:
    await join(room, good=4, other=16)
    *names, honest = await consumers(room, *(f"name-{i}" for i in range(8)), "honest")
    for consumer in names:
        grant = await room.grant(consumer)
        assert grant.lease.producer_id == "good"
        await fail(room, grant, voice="0123456789ab")
        assert await lender(room, consumer) == "other"
    assert await lender(room, honest) == "good"
    for voice in ("0123456789ac", "0123456789ad"):
        (consumer,) = await consumers(room, f"name-{voice}")
        await fail(room, await room.grant(consumer), voice=voice)
    assert await lender(room, honest) == "other"


async def test_what_a_consumer_cannot_use_is_no_matter_of_others(room: LedgerRoom) -> None:
    await join(room, good=4, other=16)
    *names, honest = await consumers(room, *(f"name-{i}" for i in range(8)), "honest")
    for consumer in names:
        await fail(room, await room.grant(consumer), AttachFailure.UNUSABLE)
    assert await lender(room, honest) == "good"


async def test_a_lease_in_use_was_attached_whatever_its_consumer_says(room: LedgerRoom) -> None:
    producers = await join(room, good=8, other=16)
    *names, honest = await consumers(room, "a", "b", "c", "d", "honest")
    for consumer in names:
        grant = await room.grant(consumer)
        producers["good"].hand_out(grant.lease)
        await room.tell(producers["good"])
        await fail(room, grant)
        assert await lender(room, consumer) == "other"
    assert await lender(room, honest) == "good"


# --- How long ----------------------------------------------------------------------------------


async def test_a_failure_is_forgotten_and_for_longer_remembered_when_it_comes_again(
    room: LedgerRoom,
) -> None:
    (producer,) = (await join(room, producer=4)).values()
    (consumer,) = await consumers(room, "consumer")

    async def pass_time(seconds: float) -> None:
        for _ in range(4):
            await room.pass_time(seconds / 4)
            await room.tell(producer)
            await room.hear(consumer)

    async def is_avoided_for(seconds: float) -> None:
        await fail(room, await room.grant(consumer))
        assert (await room.hear(consumer)).available_bytes == 0
        await pass_time(seconds - 0.5)
        with pytest.raises(CapacityError):
            await room.grant(consumer)
        await pass_time(1.0)
        assert (await room.hear(consumer)).available_bytes == 4 * SLAB

    await is_avoided_for(UNREACHABLE_S)
    await is_avoided_for(2 * UNREACHABLE_S)
    await is_avoided_for(4 * UNREACHABLE_S)
    await pass_time(4 * UNREACHABLE_S)
    await is_avoided_for(UNREACHABLE_S)


async def test_a_producer_that_starts_anew_is_avoided_and_suspected_no_more(
    room: LedgerRoom,
) -> None:
    (producer,) = (await join(room, producer=4)).values()
    burnt = await consumers(room, "a", "b", "c")
    for consumer in burnt:
        await fail(room, await room.grant(consumer))
        with pytest.raises(CapacityError) as caught:
            await room.grant(consumer)
        assert caught.value.details["ruled_out_count"] == 1
    producer.restart()
    await room.join(producer)
    await join(room, wider=16)
    assert await lender(room, burnt[1]) == "producer"


async def test_no_more_is_remembered_than_a_record_may_hold(room: LedgerRoom) -> None:
    (consumer,) = await consumers(room, "consumer")
    for number in range(70):
        await room.join(PaperProducer(name=f"p-{number}", slabs=1))
        await fail(room, await room.grant(consumer))
    assert await lender(room, consumer) in {f"p-{number}" for number in range(6)}


# --- Terms -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("terms", "fits"),
    [
        ({}, "small"),
        ({"transport": TransportKind.CUDA_VMM}, "cuda"),
        ({"slab_bytes": 2 * SLAB}, "wide"),
        ({"node": "node-1"}, "far"),
        ({"exclude": ["small"]}, "cuda"),
        ({"exclude": ["small", "cuda", "nobody"]}, "wide"),
        ({"transport": TransportKind.MEMFD, "node": "node-0", "exclude": ["small"]}, "wide"),
    ],
)
async def test_the_tightest_that_meets_the_terms_lends(
    room: LedgerRoom, terms: dict[str, Any], fits: str
) -> None:
    for name, slabs, changes in (
        ("small", 4, {}),
        ("cuda", 5, {"transport": TransportKind.CUDA_VMM}),
        ("wide", 6, {"slab_bytes": 2 * SLAB}),
        ("far", 8, {"node": "node-1"}),
    ):
        producer = PaperProducer(name=name, slabs=slabs)
        for _ in range(2):
            await room.tell(producer, **changes)
    (consumer,) = await consumers(room, "consumer")
    assert (await room.grant(consumer, 2, **terms)).lease.producer_id == fits
    everyone = ["small", "cuda", "wide", "far"]
    await room.ledger.put_placements(
        PlacementPlan(pairings=[Pairing(consumer_id="consumer", producers=everyone)])
    )
    assert (await room.grant(consumer, 2, **terms)).lease.producer_id == fits


async def test_when_nothing_meets_the_terms_the_refusal_says_how_many_were_ruled_out(
    room: LedgerRoom,
) -> None:
    await join(room, **{f"p-{number}": 4 + number for number in range(40)})
    (consumer,) = await consumers(room, "consumer")
    with pytest.raises(CapacityError) as caught:
        await room.grant(consumer, 2, node="nowhere", min_bytes=SLAB)
    details = caught.value.details
    assert (details["available_bytes"], details["ruled_out_count"]) == (0, 40)
    everyone = [f"p-{number}" for number in range(39)]
    assert (await room.grant(consumer, 2, exclude=everyone)).lease.producer_id == "p-39"


@pytest.mark.parametrize(
    "terms",
    [
        {"transport": "pigeon"},
        {"slab_bytes": 0},
        {"slab_bytes": "64"},
        {"node": "two words"},
        {"exclude": "producer"},
        {"exclude": [""]},
        {"exclude": ["p"] * 65},
        {"exclude": [{"producer": "p"}]},
    ],
)
async def test_terms_that_cannot_be_are_refused_as_invalid(
    http: httpx.AsyncClient, terms: dict[str, object]
) -> None:
    answer = await http.post(
        "/v1/leases",
        json={"consumer_id": "consumer", "bytes": SLAB} | terms,
        headers={"Idempotency-Key": "key"},
    )
    assert (answer.status_code, answer.json()["code"]) == (422, "request_invalid")
    answer = await http.post("/v1/leases/l/release", json={"epoch": 1, "failure": "bored"})
    assert (answer.status_code, answer.json()["code"]) == (422, "request_invalid")
