"""Servers with a known capacity on a virtual clock: what a search is tried on.

Honest queues: every request takes its own service, drawn or following its lengths, and waits in
line for a slot. Nothing is tuned to the search; the truth is found by brute force, with requests
drawn one by one and not stratified.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

import numpy as np

from aqua_profiler.load.lengths import LengthDistribution
from aqua_profiler.load.trial import ArrivalProcess, Trial
from aqua_profiler.measure.recorder import TrialRecorder
from aqua_profiler.measure.summary import StopReason, TrialSummary
from aqua_profiler.search.rate_search import SearchResult, next_trial
from aqua_profiler.spec import LatencyObjective, UnloadedLatency

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

    def start(self, seed: int) -> VirtualServer:
        """Empty, at time zero."""
        return VirtualServer(self, seed)


class Watcher(Protocol):
    """Sees tokens come."""

    def token(self, number: int, at_s: float) -> None:
        """One has come."""

    def finish(self, number: int, at_s: float) -> None:
        """It was the last."""


class Tally:
    """Waits and gaps of all requests, and nothing else: quick.

    Attributes:
        due: When each request is due; to be filled by who submits it.
        firsts_s: Times to first tokens, in their order.
        gaps_s: Between tokens, in their order.
        stays_s: From being due to the last token.
        latest: When a request had its latest token.
    """

    def __init__(self) -> None:
        self.due: list[float] = []
        self.firsts_s: list[float] = []
        self.gaps_s: list[float] = []
        self.stays_s: list[float] = []
        self.latest: dict[int, float] = {}

    def token(self, number: int, at_s: float) -> None:
        """One has come."""
        before_s = self.latest.get(number)
        if before_s is None:
            self.firsts_s.append(at_s - self.due[number])
        else:
            self.gaps_s.append(at_s - before_s)
        self.latest[number] = at_s

    def finish(self, number: int, at_s: float) -> None:
        """It was the last."""
        self.stays_s.append(at_s - self.due[number])


class AtWork(Protocol):
    """A server at work, on its own clock."""

    watch: Watcher | None

    @property
    def next_s(self) -> float | None:
        """When something happens next."""

    def run_until(self, when_s: float) -> None:
        """Let everything happen until then."""

    def submit(self, number: int, prompt: int, output: int, now_s: float) -> None:
        """A request arrives."""


class AnyServer(Protocol):
    """A server, described."""

    def start(self, seed: int) -> AtWork:
        """Empty, at time zero."""


class VirtualServer:
    """A `Server` at work, on its own clock."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._generator = random.Random(f"server {seed}")
        # When, the order of those at one time, and what: tuples, of which millions are compared.
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = 0
        self._queue: deque[tuple[int, int, int]] = deque()
        self._running = 0
        self._prefill_free_s = 0.0
        self.watch: Watcher | None = None

    def at(self, when_s: float, act: Callable[[float], None]) -> None:
        self._order += 1
        heapq.heappush(self._events, (when_s, self._order, act))

    def run_until(self, when_s: float) -> None:
        while self._events and self._events[0][0] <= when_s:
            at_s, _, act = heapq.heappop(self._events)
            act(at_s)

    @property
    def next_s(self) -> float | None:
        return self._events[0][0] if self._events else None

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
    server: AnyServer,
    lengths: Iterator[tuple[int, int]],
    trial: Trial,
    objective: LatencyObjective,
    unloaded: UnloadedLatency,
    *,
    to_the_end: bool = False,
    drain_s: float = math.inf,
) -> tuple[TrialSummary, float]:
    """One trial from an empty server; returns also how long it lasted with its drain.

    With `to_the_end` nothing ends it but its number of requests. After `drain_s` what is still
    outstanding is given up.
    """
    virtual = server.start(trial.seed)
    watch = TrialRecorder(trial, objective, unloaded)
    virtual.watch = watch
    schedule = ArrivalProcess(trial)
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
            elif watch.count >= trial.enough_requests:
                stop = StopReason.ENOUGH
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


def search(
    server_of_run: Callable[[], AnyServer],
    lengths: LengthDistribution,
    seed: int,
    objective: LatencyObjective,
    *,
    unloaded: UnloadedLatency,
    budget_s: float,
    predicted_per_s: float | None = None,
) -> tuple[SearchResult, list[TrialSummary], float]:
    """A whole search: its end, its trials, and the seconds it took.

    Args:
        server_of_run: Asked before each trial.
        predicted_per_s: As in `next_trial`.
    """
    trials: list[TrialSummary] = []
    used_s = 0.0
    while True:
        left_s = budget_s - used_s
        step = next_trial(
            objective,
            unloaded,
            trials,
            left_s=left_s,
            budget_s=budget_s,
            seed=seed,
            predicted_per_s=predicted_per_s,
        )
        if isinstance(step, SearchResult):
            return step, trials, used_s
        summary, seconds = drive(
            server_of_run(),
            lengths.drawn(step.seed),
            step,
            objective,
            unloaded,
            drain_s=left_s - step.most_s,
        )
        trials.append(summary)
        used_s += seconds


def unloaded_of(
    server: AnyServer, lengths: Iterator[tuple[int, int]], seed: int
) -> UnloadedLatency:
    """What lone requests take, one after the other."""
    virtual, tally = server.start(seed), Tally()
    virtual.watch = tally
    for number, (prompt, output) in enumerate(islice(lengths, 8)):
        due_s = 1e6 * number
        tally.due.append(due_s)
        virtual.submit(number, prompt, output, due_s)
        virtual.run_until(due_s + 1e6)
    return UnloadedLatency(
        float(np.median(tally.firsts_s)),
        float(np.mean(tally.stays_s)),
        float(np.median(tally.gaps_s)) if tally.gaps_s else 0.0,
    )


def independent(lengths: LengthDistribution, seed: int) -> Iterator[tuple[int, int]]:
    """Requests drawn one by one, as users come."""
    generator = random.Random(f"users {seed}")
    while True:
        yield generator.choice(lengths.pairs)


def true_rate(
    server: Server,
    lengths: LengthDistribution,
    objective: LatencyObjective,
    *,
    low: float,
    high: float,
    requests: int = 200_000,
    tolerance: float = 0.003,
) -> float:
    """The highest rate at which the median TTFT meets the objective, by long trials and bisection.

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


def true_rate_in_steps(
    server: AnyServer,
    lengths: LengthDistribution,
    objective: LatencyObjective,
    *,
    low: float,
    high: float,
    requests: int = 30_000,
) -> float:
    """The highest rate at which TTFT and TBT meet the objective, for servers of any kind; slower.

    Bisection by short trials to within an eighth, then long trials on both sides. The share of
    misses, as log-odds, is nearly straight in the logarithm of the rate there: the truth is where a
    line through all of them crosses what the objective allows.
    """
    allowed = (1 - objective.ttft_quantile, 1 - objective.tbt_quantile)
    while high / low > 1.06:
        rate = math.sqrt(low * high)
        shares = _missed(server, lengths, objective, rate, requests // 2)
        met = all(share <= most for share, most in zip(shares, allowed, strict=True))
        low, high = (rate, high) if met else (low, rate)
    rates = [math.sqrt(low * high) * (1 + 0.03 * place) for place in range(-2, 3)]
    found = [_missed(server, lengths, objective, rate, requests) for rate in rates]
    return min(
        _crossing(rates, [shares[kind] for shares in found], most)
        for kind, most in enumerate(allowed)
    )


def _crossing(rates: list[float], shares: list[float], most: float) -> float:
    """Where a line through the log-odds of the shares meets that of `most`."""
    kept = [
        (math.log(rate), math.log(share / (1 - share) / most * (1 - most)))
        for rate, share in zip(rates, shares, strict=True)
        if 0.1 * most < share < 1 - 0.1 * (1 - most)
    ]
    if all(share <= most for share in shares) or len(kept) < 2:
        met = [rate for rate, share in zip(rates, shares, strict=True) if share <= most]
        if len(met) == len(rates):
            return math.inf
        above = rates[len(met)]
        return math.sqrt(above * (met[-1] if met else rates[0]))
    logs, odds = np.array(kept).T
    slope, level = np.polynomial.Polynomial.fit(logs, odds, 1).convert().coef[::-1]
    return math.exp(-float(level) / float(slope))


def _missed(
    server: AnyServer,
    lengths: LengthDistribution,
    objective: LatencyObjective,
    rate: float,
    requests: int,
) -> tuple[float, float]:
    """Shares of first tokens and of gaps beyond their limits, in the steady state."""
    virtual, tally = server.start(99), Tally()
    virtual.watch = tally
    generator = random.Random(f"truth {requests}")
    due_s = 0.0
    for number, (prompt, output) in enumerate(islice(independent(lengths, requests), requests)):
        due_s += generator.expovariate(rate)
        virtual.run_until(due_s)
        tally.due.append(due_s)
        virtual.submit(number, prompt, output, due_s)
    virtual.run_until(due_s)
    skipped = requests // 20
    waiting = [due_s - at_s for number, at_s in enumerate(tally.due) if number not in tally.latest]
    firsts = np.array(
        tally.firsts_s[skipped:] + [wait for wait in waiting if wait > objective.ttft_s]
    )
    gaps = np.array(tally.gaps_s[len(tally.gaps_s) // 20 :])
    return float((firsts > objective.ttft_s).mean()), float((gaps > objective.tbt_s).mean())
