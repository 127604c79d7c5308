"""The books with a hand on their clock, and the checks that follow every test.

`LedgerRoom` opens real books over a real server and adds what only tests may do: move the clock
forward, lose the books, look for keys that nobody would ever remove. In a room of `ledger_room`
Redis time stands still, but for what a test lets pass: how long the machine takes ages nobody.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Final

from aqua_coordinator.store import Ledger, Pipeline, open_pool
from aqua_coordinator.store.keys import KEYS, PERMANENT, TAG
from aqua_coordinator.store.pipeline import Answer
from aqua_coordinator.store.rows import ConsumerBooked, Grant, ProducerBooked
from aqua_coordinator.store.scripts import (
    MAX_GAP_S,
    SWEEP_PERIOD_S,
    Library,
    load_library,
)
from aqua_protocol.leases import LeaseView
from harness.bounds import HANG_S
from harness.members_on_paper import ADOPTION, PaperConsumer, PaperProducer

ATTACH_WINDOW_S: Final = 10.0
SILENT_S: Final = 20.0
"""Below the default time to live, so that tests can tell the two apart."""
MAX_STOP_S: Final = 60.0
NOW_S: Final = 1_800_000_000
"""Redis time, in Unix seconds, where it stands still."""
REPORT_EVERY: Final = 4
"""Sweeps between two reports of a member that is there."""


class LedgerRoom:
    """Books on a server, for one test.

    Attributes:
        ledger: What is tested.
        pipeline: Below it, for plain commands.
        url: The server's.
        spread_s, silent_s: Time between reports and silence allowed, as the last sweep found them.
    """

    def __init__(self, url: str, pipeline: Pipeline) -> None:
        self.url = url
        self.pipeline = pipeline
        self.ledger = Ledger(pipeline, ADOPTION)
        self.spread_s, self.silent_s = 0.0, SILENT_S
        self._keys = itertools.count()

    async def command(self, *words: str) -> Answer:
        """A plain command to the server."""
        return await self.pipeline.command(*words)

    # --- Members -------------------------------------------------------------------

    async def tell(self, producer: PaperProducer, **changes: object) -> ProducerBooked:
        """Send the producer's next report."""
        booked = await self.ledger.report_producer(producer.report(**changes))
        producer.books_id = booked.books_id
        return booked

    async def join(self, producer: PaperProducer) -> PaperProducer:
        """Report until the producer may be granted from."""
        await self.tell(producer)
        assert (await self.tell(producer)).grantable
        return producer

    async def hear(self, consumer: PaperConsumer, **changes: object) -> ConsumerBooked:
        """Send the consumer's next report."""
        return await self.ledger.report_consumer(consumer.report(**changes))

    async def grant(
        self, consumer: PaperConsumer, slabs: int = 1, *, key: str | None = None, **changes: object
    ) -> Grant:
        """Ask for a lease under a fresh key, or this one."""
        return await self.ledger.grant_lease(
            consumer.request(slabs, **changes),
            idempotency_key=key or f"key-{next(self._keys)}",
            attach_window_s=ATTACH_WINDOW_S,
        )

    async def attached(
        self, producer: PaperProducer, consumer: PaperConsumer, slabs: int = 1, **changes: object
    ) -> LeaseView:
        """A lease that the producer has reported handed out, and the consumer names."""
        lease = (await self.grant(consumer, slabs, key=None, **changes)).lease
        producer.hand_out(lease)
        consumer.use(lease)
        await self.tell(producer)
        return await self.ledger.lease(lease.lease_id)

    # --- Time ----------------------------------------------------------------------

    async def sweep(self, *, is_refusing: bool = False, is_present: bool = False) -> int:
        """One sweep of one coordinator."""
        self.spread_s, self.silent_s = await self.ledger.advance_clock(
            silent_s=SILENT_S,
            max_stop_s=MAX_STOP_S,
            is_refusing=int(is_refusing),
            is_present=int(is_present),
        )
        return await self.ledger.sweep(silent_s=self.silent_s)

    async def pass_time(self, seconds: float) -> None:
        """Let the books' clock advance, as if coordinators had been sweeping meanwhile."""
        await self.sweep()
        await self.pipeline.command("HINCRBY", KEYS["books"], "paused_us", -round(seconds * 1e6))

    async def hold_clock(self, clock_us: int) -> None:
        """Set the books' clock, and count this as a sweep: real time plays no part any more."""
        await self.command("EVAL", _HOLD_CLOCK, "1", KEYS["books"], str(clock_us))

    async def live(
        self, seconds: float, *members: PaperProducer | PaperConsumer, is_refusing: bool = False
    ) -> int:
        """Let real time pass while a coordinator sweeps and these report; counts what ended."""
        ended = 0
        for number in range(round(seconds / SWEEP_PERIOD_S)):
            await self.let_pass(SWEEP_PERIOD_S)
            ended += await self.sweep(is_refusing=is_refusing, is_present=True)
            for member in members if number % REPORT_EVERY == 0 else ():
                if isinstance(member, PaperProducer):
                    await self.tell(member)
                else:
                    await self.hear(member)
        return ended

    async def clock_us(self) -> int:
        """The books' clock as the last sweep left it."""
        paused, swept = await self.command("HMGET", KEYS["books"], "paused_us", "swept_us")
        return int(swept) - int(paused)

    async def stand_still(self, seconds: float) -> None:
        """Let real time pass without any coordinator: what `pass_time` does, and no sweep."""
        assert seconds > MAX_GAP_S, "shorter absences do not count"
        await self.let_pass(seconds)

    async def let_pass(self, seconds: float) -> None:
        """Let real time pass since the last sweep."""
        for field in ("paused_us", "swept_us"):
            await self.pipeline.command("HINCRBY", KEYS["books"], field, -round(seconds * 1e6))

    async def lose_books(self) -> None:
        """Everything in Redis is gone."""
        await self.pipeline.command("FLUSHALL")

    # --- Checks --------------------------------------------------------------------

    async def check(self) -> None:
        """The books agree with themselves, and no key would stay for ever."""
        if await self.pipeline.command("EXISTS", KEYS["books"]):
            faults = await self.ledger.audit()
            assert not faults, faults
        assert await self.leaks() == []

    async def leaks(self) -> list[str]:
        """Keys that neither expire nor are known to be removed by anybody."""
        names = sorted(KEYS.items(), key=lambda item: -len(item[1]))
        owners = {
            "producer": "producers",
            "consumer": "consumers",
            "reclaim": "reclaims",
        }
        leaked = []
        for raw in await self.pipeline.command("KEYS", "*"):
            key = raw.decode()
            noun = next((noun for noun, name in names if _is(key, name)), None)
            if noun is None:
                leaked.append(f"{key} is nobody's")
                continue
            if await self.pipeline.command("PTTL", key) >= 0:
                continue
            if noun not in PERMANENT:
                leaked.append(f"{key} never expires")
            elif noun == "lease":
                owner = (await self.ledger.lease(key.removeprefix(KEYS["lease"]))).producer_id
                index, lease_id = KEYS["producer_leases"] + owner, key.removeprefix(KEYS["lease"])
                if await self.pipeline.command("ZSCORE", index, lease_id) is None:
                    leaked.append(f"{key} is not booked on {owner}")
            elif noun in owners:
                member = key.removeprefix(KEYS[noun])
                if await self.pipeline.command("ZSCORE", KEYS[owners[noun]], member) is None:
                    leaked.append(f"{key} is not listed in {owners[noun]}")
        return leaked


_HOLD_CLOCK: Final = """
local time = redis.call('TIME')
local now_us = tonumber(time[1]) * 1000000 + tonumber(time[2])
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HSET', KEYS[1], 'swept_us', string.format('%d', now_us),
    'paused_us', string.format('%d', now_us - tonumber(ARGV[1])))
end
"""


def _is(key: str, name: str) -> bool:
    return key.startswith(name) if name.endswith(":") and name != TAG else key == name


def held(library: Library, now_s: int = NOW_S) -> Library:
    """The library, by a Redis time that stands at `now_s`."""
    clock = "redis.call('TIME')"
    assert clock in library.source, library.name
    name = f"{library.name}_{now_s}"
    source = library.source.replace(clock, f"{{{now_s}, 0}}")
    return Library(name, source.replace(library.name, name))


@contextlib.asynccontextmanager
async def room_of(url: str, library: Library) -> AsyncIterator[LedgerRoom]:
    """The books on the server at `url`, as they are, by these scripts."""
    pool = open_pool(url, connect_timeout_s=HANG_S, max_connections=8)
    pipeline = Pipeline(pool, timeout_s=HANG_S, library=library)
    pipeline.start()
    try:
        yield LedgerRoom(url, pipeline)
    finally:
        await pipeline.close()


@contextlib.asynccontextmanager
async def ledger_room(url: str) -> AsyncIterator[LedgerRoom]:
    """Fresh books on the server at `url`, checked at the end."""
    async with room_of(url, held(load_library())) as room:
        await room.lose_books()
        await room.command("FUNCTION", "FLUSH")
        yield room
        await room.check()
