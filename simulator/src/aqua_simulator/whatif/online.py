"""A day of online requests on all engines of the cluster, on one clock, lending memory or not.

The engines are those of `serving.engine` behind their routers, under a fair policy or vLLM's own.
Harvesting gives each consumer a store in the memory that its producers lend at the moment, and in
host memory beyond; fair slices without harvesting page to host memory.

A producer lends what is free above a reserve once nothing has waited for a while, and takes memory
back when requests wait or the reserve is used up, after the consumer has moved what it holds (Aqua
sections 4.1 and 6; the rule of `aqualib` in short, looked at once a second).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

import numpy as np

from aqua_simulator.fleet.links import contend
from aqua_simulator.serving.request import Arrival, summary
from aqua_simulator.whatif.cluster import Cluster
from aqua_simulator.whatif.links import LinkUse, SharedLinks
from aqua_simulator.whatif.members import (
    Assumptions,
    Member,
    ServingTerms,
    lenders_of,
    links_of,
    members_of,
)
from aqua_simulator.whatif.step_times import StepCoefficients, is_fitted_to

LOOK_S: Final = 1.0
"""Seconds between two looks at the load, the informer's. Doubled, memory comes and goes later."""

CALM_S: Final = 10.0
"""Seconds without a waiting request before memory is lent: aqualib's default. Doubled, memory is
lent that much later after each burst."""

WAITING_MARGIN: Final = 2
"""Requests that wait for more than which memory is taken back. Doubled, it is taken back later."""

SLAB_BYTES: Final = 64 * 2**20
"""Bytes of a slab, Aqua's default: less is not lent. Doubled, small changes are not followed."""

RECLAIM_LOOKS: Final = 1.0
"""Looks until a reclaim without copies is over: the consumer acknowledges within one. Doubled,
memory is back a second later."""


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
        links: What links saw, by model and lender; nothing without contention.
    """

    by_model: dict[str, dict[str, Any]]
    lending: LendingTotals
    unserved: dict[str, int] = field(default_factory=dict)
    producers: tuple[str, ...] = ()
    links: dict[str, LinkUse] = field(default_factory=dict)


def serve_day(
    cluster: Cluster,
    times: Mapping[str, StepCoefficients],
    requests: Mapping[str, Sequence[Arrival]],
    span_s: float,
    terms: ServingTerms,
) -> OnlineResult:
    """Serve the requests of all models.

    Raises:
        ConfigError: A model has no request that fits in its memory.
    """
    assumed = terms.assumed
    span_s /= assumed.load
    members = members_of(cluster, times, terms)
    clock = _Clock(members, span_s, assumed, links_of(cluster, members, assumed))
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
    used = clock.links.use(clock.looked_s)
    return OnlineResult(by_model, clock.lending, clock.unserved, lenders_of(members), used)


def beside_steps(found: dict[str, Any], unfitted: dict[str, Any], front_s: float) -> dict[str, Any]:
    """A model's summary, and that of requests that no step time was fitted to, as users see it.

    Args:
        front_s: What a first token takes beside steps.
    """
    for each in (found, unfitted):
        for key in ("ttft_mean_s", "ttft_p99_s") if each else ():
            each[key] += front_s
    return found | {"unfitted": unfitted}


@dataclass(slots=True)
class _Clock:
    """Moves all engines along one clock, and looks at their loans once a second."""

    members: Mapping[str, Sequence[Member]]
    span_s: float
    assumed: Assumptions
    links: SharedLinks
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
            if self.links.is_on:
                self._contend(everyone)
            for each in everyone:
                each.follow_producers()
        rest_s = float(np.floor((now_s - self.looked_s) / LOOK_S)) * LOOK_S
        self._integrate(everyone, rest_s)

    def _contend(self, everyone: Sequence[Member]) -> None:
        """Give copies, collectives and kernels the rates of the next second."""
        for index, each in enumerate(everyone):
            engine = each.engine
            self.links.ports[index].pending_tokens += engine.token_count - each.noted_tokens
            copied = engine.copied_tokens - each.noted_copies
            each.noted_tokens, each.noted_copies = engine.token_count, engine.copied_tokens
            if copied and each.is_consumer:
                kv_bytes = each.shape.model.kv_bytes_per_token
                self.links.note_copies(index, copied * kv_bytes * each.peer_share)
        contend(self.links.ports, self.links.loans, LOOK_S)
        for each, port in zip(everyone, self.links.ports, strict=False):
            each.engine.slowdown = float(port.slowdown)
            each.engine.shared_token_s = float(port.shared_token_s)
            if each.is_consumer:
                each.rates = (float(port.copy_bytes_per_s), each.rates[1])

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
            held = _held_bytes(consumer) * share * each.lent_to(consumer)
            moving += held / max(1.0, consumer.peer_bytes)
            host_rate = min(host_rate, consumer.rates[1])
        self.links.note_reclaim(each.place, moving)
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
            if each.is_consumer:
                self.lending.offered_gb_s += each.static_bytes * inside_s / 1e9
                self.lending.used_gb_s += _held_bytes(each) * inside_s / 1e9


def _held_bytes(consumer: Member) -> float:
    """What a consumer holds at its peers."""
    store = consumer.engine.store
    assert store is not None, consumer.engine.name
    used = store.used_tokens * consumer.shape.model.kv_bytes_per_token
    return min(float(used), consumer.peer_bytes)
