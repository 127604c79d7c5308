"""A day of online requests on all engines of the cluster, on one clock, lending memory or not.

The engines are those of `serving.engine` behind their routers, under a fair policy or vLLM's own.
Harvesting gives each consumer a store in the memory that its producers lend at the moment, and in
host memory beyond; fair slices without harvesting page to host memory.

Who lends: engines whose memory was never short without Aqua, and GPUs of the deployment list that
have memory to spare. Who borrows: the others. Pairs are a plan's matches, or by server, the largest
spare to the largest need. A producer lends what is free above a reserve once nothing has waited for
a while, and takes memory back when requests wait or the reserve is used up, after the consumer has
moved what it holds (Aqua sections 4.1 and 6; the rule of `aqualib` in short, looked at once a
second).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Final

import numpy as np

from aqua_schedulers.cfs import PagingTier, PolicyName, policy_named
from aqua_simulator.serving.engine import Engine, EngineSettings
from aqua_simulator.serving.memory import PagedMemory, PageStore
from aqua_simulator.serving.request import Arrival, summary
from aqua_simulator.whatif.cluster import BLOCK_TOKENS, Cluster, EngineShape
from aqua_simulator.whatif.step_times import StepCoefficients, is_fitted_to

LOOK_S: Final = 1.0
"""Seconds between two looks at the load, the informer's. Doubled, memory comes and goes later."""

CALM_S: Final = 10.0
"""Seconds without a waiting request before memory is lent: aqualib's default. Doubled, memory is
lent that much later after each burst."""

RESERVE_SHARE: Final = 0.1
"""Of a producer's KV memory, kept free beside loans; by judgement, and among the sensitivities.
Doubled, less is lent and less is taken back."""

WAITING_MARGIN: Final = 2
"""Requests that wait for more than which memory is taken back. Doubled, it is taken back later."""

SLAB_BYTES: Final = 64 * 2**20
"""Bytes of a slab, Aqua's default: less is not lent. Doubled, small changes are not followed."""

RECLAIM_LOOKS: Final = 1.0
"""Looks until a reclaim without copies is over: the consumer acknowledges within one. Doubled,
memory is back a second later."""


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What is assumed beside the recording; a sensitivity changes one at a time.

    Attributes:
        load, outputs: Factors on the rate and the output lengths.
        link: Factor on the rates of links.
        memory: Factor on the KV memory of engines.
        speed: Factor on the speed of steps.
        reserve_share: As `RESERVE_SHARE`.
    """

    load: float = 1.0
    outputs: float = 1.0
    link: float = 1.0
    memory: float = 1.0
    speed: float = 1.0
    reserve_share: float = RESERVE_SHARE


@dataclass(slots=True)
class LendingTotals:
    """What lending amounted to.

    Attributes:
        offered_gb_s, used_gb_s: Integrals of what was on loan or to be had, and of what held
            contexts, over the day.
        reclaim_s: Seconds from reclaims to the memory's return, together.
    """

    offered_gb_s: float = 0.0
    used_gb_s: float = 0.0
    reclaim_count: int = 0
    reclaim_s: float = 0.0


@dataclass(slots=True)
class OnlineResult:
    """What a day showed.

    Attributes:
        by_model: Throughput and latencies (`serving.request.summary`), `busy_s` of all engines,
            `peak_kv_share` of the fullest one.
        unserved: Requests that can never fit, by model.
        producers: Models that lent.
    """

    by_model: dict[str, dict[str, Any]]
    lending: LendingTotals
    unserved: dict[str, int] = field(default_factory=dict)
    producers: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Member:
    """An engine with what it lends and from whom it borrows."""

    model: str
    shape: EngineShape
    engine: Engine
    is_producer: bool = False
    lent_blocks: int = 0
    returning: list[tuple[float, int]] = field(default_factory=list)
    calm_since_s: float = 0.0
    consumers: list[Member] = field(default_factory=list)
    producers: list[Member] = field(default_factory=list)
    static_bytes: float = 0.0
    rates: tuple[float, float] = (0.0, 0.0)
    host_tokens: int = 0
    least_free: int = 0

    @property
    def block_bytes(self) -> int:
        """A block's keys and values."""
        return BLOCK_TOKENS * self.shape.model.kv_bytes_per_token

    @property
    def peer_bytes(self) -> float:
        """What it may have of its producers now."""
        lent = (
            each.lent_blocks * each.block_bytes / len(each.consumers) for each in self.producers
        )
        return self.static_bytes + sum(lent)

    def follow_producers(self) -> None:
        """Give its store the size and the rate of the moment."""
        store = self.engine.store
        if store is None:
            return
        peer = int(self.peer_bytes // self.shape.model.kv_bytes_per_token)
        at_peer = min(store.used_tokens, peer)
        store.capacity_tokens = max(store.used_tokens, peer + self.host_tokens)
        share = at_peer / store.used_tokens if store.used_tokens else float(peer > 0)
        store.link_bytes_per_s = 1.0 / (share / self.rates[0] + (1.0 - share) / self.rates[1])
        store.location = PagingTier.PEER if peer else PagingTier.HOST


def serve_day(
    cluster: Cluster,
    times: Mapping[str, StepCoefficients],
    requests: Mapping[str, Sequence[Arrival]],
    span_s: float,
    *,
    is_harvesting: bool = False,
    is_fair: bool = False,
    short: Sequence[str] = (),
    assumed: Assumptions = Assumptions(),
) -> OnlineResult:
    """Serve the requests of all models.

    Args:
        short: Models whose memory ran short without Aqua: the consumers.

    Raises:
        ConfigError: A model has no request that fits in its memory.
    """
    span_s /= assumed.load
    members = members_of(cluster, times, is_harvesting, is_fair, short, assumed)
    clock = _Clock(members, span_s, assumed)
    clock.drive(requests)
    by_model: dict[str, dict[str, Any]] = {}
    for name, mine in members.items():
        served = [row for member in mine for row in member.engine.finished]
        if not served:
            by_model[name] = {"request_count": 0, "busy_s": 0.0}
            continue
        others = [row for row in served if not is_fitted_to(int(row.request_id))]
        least = min(each.least_free / each.engine.memory.block_count for each in mine)
        by_model[name] = beside_steps(
            summary(served), summary(others) if others else {}, times[name].front_s
        ) | {"busy_s": sum(each.engine.busy_s for each in mine), "peak_kv_share": 1.0 - least}
    return OnlineResult(by_model, clock.lending, clock.unserved, lenders_of(members))


def beside_steps(found: dict[str, Any], unfitted: dict[str, Any], front_s: float) -> dict[str, Any]:
    """A model's summary, and that of requests that no step time was fitted to, as users see it.

    Args:
        front_s: What a first token takes beside steps.
    """
    for each in (found, unfitted):
        for key in ("ttft_mean_s", "ttft_p99_s") if each else ():
            each[key] += front_s
    return found | {"unfitted": unfitted}


def lenders_of(members: Mapping[str, Sequence[Member]]) -> tuple[str, ...]:
    """Models whose engines lend."""
    return tuple(name for name, mine in members.items() if any(one.is_producer for one in mine))


def members_of(
    cluster: Cluster,
    times: Mapping[str, StepCoefficients],
    is_harvesting: bool,  # noqa: FBT001 - both are the caller's words
    is_fair: bool,  # noqa: FBT001
    short: Sequence[str],
    assumed: Assumptions,
) -> dict[str, list[Member]]:
    """All engines by model, before the first request, with who lends to whom."""
    members: dict[str, list[Member]] = {}
    for name, shape in cluster.engines.items():
        coefficients = times[name]
        members[name] = [
            _member(cluster, name, index, shape, coefficients, is_harvesting, is_fair, assumed)
            for index in range(shape.deployed.replicas)
        ]
    if is_harvesting:
        _match(cluster, members, short)
    return members


def _member(
    cluster: Cluster,
    name: str,
    index: int,
    shape: EngineShape,
    coefficients: StepCoefficients,
    is_harvesting: bool,  # noqa: FBT001 - private
    is_fair: bool,  # noqa: FBT001
    assumed: Assumptions,
) -> Member:
    deployed, kv = shape.deployed, shape.model.kv_bytes_per_token
    rates = tuple(
        assumed.link * deployed.tp * cluster.link_bytes_per_s(name, is_peer=is_peer)
        for is_peer in (True, False)
    )
    host_tokens = int(cluster.listed.host_gb * 1e9 // kv)
    store = None
    if is_harvesting or is_fair:
        store = PageStore(name, host_tokens, rates[1], location=PagingTier.HOST)
    times = replace(coefficients, speed=coefficients.speed * assumed.speed)
    engine = Engine(
        f"{name}-{index}",
        EngineSettings(
            deployed.max_num_batched_tokens, deployed.max_num_seqs, kv_bytes_per_token=kv
        ),
        times.iteration_time(shape),
        PagedMemory(max(1, int(shape.block_count * assumed.memory)), BLOCK_TOKENS),
        store,
        policy_named(PolicyName.best() if is_fair else PolicyName.FCFS),
    )
    peer, host = rates
    return Member(
        name,
        shape,
        engine,
        rates=(peer or host, host),
        host_tokens=host_tokens,
        least_free=engine.memory.free_count,
    )


def _match(cluster: Cluster, members: Mapping[str, Sequence[Member]], short: Sequence[str]) -> None:
    """Give each consumer its producers: a plan's, or those of its server."""
    lenders = [each for each in cluster.listed.lenders for _ in range(each.count)]
    free = [each for name in members if name not in short for each in members[name]]
    free.sort(key=lambda each: (-each.shape.kv_bytes, each.engine.name))
    spare = sorted(lenders, key=lambda each: (-each.spare_gb, each.name))

    def may(consumer: Member, producer: str, server: str) -> bool:
        if cluster.pairs is not None:
            return (consumer.model, producer) in cluster.pairs
        return consumer.shape.deployed.server == server

    for consumer in [each for name in members if name in short for each in members[name]]:
        # A shard lends to one consumer, and each shard of a consumer wants one of its own.
        for _shard in range(consumer.shape.deployed.tp):
            lender = next((one for one in spare if may(consumer, one.name, one.server)), None)
            producer = next(
                (one for one in free if may(consumer, one.model, one.shape.deployed.server)), None
            )
            if lender is not None and (
                producer is None or lender.spare_gb * 1e9 >= producer.shape.kv_bytes
            ):
                spare.remove(lender)
                consumer.static_bytes += lender.spare_gb * 1e9
            elif producer is not None:
                free.remove(producer)
                producer.is_producer = True
                producer.consumers.append(consumer)
                consumer.producers.append(producer)
        consumer.follow_producers()


@dataclass(slots=True)
class _Clock:
    """Moves all engines along one clock, and looks at their loans once a second."""

    members: Mapping[str, Sequence[Member]]
    span_s: float
    assumed: Assumptions
    lending: LendingTotals = field(default_factory=LendingTotals)
    unserved: dict[str, int] = field(default_factory=dict)
    looked_s: float = 0.0

    def drive(self, requests: Mapping[str, Sequence[Arrival]]) -> None:
        """Serve everything to its end, and count loans to the end of the day."""
        queue = sorted(
            ((each.arrival_s, name, each) for name in self.members for each in requests[name]),
            key=lambda item: item[:2],
            reverse=True,
        )
        everyone = [each for mine in self.members.values() for each in mine]
        place = {each.engine.name: index for index, each in enumerate(everyone)}
        lenders = [each for each in everyone if each.is_producer]
        events: list[tuple[float, int]] = []
        while True:
            arrival_s = queue[-1][0] if queue else inf
            event_s = events[0][0] if events else inf
            due_s = min(arrival_s, event_s)
            # These wait for memory that is lent, and for nothing else.
            stuck = [
                each
                for each in lenders
                if each.engine.waiting_count and each.engine.next_event_s == inf
            ]
            if due_s == inf and not stuck:
                break
            until_s = min(due_s, self.looked_s + LOOK_S) if stuck else due_s
            self._look_until(everyone, until_s)
            for each in stuck:
                each.engine.replan(self.looked_s)
                if each.engine.next_event_s < inf:
                    heapq.heappush(events, (each.engine.next_event_s, place[each.engine.name]))
            if until_s < due_s:
                continue
            if arrival_s <= event_s:
                _, name, arrival = queue.pop()
                chosen = self._route(name, arrival)
            else:
                chosen = everyone[heapq.heappop(events)[1]]
                if chosen.engine.next_event_s != event_s:
                    continue
                chosen.engine.advance()
            if chosen is not None and chosen.engine.next_event_s < inf:
                heapq.heappush(events, (chosen.engine.next_event_s, place[chosen.engine.name]))
        self._look_until(everyone, self.span_s)
        self._integrate(everyone, max(0.0, self.span_s - self.looked_s))

    def _route(self, name: str, arrival: Arrival) -> Member | None:
        """Hand a request to the engine with the fewest; None if none could ever hold it."""
        mine = self.members[name]
        chosen = min(mine, key=lambda each: (each.engine.request_count, each.engine.name))
        memory = chosen.engine.memory
        need = memory.blocks_for(arrival.prompt_tokens + arrival.output_tokens)
        away = chosen.lent_blocks + sum(blocks for _, blocks in chosen.returning)
        if need > memory.block_count + away:
            self.unserved[name] = self.unserved.get(name, 0) + 1
            return None
        if need > memory.block_count:
            # It fits once the loans are back, which is soon: no engine refuses it for them.
            self._reclaim(chosen, chosen.lent_blocks, arrival.arrival_s)
            for _, blocks in chosen.returning:
                memory.take_back(blocks)
            chosen.returning.clear()
        chosen.engine.submit(arrival)
        return chosen

    def _look_until(self, everyone: Sequence[Member], now_s: float) -> None:
        """Look once a second. Engines stand still meanwhile, so that after a while all is lent."""
        for _ in range(int(CALM_S / LOOK_S) + 2):
            if self.looked_s + LOOK_S > now_s:
                return
            self._integrate(everyone, LOOK_S)
            for each in everyone:
                if each.is_producer:
                    self._look(each)
            for each in everyone:
                each.follow_producers()
        rest_s = float(np.floor((now_s - self.looked_s) / LOOK_S)) * LOOK_S
        self._integrate(everyone, rest_s)

    def _look(self, each: Member) -> None:
        """Lend what is free once it has been calm, take back what is missing."""
        engine, now_s = each.engine, self.looked_s
        for back_s, blocks in each.returning:
            if back_s <= now_s:
                engine.memory.take_back(blocks)
        each.returning = [one for one in each.returning if one[0] > now_s]
        whole = engine.memory.block_count + each.lent_blocks
        reserve = int(whole * self.assumed.reserve_share)
        free = engine.memory.free_count
        if engine.waiting_count:
            each.calm_since_s = now_s
        if each.lent_blocks and engine.waiting_count > WAITING_MARGIN:
            self._reclaim(each, each.lent_blocks, now_s)
        elif each.lent_blocks and (free < reserve // 2 or engine.waiting_count):
            self._reclaim(each, min(each.lent_blocks, max(1, reserve - free)), now_s)
        elif not each.returning and now_s - each.calm_since_s >= CALM_S:
            blocks = free - reserve
            if blocks * each.block_bytes >= SLAB_BYTES and engine.memory.lend(blocks):
                each.lent_blocks += blocks

    def _reclaim(self, each: Member, blocks: int, now_s: float) -> None:
        """Take memory back, after consumers have moved to the host what they hold in it."""
        if not blocks:
            return
        share = blocks / each.lent_blocks
        moving, host_rate = 0.0, inf
        for consumer in each.consumers:
            held = _held_bytes(consumer)
            lent = each.lent_blocks * each.block_bytes / len(each.consumers)
            moving += held * share * lent / max(1.0, consumer.peer_bytes)
            host_rate = min(host_rate, consumer.rates[1])
        away_s = LOOK_S * RECLAIM_LOOKS + moving / host_rate
        each.lent_blocks -= blocks
        each.calm_since_s = now_s
        each.returning.append((now_s + away_s, blocks))
        self.lending.reclaim_count += 1
        self.lending.reclaim_s += away_s

    def _integrate(self, everyone: Sequence[Member], passed_s: float) -> None:
        """Count what is free, lent and used for so long."""
        self.looked_s += passed_s
        for each in everyone:
            memory = each.engine.memory
            free = memory.free_count + each.lent_blocks
            each.least_free = min(each.least_free, free)
            inside_s = max(0.0, min(passed_s, self.span_s - self.looked_s + passed_s))
            if each.consumers:
                self.lending.offered_gb_s += each.lent_blocks * each.block_bytes * inside_s / 1e9
            if each.producers or each.static_bytes:
                self.lending.offered_gb_s += each.static_bytes * inside_s / 1e9
                self.lending.used_gb_s += _held_bytes(each) * inside_s / 1e9


def _held_bytes(consumer: Member) -> float:
    """What a consumer holds at its peers."""
    store = consumer.engine.store
    assert store is not None, consumer.engine.name
    used = store.used_tokens * consumer.shape.model.kv_bytes_per_token
    return min(float(used), consumer.peer_bytes)
