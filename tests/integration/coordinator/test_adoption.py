"""What books that were lost know again, and from whom: leases with a proof, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from aqua_coordinator.store import Ledger
from aqua_coordinator.store.adoption import FILE_NAME, AdoptionKeys
from aqua_coordinator.store.keys import KEYS
from aqua_coordinator.store.scripts import CONSTANTS
from aqua_protocol import ConfigError, LeaseState, ProtocolError
from aqua_protocol.members import MAX_LEASES_PER_MEMBER, HeldLease, UsedLease
from harness.ledger_room import LedgerRoom
from harness.members_on_paper import ADOPTION_KEY, SLAB, Pair, PaperConsumer, PaperProducer

MAX_ADOPTIONS: Final = int(CONSTANTS["max_adoptions"])


async def lent(room: LedgerRoom, producer: PaperProducer) -> int:
    """Slabs that the books say are out."""
    view = await room.ledger.producer(producer.name)
    assert view.free_bytes + view.leased_bytes == view.offered_bytes
    return view.leased_bytes // SLAB


@pytest.mark.parametrize("epoch", [1, 2**53 - 1])
@pytest.mark.parametrize("proof", [None, "65536.AAAAAAAAAAAAAAAAAAAAAA", "1.x"])
async def test_an_invented_lease_is_the_producers_own_and_names_no_consumer(
    room: LedgerRoom, pair: Pair, epoch: int, proof: str | None
) -> None:
    producer, consumer = pair
    producer.held["lease-of-mine"] = HeldLease(
        lease_id="lease-of-mine",
        epoch=epoch,
        consumer_id=consumer.name,
        held_bytes=3 * SLAB,
        proof=proof,
    )
    booked = await room.tell(producer)
    assert [(one.lease_id, one.epoch, one.reason) for one in booked.ended] == [
        ("lease-of-mine", epoch, "unproven")
    ]
    assert await lent(room, producer) == 3
    assert await room.ledger.leases() == ([], None)
    assert (await room.ledger.consumer(consumer.name)).leased_bytes == 0
    assert (await room.grant(consumer, 13)).lease.bytes == 13 * SLAB
    producer.held.clear()
    await room.tell(producer)
    assert await lent(room, producer) == 13


async def test_a_lease_of_lost_books_is_known_again_with_its_right(
    room: LedgerRoom, pair: Pair
) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer, 4)
    producer.hand_out(lease, slabs=3)
    await room.lose_books()
    await room.tell(producer)
    view = await room.ledger.lease(lease.lease_id)
    assert (view.state, view.bytes, view.epoch) == (LeaseState.ACTIVE, 3 * SLAB, lease.epoch)
    assert (await room.hear(consumer)).ended == []
    await room.tell(producer)
    assert (await room.grant(consumer)).lease.epoch > lease.epoch


@pytest.mark.parametrize(
    "change",
    [
        {"consumer_id": "somebody-else"},
        {"lease_id": "another-lease"},
        {"epoch": 7},
        {"proof": None},
        {"proof": "1048576.AAAAAAAAAAAAAAAAAAAAAA"},
    ],
)
async def test_a_proof_is_of_one_grant_only(
    room: LedgerRoom, pair: Pair, change: dict[str, object]
) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer, 2)
    await room.lose_books()
    held = producer.held.pop(lease.lease_id).model_copy(update=change)
    producer.held[held.lease_id] = held
    booked = await room.tell(producer)
    assert [one.reason for one in booked.ended] == ["unproven"]
    assert await lent(room, producer) == 2
    assert await room.ledger.leases() == ([], None)


async def test_a_proof_is_of_one_producer_and_one_life_of_it(room: LedgerRoom, pair: Pair) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer, 2)
    thief = await room.join(PaperProducer(name="thief"))
    await room.lose_books()
    thief.held = dict(producer.held)
    assert [one.reason for one in (await room.tell(thief)).ended] == ["unproven"]
    stolen = dict(producer.held)
    producer.restart()
    producer.held = stolen
    assert [one.reason for one in (await room.tell(producer)).ended] == ["unproven"]
    assert await room.ledger.leases() == ([], None)
    assert lease.lease_id in stolen


async def test_no_more_is_adopted_than_the_proof_says(room: LedgerRoom, pair: Pair) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer, 2)
    await room.lose_books()
    producer.hand_out(lease, slabs=9)
    await room.tell(producer)
    assert (await room.ledger.lease(lease.lease_id)).bytes == 2 * SLAB
    assert await lent(room, producer) == 9
    assert (await room.hear(consumer)).ended == []


async def test_a_record_that_a_proof_contradicts_is_set_aside(room: LedgerRoom, pair: Pair) -> None:
    """Also when everything else in the books agrees with the record."""
    producer, consumer = pair
    lease = await room.attached(producer, consumer, 2)
    key = KEYS["lease"] + lease.lease_id
    record = (await room.command("GET", key)).decode()
    await room.command("SET", key, record.replace("\nconsumer\n", "\nsomebody-else\n"))
    await room.ledger.audit()
    await room.tell(producer)
    assert (await room.ledger.lease(lease.lease_id)).consumer_id == consumer.name
    await room.ledger.audit()


async def test_a_consumer_cannot_be_barred_by_leases_that_it_never_had(
    room: LedgerRoom, pair: Pair
) -> None:
    _, consumer = pair
    liar = await room.join(PaperProducer(name="liar", slabs=MAX_LEASES_PER_MEMBER))
    for number in range(MAX_LEASES_PER_MEMBER):
        name = f"lease-{number:016x}"
        liar.held[name] = HeldLease(
            lease_id=name, epoch=1 + number, consumer_id=consumer.name, held_bytes=SLAB
        )
    for _ in range(2):
        await room.tell(liar)
    assert (await room.ledger.consumer(consumer.name)).leased_bytes == 0
    assert (await room.grant(consumer)).lease.producer_id == "producer"
    assert await room.command("EXISTS", KEYS["consumer_leases"] + consumer.name) == 1


async def test_a_report_adopts_a_bounded_number_and_the_next_one_goes_on(room: LedgerRoom) -> None:
    number = 2 * MAX_ADOPTIONS + 10
    producer = await room.join(PaperProducer(slabs=number))
    consumer = PaperConsumer()
    await room.hear(consumer)
    for _ in range(number):
        lease = (await room.grant(consumer)).lease
        producer.hand_out(lease)
        consumer.use(lease)
    await room.tell(producer)
    await room.lose_books()
    await room.hear(consumer)
    for adopted in (MAX_ADOPTIONS, 2 * MAX_ADOPTIONS, number):
        assert (await room.tell(producer)).ended == []
        assert await lent(room, producer) == number
        summary = await room.ledger.summary()
        assert summary.leases_by_state(summary.sums)[LeaseState.ACTIVE] == adopted
    assert (await room.hear(consumer)).ended == []
    assert (await room.ledger.consumer(consumer.name)).leased_bytes == number * SLAB


async def test_a_key_that_is_being_replaced_still_proves(room: LedgerRoom, pair: Pair) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer, 2)
    for keys, adopted in (([b"new", ADOPTION_KEY], [lease.lease_id]), ([b"new"], [])):
        await room.lose_books()
        await Ledger(room.pipeline, AdoptionKeys(keys)).report_producer(producer.report())
        assert [view.lease_id for view in (await room.ledger.leases())[0]] == adopted


async def test_claims_of_a_consumer_are_one_key_however_many_it_makes(room: LedgerRoom) -> None:
    consumer = PaperConsumer()
    await room.hear(consumer)
    before = await room.command("DBSIZE")
    for turn in range(20):
        consumer.used = {
            name: UsedLease(lease_id=name, epoch=1, mapped_bytes=SLAB)
            for name in (f"lease-{turn}-{number}" for number in range(1000))
        }
        await room.hear(consumer)
    assert await room.command("DBSIZE") == before + 1
    size = await room.command("STRLEN", KEYS["claims"] + consumer.name)
    assert size < 40 * int(CONSTANTS["max_claims"])


def test_a_directory_keeps_one_key_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / FILE_NAME
    AdoptionKeys.in_directory(path.parent)
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    text = path.read_text()
    AdoptionKeys.in_directory(path.parent)
    assert path.read_text() == text
    assert [name.name for name in path.parent.iterdir()] == [FILE_NAME]
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="open to others"):
        AdoptionKeys.in_directory(path.parent)
    path.chmod(0o600)
    path.write_text("junk")
    with pytest.raises(ConfigError, match="cannot keep the adoption key"):
        AdoptionKeys.in_directory(path.parent)


async def test_the_key_is_nowhere_in_redis(room: LedgerRoom, pair: Pair) -> None:
    producer, consumer = pair
    await room.attached(producer, consumer, 2)
    for name in await room.command("KEYS", "*"):
        assert ADOPTION_KEY not in await room.command("DUMP", name.decode())


async def test_a_lease_of_others_is_refused_with_any_proof(room: LedgerRoom, pair: Pair) -> None:
    producer, consumer = pair
    lease = await room.attached(producer, consumer, 2)
    thief = await room.join(PaperProducer(name="thief"))
    thief.hand_out(lease)
    thief.held[lease.lease_id] = thief.held[lease.lease_id].model_copy(
        update={"proof": producer.held[lease.lease_id].proof}
    )
    with pytest.raises(ProtocolError, match="belongs to others"):
        await room.tell(thief)
    assert (await room.ledger.lease(lease.lease_id)).producer_id == producer.name
