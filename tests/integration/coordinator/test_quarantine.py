"""Records that cannot be right: they are set aside, and everything goes on.

Members that lie and keys that hold junk, each followed by the same question: do expiry, reports,
grants and reads go on, does everybody else keep its lease, and do the books reach what is lent?
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Final

import httpx
import pytest

from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.store.history import History
from aqua_coordinator.store.keys import KEYS, PERMANENT
from aqua_protocol import LeaseState
from aqua_protocol.ids import MAX_EPOCH
from aqua_protocol.leases import LeaseView, Pairing, PlacementPlan, ReclaimRequest
from aqua_protocol.members import HeldLease
from aqua_protocol.profile import ModelProfile, ProfileLabel
from harness.ledger_room import ATTACH_WINDOW_S, LedgerRoom, ledger_room
from harness.members_on_paper import DOMAIN, SLAB, PaperConsumer, PaperProducer
from harness.poison import LAST_ID


@dataclass
class Town:
    """Two producers that lend, each to a consumer of its own, and one lease not attached yet."""

    room: LedgerRoom
    producers: tuple[PaperProducer, PaperProducer]
    consumers: tuple[PaperConsumer, PaperConsumer]
    leases: list[LeaseView]
    pending: LeaseView
    reclaim_id: str

    async def heartbeat(self) -> None:
        """Let every member report."""
        for producer in self.producers:
            await self.room.tell(producer)
        for consumer in self.consumers:
            await self.room.hear(consumer)

    async def read_everything(self) -> None:
        """Read what can be read."""
        ledger = self.room.ledger
        for read in (
            *(ledger.summary, ledger.producers, ledger.consumers, ledger.leases),
            *(ledger.reclaims, ledger.placements, ledger.profiles, ledger.quarantined),
            ledger.quotas,
        ):
            await read()
        await ledger.events(after="0", limit=1000)
        history = History(self.room.pipeline)
        await history.samples(0)
        await history.reclaims(0, 1000)
        await history.latest_events(1000)

    async def require_health(self) -> None:
        """Reports, expiry, grants and reads go on, and the books are what is lent."""
        for _ in range(3):
            await self.heartbeat()
            await self.room.sweep()
        assert await self.room.ledger.audit() == []
        await self.read_everything()
        for lease in self.leases:
            view = await self.room.ledger.lease(lease.lease_id)
            assert (view.state, view.bytes) == (LeaseState.ACTIVE, lease.bytes)
        granted = await self.room.grant(self.consumers[1], 1, min_bytes=SLAB)
        await self.room.ledger.release_lease(
            granted.lease.lease_id, epoch=granted.lease.epoch, as_consumer=None
        )
        for _ in range(4):
            await self.room.pass_time(ATTACH_WINDOW_S + 0.1)
            await self.heartbeat()
            await self.room.sweep()
        rows = await self.room.ledger.producers()
        assert {row.producer_id: (row.leased_bytes, row.grantable) for row in rows} == {
            producer.name: (sum(held.held_bytes for held in producer.held.values()), True)
            for producer in self.producers
        }
        summary = await self.room.ledger.summary()
        assert summary.leases_by_state(summary.sums)[LeaseState.ACTIVE] == len(self.leases)
        assert summary.leases_by_state(summary.sums)[LeaseState.GRANTED] == 0


@pytest.fixture
async def town(room: LedgerRoom) -> Town:
    """Books with something of everything in them."""
    producers = (PaperProducer(name="lender-0"), PaperProducer(name="lender-1"))
    consumers = (PaperConsumer(name="llm-0"), PaperConsumer(name="llm-1"))
    pairings = [
        Pairing(consumer_id=consumer.name, producers=[producer.name], reason="nearest")
        for consumer, producer in zip(consumers, producers, strict=True)
    ]
    await room.ledger.put_placements(PlacementPlan(plan_hash="plan", pairings=pairings))
    profile = ModelProfile(model="m", label=ProfileLabel.CONSUMER, needed_bytes=SLAB)
    await room.ledger.put_profile("m", profile.model_dump_json())
    leases = []
    for producer, consumer in zip(producers, consumers, strict=True):
        await room.join(producer)
        await room.hear(consumer)
        leases.append(await room.attached(producer, consumer, 2))
    pending = (await room.grant(consumers[0], 1)).lease
    order = ReclaimRequest(producer_id="lender-0", bytes=SLAB)
    reclaim = await room.ledger.open_reclaim(order, idempotency_key="order")
    town = Town(room, producers, consumers, leases, pending, reclaim.reclaim_id)
    await town.heartbeat()
    return town


# --- Members that lie ----------------------------------------------------------------------


def held(name: str, *, epoch: int = 1, consumer: str = "llm-1", slabs: int = 1) -> HeldLease:
    """A lease that a producer claims to have lent under."""
    return HeldLease(lease_id=name, epoch=epoch, consumer_id=consumer, held_bytes=slabs * SLAB)


async def set_ahead(room: LedgerRoom) -> int:
    """Put the books' epochs an hour ahead of the clock, so that they only count; the last one."""
    last = int(await room.command("HGET", KEYS["books"], "epoch")) + 3_600_000_000
    await room.command("HSET", KEYS["books"], "epoch", str(last))
    return last


@pytest.mark.parametrize("when", ["past", "next", "collides"])
async def test_invented_leases_stop_neither_grants_nor_expiry(town: Town, when: str) -> None:
    room, liar = town.room, PaperProducer(name="liar", slabs=64)
    await room.join(liar)
    last = await set_ahead(room)
    epochs = {"past": range(1, 33), "next": range(last + 1, last + 33), "collides": [last]}[when]
    names = [f"lease-{epoch}" for epoch in epochs]
    if when == "collides":
        names = [lease.lease_id for lease in (*town.leases, town.pending)]
    liar.held = {name: held(name, epoch=min(epochs)) for name in names}
    for _ in range(3):
        with contextlib.suppress(Exception):
            await room.tell(liar)
        await room.sweep()
    for _ in range(8):
        granted = await room.grant(town.consumers[1], 1)
        assert granted.lease.lease_id not in liar.held
    liar.held = {}
    await room.tell(liar)
    town.producers = (*town.producers, liar)  # type: ignore[assignment] # one more
    await room.pass_time(ATTACH_WINDOW_S + 0.1)
    await town.require_health()


async def test_a_colliding_id_is_drawn_again(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aqua_coordinator.store.ledger.secrets.token_hex", lambda _: "the same")
    grants = [await town.room.grant(town.consumers[0], 1) for _ in range(5)]
    assert len({grant.lease.lease_id for grant in grants}) == 5
    epochs = [grant.lease.epoch for grant in grants]
    assert epochs == sorted(epochs)


async def test_ids_cannot_be_told_from_the_clock(town: Town) -> None:
    granted = await town.room.grant(town.consumers[0], 1)
    assert str(granted.lease.epoch) not in granted.lease.lease_id
    assert granted.lease.lease_id.removeprefix("lease-") != f"{granted.lease.epoch:x}"


@pytest.mark.parametrize("slabs", [3, 14])
async def test_more_bytes_than_were_granted_are_the_producers_own(town: Town, slabs: int) -> None:
    producer, lease = town.producers[0], town.leases[0]
    producer.hand_out(lease, slabs=slabs)
    await town.room.tell(producer)
    assert (await town.room.ledger.lease(lease.lease_id)).bytes == lease.bytes
    assert (await town.room.ledger.consumer("llm-0")).leased_bytes == lease.bytes + SLAB
    view = await town.room.ledger.producer(producer.name)
    assert view.leased_bytes == slabs * SLAB + SLAB
    assert await town.room.ledger.audit() == []
    producer.hand_out(lease)
    await town.require_health()


# --- Keys that hold junk -------------------------------------------------------------------

OF_TENANTS: Final = {"tenant_leased", "producers_of", "consumers_of", "quota_waits"}
"""There are none in the town."""
NOUNS: Final = [noun for noun in KEYS if noun not in OF_TENANTS]


def name_of(town: Town, noun: str) -> str:
    """The key of this noun that somebody of the town uses."""
    name = KEYS[noun]
    if not name.endswith(":"):
        return name
    about = {
        "consumer": "llm-0",
        "consumer_leases": "llm-0",
        "free": DOMAIN,
        "unconfirmed": DOMAIN,
        "lease": town.leases[0].lease_id,
        "reclaim": town.reclaim_id,
        "claims": "llm-0",
        "idempotency": "lease:key",
    }
    return name + about.get(noun, "lender-0")


async def expire(town: Town, noun: str) -> None:
    """Let what was planted expire where everything does, since nobody may ever look at it."""
    if noun not in PERMANENT:
        await town.room.command("PEXPIRE", name_of(town, noun), "60000")


@pytest.mark.parametrize("noun", NOUNS)
@pytest.mark.parametrize("kind", ["string", "hash", "list"])
async def test_a_key_of_the_wrong_type_is_set_aside(town: Town, noun: str, kind: str) -> None:
    key = name_of(town, noun)
    await town.room.command("DEL", key)
    plant = {"string": ["SET", key, "junk"], "hash": ["HSET", key, "junk", "junk"]}
    await town.room.command(*plant.get(kind, ["RPUSH", key, "junk"]))
    await expire(town, noun)
    await town.require_health()


@pytest.mark.parametrize("noun", NOUNS)
async def test_a_key_that_is_lost_alone_heals_with_the_reports(town: Town, noun: str) -> None:
    await town.room.command("DEL", name_of(town, noun))
    await town.require_health()


JUNK: Final = {
    "a lease of junk": ["SET", "lease", "junk"],
    "an empty lease": ["SET", "lease", ""],
    "a binary lease": ["SET", "lease", "\0\n" * 9],
    "a lease of no state": ["SET", "lease", "happy\n2\n1\nlender-0\nllm-0\n1\n1\n1\n"],
    "a lease without a size": ["SET", "lease", "active\n2\n1\nlender-0\nllm-0\nnan\n1\n1\n"],
    "a lease of another": ["SET", "lease", "active\n2\n1\nlender-1\nllm-0\n65536\n1\n1\n"],
    "a lease of nobody": ["SET", "lease", "active\n2\n1\n \n \n65536\n1\n1\n"],
    "a lease of another epoch": [*("SET", "lease", "active\n2\n1\nlender-0\nllm-0\n65536\n1\n1\n")],
    "a lease of another consumer": [
        *("SET", "lease", "active\nEPOCH\nEPOCH\nlender-0\nllm-1\n65536\n1\n1\n")
    ],
    "a lease that ended": ["SET", "lease", "released\n2\n1\nlender-0\nllm-0\n0\n1\n1\nx"],
    "a producer of junk": ["HSET", "producer", "offered_bytes", "junk"],
    "a producer of fractions": ["HSET", "producer", "leased_bytes", "1.5"],
    "a producer over its offer": ["HSET", "producer", "leased_bytes", str(MAX_EPOCH)],
    "a producer of nowhere": ["HSET", "producer", "domain", ""],
    "a producer of no revision": ["HSET", "producer", "revision", "inf"],
    "a producer of no transport": ["HSET", "producer", "transport", "pigeon"],
    "a producer's odd counts": ["HSET", "producer", "states", "active=77 happy=-1"],
    "a producer of less": ["HSET", "producer", "leased_bytes", "0"],
    "a producer of one node": ["HDEL", "producer", "node"],
    "a consumer of junk": ["HSET", "consumer", "wanted_bytes", "junk"],
    "a consumer of no revision": ["HSET", "consumer", "revision", "junk"],
    "a consumer of nowhere": ["HDEL", "consumer", "domain"],
    "a deadline of nobody": ["ZADD", "deadlines", "0", "nobody"],
    "a later deadline of nobody": ["ZADD", "deadlines", "1e300", "not a name"],
    "a producer unheard of": ["ZADD", "producers", "0", "nobody"],
    "a producer of no name": ["ZADD", "producers", "0", "!! \xff"],
    "a silent nobody": ["ZADD", "producers_seen", "-inf", "nobody"],
    "a consumer of no name": ["ZADD", "consumers", "0", "!! \xff"],
    "a silent consumer": ["ZADD", "consumers_seen", "0", "nobody"],
    "a lease listed twice": ["ZADD", "producer_leases", "1", "LEASE-1"],
    "a listed lease of nobody": ["ZADD", "producer_leases", "1", "lease-of-nobody"],
    "a consumer's odd list": ["ZADD", "consumer_leases", "1", "LEASE-1"],
    "a consumer's list of junk": ["ZADD", "consumer_leases", "inf", "junk"],
    "free bytes of nobody": ["ZADD", "free", "1e300", "nobody"],
    "endless free bytes": ["ZADD", "free", "inf", "nobody"],
    "more free bytes than there are": ["ZADD", "free", "1000000000", "lender-0"],
    "a stranger to confirm": ["SADD", "unconfirmed", "nobody"],
    "an order of junk": ["HSET", "reclaim", "requested_bytes", "junk"],
    "an order with no deadline": ["HSET", "reclaim", "deadline_s", "nan"],
    "an order of nobody": ["HSET", "reclaim", "producer_id", "!!"],
    "a listed order of nobody": ["ZADD", "producer_reclaims", "1", "nobody"],
    "a reclaim of nobody": ["ZADD", "reclaims", "1", "nobody"],
    "an ended reclaim of nobody": ["ZADD", "ended_reclaims", "0", "nobody"],
    "a plan of junk": ["HSET", "placements", "!!", "!!"],
    "a pairing with nobody": ["HSET", "placements", "llm-1", "nobody  lender-1 !!"],
    "a profile of junk": ["HSET", "profiles", "m2", "junk"],
    "an event of junk": ["XADD", "events", "*", "event", "junk"],
    "events that take no more": ["XADD", "events", LAST_ID, "event", "junk"],
    "a quarantine that takes no more": ["XADD", "quarantine", LAST_ID, "key", "junk"],
    "a claim of junk": ["SET", "claims", "junk"],
    "an answer of junk": ["SET", "idempotency", "junk"],
    "books of an odd plan": ["HSET", "books", "plan_hash", "x" * 1000],
    "an odd clock": [
        *("HSET", "books", "stopped_us", "junk", "calm_us", "nan", "spread_us", "-inf"),
        *("stood_absence_us", "junk", "standing", "junk"),
    ],
    "an odd count": ["HSET", "books", "quarantined", "junk"],
}


@pytest.mark.parametrize("what", JUNK)
async def test_a_record_of_junk_is_fatal_to_nothing(town: Town, what: str) -> None:
    command, noun, *words = JUNK[what]
    lease, other = town.leases
    words = [word.replace("LEASE-1", other.lease_id) for word in words]
    words = [word.replace("EPOCH", str(lease.epoch)) for word in words]
    await town.room.command(command, name_of(town, noun), *words)
    await expire(town, noun)
    await town.require_health()


async def test_what_was_set_aside_is_counted_and_listed_in_pages(town: Town) -> None:
    ledger = town.room.ledger
    assert (await ledger.summary()).quarantined_count == 0
    assert await ledger.quarantined() == ([], None)
    for number in range(5):
        await town.room.command("ZADD", KEYS["deadlines"], "0", f"junk-{number}")
    await town.room.sweep()
    assert (await ledger.summary()).quarantined_count == 5
    first, cursor = await ledger.quarantined(limit=3)
    rest, end = await ledger.quarantined(cursor=cursor, limit=3)
    assert end is None
    assert [record.key for record in (*first, *rest)] == [KEYS["deadlines"]] * 5
    assert {record.reason.split()[0] for record in (*first, *rest)} == {
        f"junk-{number}" for number in range(5)
    }


async def test_a_lease_set_aside_is_kept_as_it_was(town: Town) -> None:
    lease = town.leases[0]
    await town.room.command("SET", KEYS["lease"] + lease.lease_id, "junk")
    await town.room.sweep()
    records, _ = await town.room.ledger.quarantined()
    assert (records[0].key, records[0].record) == (KEYS["lease"] + lease.lease_id, "junk")


@pytest.mark.parametrize("is_left", [False, True])
async def test_a_record_that_every_list_has_lost_is_found_by_its_name(
    town: Town, *, is_left: bool
) -> None:
    (lease, _), room = town.leases, town.room
    for noun, member in (("producer_leases", "lender-0"), ("consumer_leases", "llm-0")):
        await room.command("DEL", KEYS[noun] + member)
    await room.command("ZREM", KEYS["deadlines"], lease.lease_id)
    if is_left:
        for noun in ("producers", "producers_seen"):
            await room.command("ZREM", KEYS[noun], "lender-0")
        await room.command("DEL", KEYS["producer"] + "lender-0")
    assert any(f"{lease.lease_id} is not listed" in fault for fault in await room.ledger.audit())
    found = await room.ledger.lease(lease.lease_id)
    assert found.state is (LeaseState.LOST if is_left else LeaseState.ACTIVE)
    await room.ledger.audit()
    assert await room.ledger.audit() == []


# --- Over HTTP -----------------------------------------------------------------------------


async def test_operators_see_the_quarantine_and_alerts_its_count(
    store: EmbeddedValkey, http: httpx.AsyncClient
) -> None:
    async with ledger_room(store.url) as room:
        await room.ledger.open()
        await room.command("ZADD", KEYS["deadlines"], "0", "junk")
        await room.sweep()
    page = (await http.get("/v1/quarantine", params={"limit": 1})).json()
    assert page["records"][0]["key"] == KEYS["deadlines"]
    cursor = {"cursor": page["next_cursor"]}
    assert (await http.get("/v1/quarantine", params=cursor)).json()["records"] == []
    assert "aqua_books_quarantined_total 1.0" in (await http.get("/metrics")).text
    assert (await http.get("/readyz")).status_code == 200
