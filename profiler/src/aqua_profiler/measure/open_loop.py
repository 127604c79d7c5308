"""Open-loop load on a real endpoint: every request at its scheduled time, whatever the answers do.

Each request is a task of its own, so one that waits delays no other; nothing limits how many are
outstanding but the stop rules of `recorder`. Times count from the schedule, and the distance
between schedule and socket, the generator's own lateness, is measured and reported.

A trial ends in three steps: nothing more is sent; what is outstanding may finish, for a while; what
is left is cancelled and counted as waiting until then.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

from aqua_profiler.errors import EndpointError, EndpointStalledError
from aqua_profiler.load.endpoint import Endpoint, ShedError
from aqua_profiler.load.trial import ArrivalProcess, Trial
from aqua_profiler.measure.kv_cache import EngineFigures
from aqua_profiler.measure.recorder import TrialRecorder
from aqua_profiler.measure.summary import StopReason, TrialSummary
from aqua_profiler.spec import LatencyObjective, UnloadedLatency
from aqua_protocol.supervision import start_job

TICK_S: Final = 0.05
"""Seconds between two looks at the stop rules; twice as many end trials a request or two later."""

LEAD_S: Final = 0.02
"""Seconds before the first request is due, so that the trial's own start makes none late. Doubled,
a trial lasts as much longer."""

# Requests, and their share of a trial, that may fail: a connection may break now and then on any
# network. Chosen by hand; doubled, a broken endpoint is found out twice as late.
FAULTS_ALLOWED: Final = 2
FAULT_SHARE: Final = 0.01


@dataclass(eq=False)
class OpenLoopTrial:
    """One trial on an endpoint.

    Attributes:
        lengths: Requests to draw from.
        stall_s: No news for so long, with requests outstanding, is a stall.
        drain_s: How long outstanding requests may take at the end.
        listen: Called at every tick with the rate that is due and how many are outstanding.
        figures: Use of the KV cache and requests that wait, as the engine said last.
        cancelled: Requests that were cut off at the end.
    """

    endpoint: Endpoint
    lengths: Iterator[tuple[int, int]]
    trial: Trial
    objective: LatencyObjective
    unloaded: UnloadedLatency
    _: KW_ONLY
    stall_s: float
    drain_s: float
    listen: Callable[[float, int], None] = lambda _rate, _outstanding: None
    figures: Callable[[], EngineFigures] = EngineFigures
    cancelled: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._schedule = ArrivalProcess(self.trial)
        self._watch = TrialRecorder(self.trial, self.objective, self.unloaded)
        self._tasks: set[asyncio.Task[None]] = set()
        self._faults: list[EndpointError] = []
        self._crashes: list[BaseException] = []
        self._began_s = 0.0

    async def go(self) -> TrialSummary:
        """Send until a stop rule holds, wait for the answers, sum up.

        Raises:
            EndpointError: The endpoint failed.
        """
        # A collection in the middle of a trial would be late for tens of requests.
        gc.collect()
        gc.freeze()
        try:
            self._began_s = asyncio.get_running_loop().time() + LEAD_S
            stop = await self._send()
            sending_s = self._now_s()
            await self._drain()
            rate = self._schedule.rate_at(sending_s)
            return self._watch.summary(stop, rate, sending_s, self._now_s())
        finally:
            await self._cancel()
            gc.unfreeze()

    @property
    def sent(self) -> int:
        """Requests handed to the socket, also of a trial that failed."""
        return self._watch.sent_count

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time() - self._began_s

    async def _send(self) -> StopReason:
        for due_s in self._schedule:
            while (now_s := self._now_s()) < due_s:
                stop = self._look(now_s)
                if stop is not None:
                    return stop
                await asyncio.sleep(min(TICK_S, due_s - now_s))
            stop = self._look(now_s) if now_s > due_s + TICK_S else None
            if stop is not None:
                return stop
            self._start(due_s)
        raise AssertionError("a schedule has no end")

    def _look(self, now_s: float) -> StopReason | None:
        """Between two sends.

        Raises:
            EndpointError: Too many requests failed, or nothing comes any more.
        """
        watch, rate = self._watch, self._schedule.rate_at(now_s)
        self._check(now_s)
        watch.look_inside(self.figures(), now_s)
        if watch.is_backlogged(now_s):
            self._schedule.freeze(now_s)
        else:
            self._schedule.thaw(now_s)
        self.listen(rate, watch.outstanding)
        return watch.should_stop(now_s, rate)

    def _check(self, now_s: float) -> None:
        if self._crashes:
            raise self._crashes[0]  # Not an endpoint's failure but ours.
        allowed = max(FAULTS_ALLOWED, int(FAULT_SHARE * self._watch.count))
        if len(self._faults) > allowed or any(
            fault.details.get("connecting") for fault in self._faults
        ):
            raise self._faults[-1]
        if self._watch.outstanding and now_s - self._watch.news_s > self.stall_s:
            oldest_s = self._watch.oldest_wait_s(now_s)
            raise EndpointStalledError(
                f"no token for {now_s - self._watch.news_s:.0f} s with {self._watch.outstanding}"
                f" requests outstanding, the oldest without any for {oldest_s:.0f} s"
            )

    def _start(self, due_s: float) -> None:
        prompt, output = next(self.lengths)
        watch = self._watch
        if not watch.outstanding:
            watch.news_s = max(watch.news_s, due_s)  # Silence counts from when something is asked.
        number = watch.scheduled(due_s, prompt)
        task = start_job(self._one(number, prompt, output), self._crashes.append)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _one(self, number: int, prompt: int, output: int) -> None:
        watch = self._watch
        try:
            await self.endpoint.ask(
                prompt,
                output,
                self.trial.seed * 1_000_003 + number,
                lambda: watch.sent(number, self._now_s()),
                lambda: watch.token(number, self._now_s()),
            )
        except ShedError:
            watch.turn_away(number, self._now_s())
        except EndpointError as error:
            watch.abandon(number, self._now_s())
            self._faults.append(error)
        else:
            watch.finish(number, self._now_s())

    async def _drain(self) -> None:
        until_s = self._now_s() + self.drain_s
        while self._tasks and (now_s := self._now_s()) < until_s:
            self._check(now_s)
            await asyncio.wait(self._tasks, timeout=min(TICK_S, until_s - now_s))
        self._check(self._now_s())

    async def _cancel(self) -> None:
        tasks = list(self._tasks)
        self.cancelled = len(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
