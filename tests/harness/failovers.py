"""Failovers of the books' Redis under load, and the account of what was acknowledged.

Coordinators (without a network in front) find the master by Sentinels, as in production. Members
take and release leases through them, note what they were told, and report anew when they are
refused, as real ones do with each heartbeat: a master that was chosen before their first report had
reached it knows none of them. A failover is one fault at a seeded moment, the Sentinels' new
choice, and the return of the node that was lost; afterwards the new master's books are compared
with the notes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Final

import httpx

from aqua_coordinator.app import Service
from aqua_coordinator.settings import CoordinatorSettings
from aqua_coordinator.store import Ledger, Pipeline, open_pool
from aqua_protocol.leases import LeaseGrant, LeaseView
from aqua_protocol.members import ProducerAck
from harness.asgi import as_json, client_of, error_of, hear, join
from harness.bounds import HANG_S, until
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer
from harness.redis_nodes import RedisNode, Sentinels, isolate, rejoin, replicated, resume, stop

COORDINATORS: Final = 2
MEMBERS: Final = 6
HELD: Final = 8
"""Leases that each member keeps, so that there is something to lose."""
REFUSALS: Final = frozenset({"store_unavailable", "service_unavailable"})
"""What a member asks again after."""
KINDS: Final = ("kill", "stop", "isolate", "hand over", "lag")


class Member:
    """Takes leases for ever, releases the oldest, and notes what it was told.

    Args:
        name: Its own.
        producer: Who lends to it, and reports with it.
        coordinators: Asked in turn.

    Attributes:
        held: Acknowledged, and not asked to be released: id to epoch.
        released: Whose release was acknowledged.
        epochs: In the order of their acknowledgement; each was asked for after the one before.
        lost: What the books denied.
        refusals: Answers that said: ask again.
        refusal: The last of them.
    """

    def __init__(
        self, name: str, producer: PaperProducer, coordinators: list[httpx.AsyncClient]
    ) -> None:
        self.consumer: Final = PaperConsumer(name=name)
        self.held: dict[str, int] = {}
        self.released: set[str] = set()
        self.epochs: list[int] = []
        self.lost: list[str] = []
        self.refusals = 0
        self.refusal = ""
        self._producer = producer
        self._coordinators = itertools.cycle(coordinators)

    async def run(self) -> None:
        """Go on until cancelled."""
        for number in itertools.count():
            key = {"Idempotency-Key": f"{self.consumer.name}-{number}"}
            wish = {"consumer_id": self.consumer.name, "bytes": SLAB, "ttl_s": 300}
            answer = await self._insist("/v1/leases", wish, key)
            if answer is None:
                await self._report()
            else:
                lease = LeaseGrant.model_validate_json(answer).lease
                self.epochs.append(lease.epoch)
                self.held[lease.lease_id] = lease.epoch
            if len(self.held) > HELD:
                await self._release(next(iter(self.held)))

    async def _report(self) -> None:
        """Say who there is; what is refused of it is said after the next refusal."""
        http = next(self._coordinators)
        path = f"/v1/producers/{self._producer.name}"
        answer = await http.put(path, json=as_json(self._producer.report()))
        if answer.is_success:
            self._producer.books_id = ProducerAck.model_validate_json(answer.content).books_id
        path = f"/v1/consumers/{self.consumer.name}"
        await http.put(path, json=as_json(self.consumer.report()))

    async def _release(self, lease_id: str) -> None:
        epoch = self.held.pop(lease_id)
        if await self._insist(f"/v1/leases/{lease_id}/release", {"epoch": epoch}, {}) is not None:
            self.released.add(lease_id)

    async def _insist(
        self, path: str, body: dict[str, object], headers: dict[str, str]
    ) -> bytes | None:
        for http in self._coordinators:
            answer = await http.post(path, json=body, headers=headers)
            if answer.is_success:
                return answer.content
            refusal = error_of(answer)
            if refusal.code not in REFUSALS:
                self.lost.append(f"{path}: {refusal.message}")
                return None
            self.refusals += 1
            self.refusal = refusal.message
            await asyncio.sleep(0.01)
        raise AssertionError("coordinators end")


class FailoverRoom:
    """Nodes, Sentinels, coordinators and members of one test.

    Attributes:
        work: What the members do, a task for each.
        lost: What was acknowledged, and is not so in the books: one sentence each.
        failovers: How many there have been.
    """

    def __init__(
        self,
        nodes: list[RedisNode],
        sentinels: Sentinels,
        members: list[Member],
        *,
        min_replicas: int,
        seed: int,
    ) -> None:
        self.nodes: Final = nodes
        self.sentinels: Final = sentinels
        self.members: Final = members
        self.work: Final = [asyncio.create_task(member.run()) for member in members]
        self.lost: list[str] = []
        self.failovers = 0
        self._waits = min_replicas > 0
        self._random = Random(seed)

    @property
    def refusals(self) -> int:
        """Answers that said: ask again."""
        return sum(member.refusals for member in self.members)

    @property
    def acknowledged(self) -> int:
        """Leases that members were told of."""
        return sum(len(member.epochs) for member in self.members)

    async def wait_for(self, count: int) -> None:
        """Wait until so many more leases have been acknowledged."""
        wanted, refused = self.acknowledged + count, self.refusals
        try:
            async with asyncio.timeout(HANG_S):
                while self.acknowledged < wanted:
                    for ended in filter(asyncio.Task.done, self.work):
                        await ended  # With what ended it: members go on for ever.
                    await asyncio.sleep(0.002)
        except TimeoutError:
            heard = [(member.refusal, member.lost[-1:]) for member in self.members]
            raise AssertionError(
                f"{wanted - self.acknowledged} of {count} leases were not granted in {HANG_S:g} s,"
                f" with {self.refusals - refused} refusals; members heard last: {heard}"
            ) from None

    async def fail_over(self, kind: str) -> None:
        """One fault, one new master, everybody back, and the account."""
        await self.wait_for(self._random.randint(1, 60))
        # Beside busy neighbours Sentinels may be about a failover of their own.
        await asyncio.to_thread(until, self._in_step, "the nodes do not find together")
        port = self.sentinels.master_port()
        (old,) = (node for node in self.nodes if node.port == port)
        laggard = self._random.choice([node for node in self.nodes if node is not old])
        await asyncio.to_thread(self._break, kind, old, laggard)
        await self._switch(kind, old)
        if kind == "isolate" and not self._waits:
            await self.wait_for(20)  # Acknowledged by a master that no other follows any more.
        await asyncio.to_thread(self._mend, kind, old)
        await asyncio.to_thread(until, self._in_step, "the nodes do not find together")
        await self.wait_for(MEMBERS)
        self.failovers += 1
        await self._account()

    def _break(self, kind: str, old: RedisNode, laggard: RedisNode) -> None:
        if kind == "lag":
            stop(laggard)
        if kind in {"kill", "lag"}:
            old.kill()
            resume(laggard)
        elif kind == "stop":
            stop(old)
        elif kind == "isolate":
            isolate(old)

    async def _switch(self, kind: str, old: RedisNode) -> None:
        def switched() -> bool:
            if kind == "hand over" and self.sentinels.master_port() == old.port:
                self.sentinels.hand_over()
            return self.sentinels.master_port() not in {None, old.port}

        await asyncio.to_thread(until, switched, f"no failover after {kind}")

    def _mend(self, kind: str, old: RedisNode) -> None:
        if kind in {"kill", "lag"}:
            old.start()
        elif kind == "stop":
            resume(old)
        elif kind == "isolate":
            rejoin(old)

    def _in_step(self) -> bool:
        """Whether all agree on the master, and both others follow it."""
        port = self.sentinels.master_port()
        states = {node.port: node.info() for node in self.nodes}
        return (
            port is not None
            and states[port]["role"] == "master"
            and states[port]["connected_slaves"] == len(self.nodes) - 1
            and all(
                state["role"] == "slave"
                and state["master_port"] == port
                and state["master_link_status"] == "up"
                for node, state in states.items()
                if node != port
            )
        )

    async def _account(self) -> None:
        """Compare the master's books with what members were told."""
        held = [dict(member.held) for member in self.members]
        released = [set(member.released) for member in self.members]
        port = self.sentinels.master_port()
        (master,) = (node for node in self.nodes if node.port == port)
        async with books_at(master.url) as ledger:
            booked = await _all_leases(ledger)
            assert await ledger.audit() == []
        for member, before, ended in zip(self.members, held, released, strict=True):
            for lease_id, epoch in before.items():
                # Released meanwhile is not lost.
                if lease_id in member.held and booked.get(lease_id) != epoch:
                    self.lost.append(f"{lease_id} was granted")
                    del member.held[lease_id]
            self.lost += [f"{lease_id} was released" for lease_id in ended & booked.keys()]
            self.lost += member.lost
            member.lost.clear()
            member.released -= ended


async def _all_leases(ledger: Ledger) -> dict[str, int]:
    """Every booked lease and its epoch."""
    found: list[LeaseView] = []
    page, cursor = await ledger.leases(limit=1000)
    while True:
        found += page
        if cursor is None:
            return {view.lease_id: view.epoch for view in found}
        page, cursor = await ledger.leases(limit=1000, cursor=cursor)


@contextlib.asynccontextmanager
async def books_at(url: str) -> AsyncIterator[Ledger]:
    """The books as they are at one server."""
    pool = open_pool(url, connect_timeout_s=HANG_S, max_connections=2)
    pipeline = Pipeline(pool, timeout_s=HANG_S)
    pipeline.start()
    try:
        yield Ledger(pipeline)
    finally:
        await pipeline.close()


@contextlib.contextmanager
def watched_nodes(
    directory: Path, environments: dict[int, dict[str, str]] | None = None
) -> Iterator[tuple[list[RedisNode], Sentinels]]:
    """A master, two replicas and three Sentinels."""
    with (
        replicated(directory, environments=environments) as nodes,
        Sentinels(directory, nodes[0]) as sentinels,
    ):
        yield nodes, sentinels


@contextlib.asynccontextmanager
async def failover_room(
    nodes: list[RedisNode], sentinels: Sentinels, *, min_replicas: int, seed: int
) -> AsyncIterator[FailoverRoom]:
    """Coordinators that wait for so many replicas, and members at work."""
    settings = CoordinatorSettings.model_validate(
        {
            "redis_url": sentinels.url,
            "min_replicas": min_replicas,
            "store_timeout_s": 5.0,
            "silent_member_s": 3600,
            "attach_window_s": 300,
        }
    )
    async with contextlib.AsyncExitStack() as stack:
        coordinators = []
        for _ in range(COORDINATORS):
            service = await stack.enter_async_context(Service(settings, sentinels.url).running())
            coordinators.append(await stack.enter_async_context(client_of(service)))
        producer = PaperProducer(slabs=4000)
        names = [f"member-{number}" for number in range(MEMBERS)]
        members = [Member(name, producer, coordinators) for name in names]
        await join(coordinators[0], producer)
        for member in members:
            await hear(coordinators[0], member.consumer)
        room = FailoverRoom(nodes, sentinels, members, min_replicas=min_replicas, seed=seed)
        try:
            yield room
        finally:
            for task in room.work:
                task.cancel()
            outcomes = await asyncio.gather(*room.work, return_exceptions=True)
        for outcome in outcomes:
            assert isinstance(outcome, asyncio.CancelledError), outcome
