"""Coordinators of two versions over one set of books: this one, one before it, and one to come."""

from __future__ import annotations

import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final, cast
from unittest import mock

import pytest

from aqua_coordinator.store import Ledger, scripts
from aqua_coordinator.store.keys import KEYS
from aqua_coordinator.store.scripts import LUA, SCRIPTS, Library, assemble
from aqua_protocol import LeaseState
from aqua_protocol.errors import StoreUnavailableError
from harness.ledger_room import NOW_S, LedgerRoom, held, room_of
from harness.members_on_paper import ADOPTION, PaperConsumer, PaperProducer

RELEASED: Final = Path(__file__).with_name("library_of_v0.1.0.lua")
"""The library that v0.1.0 loads into Redis; each release puts its own in its place."""


def last_release() -> Library:
    """Scripts as they were released."""
    source = RELEASED.read_text()
    found = re.match(r"#!lua name=(\w+)\n", source)
    assert found
    return Library(found[1], source)


def next_version() -> Library:
    """Scripts that read schema 2 as well, whose records have one field more."""
    with mock.patch.dict(cast("dict[str, int | str]", scripts.CONSTANTS), {"max_schema": 2}):
        ours = assemble({name: LUA.joinpath(f"{name}.lua").read_text() for name in SCRIPTS})
    longer = ours.source.replace("or lease.later ~= '' then", "or true then")
    longer = longer.replace("lease.tenant .. lease.later", "lease.tenant .. '\\nmore'")
    assert longer.count("more'") == 1
    return Library(ours.name, longer)


def version_without_room() -> Library:
    """Scripts whose records lack the last field."""
    ours = scripts.load_library()
    name = f"{ours.name}_short"
    shorter = ours.source.replace("lease.reason, integer(lease.granted_bytes),", "lease.reason,")
    assert shorter != ours.source
    return Library(name, shorter.replace(ours.name, name))


def running(room: LedgerRoom, library: Library) -> AbstractAsyncContextManager[LedgerRoom]:
    """A coordinator of that version, over the same books."""
    return room_of(room.url, held(library))


OTHERS: Final = {
    "released": last_release,
    "next": next_version,
    "shorter": version_without_room,
}


@pytest.mark.parametrize("which", OTHERS)
async def test_two_versions_serve_the_same_members(room: LedgerRoom, which: str) -> None:
    async with running(room, OTHERS[which]()) as other:
        producer, consumer = await room.join(PaperProducer()), PaperConsumer()
        leases = []
        for turn in range(8):
            here, there = (room, other) if turn % 2 else (other, room)
            await there.hear(consumer)
            lease = (await here.grant(consumer, key=f"turn-{turn}")).lease
            producer.hand_out(lease)
            consumer.use(lease)
            leases.append(lease)
            await there.tell(producer)
            await here.ledger.renew_lease(
                lease.lease_id, epoch=lease.epoch, ttl_s=30, as_consumer=None
            )
            await here.tell(producer)
            await here.sweep()
            await there.sweep()
        assert (await room.hear(consumer)).ended == []
        for lease in leases:
            assert (await room.ledger.lease(lease.lease_id)).state is LeaseState.ACTIVE
            await other.ledger.lease(lease.lease_id)
        assert await room.command("HGET", KEYS["books"], "schema") == b"1"
        await other.lose_books()
        for here in (other, room):
            await here.tell(producer)
        assert (await room.ledger.lease(leases[0].lease_id)).state is LeaseState.ACTIVE
        assert (await room.ledger.summary()).quarantined_count == 0


async def test_the_schema_rises_when_all_that_are_in_use_read_it(room: LedgerRoom) -> None:
    ours = room.pipeline.library_name
    async with running(room, next_version()) as newer:
        await room.ledger.open()
        for each in (room, newer, room, newer):
            await each.sweep()
        assert await room.command("HGET", KEYS["books"], "schema") == b"1"
        theirs = newer.pipeline.library_name
        await room.command("HSET", KEYS["libraries"], theirs, f"1 {NOW_S * 1_000_000} 1 2")
        await newer.sweep()
        assert await room.command("HGET", KEYS["books"], "schema") == b"1"
        await room.command("HSET", KEYS["libraries"], ours, "1 1 1 1")
        await newer.sweep()
        assert await room.command("HGET", KEYS["books"], "schema") == b"2"
        await newer.join(PaperProducer())
        for refused in (room.ledger.probe(), room.sweep(), room.ledger.producers()):
            with pytest.raises(StoreUnavailableError, match="schema 2, this version reads 1 to 1"):
                await refused
        with pytest.raises(StoreUnavailableError, match="schema 2"):
            await Ledger(room.pipeline, ADOPTION).open()
        assert [row.producer_id for row in await newer.ledger.producers()] == ["producer"]
        await newer.lose_books()


async def test_books_without_a_schema_are_of_the_first(room: LedgerRoom) -> None:
    producer = await room.join(PaperProducer())
    await room.command("HDEL", KEYS["books"], "schema")
    await room.tell(producer)
    await room.command("HSET", KEYS["books"], "schema", "0")
    with pytest.raises(StoreUnavailableError, match="schema 0"):
        await room.tell(producer)
    await room.lose_books()
