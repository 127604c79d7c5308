"""Servers with a known capacity on a virtual clock: what a search is tried on.

Honest queues: every request takes its own service, drawn or following its lengths, and waits in
line for a slot. Nothing is tuned to the search; the truth is found by brute force, with requests
drawn one by one and not in decks.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import numpy as np

from aqua_profiler.arrivals import Schedule
from aqua_profiler.lengths import Lengths
from aqua_profiler.objective import Objective, Run, Unloaded
from aqua_profiler.observing import Observation, Stop, Summary

TICK_S: Final = 0.05


@dataclass(frozen=True)
class Server:
    """Continuous batching with slots, first come first served.

    A request is admitted when a slot is free, reads its prompt, then yields a token every so often.

    Attributes:
        slots: Requests served at once.
        prefill_s: Time for the prompt, of its length and chance.
        token_s: Time for each further token, of the number of requests running and chance.
        serial_prefill: One prompt at a time is read, the others wait for it.
    """

    slots: int
    prefill_s: Callable[[int, random.Random], float]
    token_s: Callable[[int, random.Random], float]
    serial_prefill: bool = False


@dataclass(order=True)
class _Event:
    at_s: float
    order: int
    act: Callable[[float], None] = field(compare=False)


class VirtualServer:
    """A `Server` at work, on its own clock."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._generator = random.Random(f"server {seed}")
        self._events: list[_Event] = []
        self._order = 0
        self._queue: deque[tuple[int, int, int]] = deque()
        self._running = 0
        self._prefill_free_s = 0.0
        self.watch: Observation | None = None

    def at(self, when_s: float, act: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, _Event(when_s, self._order, act))

    def run_until(self, when_s: float) -> None:
        while self._events and self._events[0].at_s <= when_s:
            event = heapq.heappop(self._events)
            event.act(event.at_s)

    @property
    def next_s(self) -> float | None:
        return self._events[0].at_s if self._events else None

    def submit(self, number: int, prompt: int, output: int, now_s: float) -> None:
        self._queue.append((number, prompt, output))
        self._admit(now_s)

    def _admit(self, now_s: float) -> None:
        while self._queue and self._running < self._server.slots:
            number, prompt, output = self._queue.popleft()
            self._running += 1
            ready_s = now_s
            if self._server.serial_prefill:
                ready_s = max(now_s, self._prefill_free_s)
            ready_s += self._server.prefill_s(prompt, self._generator)
            self._prefill_free_s = ready_s
            self.at(ready_s, lambda at_s, n=number, left=output: self._token(n, left, at_s))  # type: ignore[misc]

    def _token(self, number: int, left: int, at_s: float) -> None:
        if self.watch is not None:
            self.watch.token(number, at_s)
        if left > 1:
            pause_s = self._server.token_s(self._running, self._generator)
            self.at(at_s + pause_s, lambda when_s: self._token(number, left - 1, when_s))
            return
        if self.watch is not None:
            self.watch.finish(number, at_s)
        self._running -= 1
        self._admit(at_s)


def drive(
    server: Server,
    lengths: Iterator[tuple[int, int]],
    run: Run,
    objective: Objective,
    unloaded: Unloaded,
    *,
    to_the_end: bool = False,
    drain_s: float = math.inf,
) -> tuple[Summary, float]:
    """One run from an empty server; returns also how long it lasted with its drain.

    With `to_the_end` nothing ends it but its number of requests. After `drain_s` what is still
    outstanding is given up.
    """
    virtual = VirtualServer(server, run.seed)
    watch = Observation(run, objective, unloaded)
    virtual.watch = watch
    schedule = Schedule(run)
    tick_s, stop = TICK_S, None
    for due_s in schedule:
        while stop is None and tick_s < due_s:
            virtual.run_until(tick_s)
            if watch.is_backlogged(tick_s):
                schedule.freeze(tick_s)
            else:
                schedule.thaw(tick_s)
            if not to_the_end:
                stop = watch.should_stop(tick_s, schedule.rate_at(tick_s))
            elif watch.count >= run.enough_requests:
                stop = Stop.ENOUGH
            tick_s += TICK_S
        if stop is not None:
            break
        virtual.run_until(due_s)
        prompt, output = next(lengths)
        number = watch.scheduled(due_s, prompt)
        watch.sent(number, due_s)
        virtual.submit(number, prompt, output, due_s)
    assert stop is not None
    ended_s = now_s = tick_s
    while (when_s := virtual.next_s) is not None and when_s < ended_s + drain_s:
        virtual.run_until(when_s)
        now_s = when_s
    return watch.summary(stop, schedule.rate_at(ended_s), ended_s, now_s), now_s


def unloaded_of(server: Server, lengths: Iterator[tuple[int, int]], seed: int) -> Unloaded:
    """What lone requests take, one after the other."""
    generator = random.Random(f"lone {seed}")
    firsts, stays, gaps = [], [], []
    for prompt, output in islice(lengths, 8):
        first_s = server.prefill_s(prompt, generator)
        pauses = [server.token_s(1, generator) for _ in range(output - 1)]
        firsts.append(first_s)
        stays.append(first_s + sum(pauses))
        gaps += pauses
    return Unloaded(
        float(np.median(firsts)), float(np.mean(stays)), float(np.median(gaps)) if gaps else 0.0
    )


def independent(lengths: Lengths, seed: int) -> Iterator[tuple[int, int]]:
    """Requests drawn one by one, as users come."""
    generator = random.Random(f"users {seed}")
    while True:
        yield generator.choice(lengths.pairs)


def true_rate(
    server: Server,
    lengths: Lengths,
    objective: Objective,
    *,
    low: float,
    high: float,
    requests: int = 200_000,
    tolerance: float = 0.003,
) -> float:
    """The highest rate at which the median TTFT meets the objective, by long runs and bisection.

    For servers whose times do not depend on the load: then a queue is a recursion, and fast.
    """
    generator = random.Random("truth")
    firsts, stays = [], []
    for prompt, output in islice(independent(lengths, 7), requests):
        firsts.append(server.prefill_s(prompt, generator))
        pauses = sum(server.token_s(1, generator) for _ in range(output - 1))
        stays.append(firsts[-1] if server.serial_prefill else firsts[-1] + pauses)
    gaps = [generator.expovariate(1.0) for _ in range(requests)]
    while (high - low) / high > tolerance:
        rate = (low + high) / 2
        free = [0.0] * (1 if server.serial_prefill else server.slots)
        now_s, within = 0.0, 0
        for gap, first_s, stay_s in zip(gaps, firsts, stays, strict=True):
            now_s += gap / rate
            start_s = max(heapq.heappop(free), now_s)
            within += start_s + first_s - now_s <= objective.ttft_s
            heapq.heappush(free, start_s + stay_s)
        low, high = (rate, high) if within / requests >= objective.ttft_quantile else (low, rate)
    return (low + high) / 2


def true_rate_of_tokens(
    server: Server,
    lengths: Lengths,
    objective: Objective,
    *,
    low: float,
    high: float,
    requests: int = 10_000,
    tolerance: float = 0.005,
) -> float:
    """The highest rate at which the quantile of TBT meets the objective; slower."""
    unloaded = Unloaded(objective.ttft_s / 100, 1e-9, 0.0)
    while (high - low) / high > tolerance:
        rate = (low + high) / 2
        run = Run(rate, seed=99, enough_requests=requests, patience=1e9, most_s=1e9)
        summary, _ = drive(
            server, independent(lengths, 7), run, objective, unloaded, to_the_end=True
        )
        assert summary.tbt_s is not None
        low, high = (rate, high) if summary.tbt_s <= objective.tbt_s else (low, rate)
    return (low + high) / 2
