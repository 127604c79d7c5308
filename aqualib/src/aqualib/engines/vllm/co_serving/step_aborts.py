"""Which step may be aborted, and whether an arrival aborts it; without vLLM.

Two threads meet here. The scheduler's says what runs; the one that takes requests in asks, for each
online request, whether it has to wait for that. The policy answers (Algorithm 2), and a yes is
written to the engine's page, where workers find it.

An arrival is *expected* from the moment it is heard of until the scheduler has it, because between
the two the scheduler may begin another step. While one is expected no step begins that could be
aborted, and one that began at the same moment is asked about again. So each arrival aborts one step
at most: the one that it met. What never comes, a request that vLLM refuses after all, is expected
for `EXPECTED_S`.

A step that was aborted is computed again, and one whose requests have been aborted twice in a row
runs to its end, so that offline work gets somewhere whatever arrives. The policy hears of that
before it plans, and keeps the step short (`runs_through`).

No step may be aborted before all ranks have said that they have the page, which they are asked with
the engine's first step of any kind. Where one has not, steps run to their end for good.

Safepoints lie as many layers apart as take `SAFEPOINT_S` in this step as predicted; without a
prediction, in the last one that ran to its end, or in one as much longer as this has more tokens.

Source: ConServe Algorithm 2 and section 4.3. That arrivals are expected, and the bound of two, are
ours.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final, NamedTuple

from aqua_schedulers.conserve import CoServedRequest, CoServingPlan, StepUnderWay
from aqualib.engines.vllm.co_serving.abort_page import AbortPage
from aqualib.engines.vllm.co_serving.safepoints import SafepointOrder

logger: Final = logging.getLogger("aqualib")

SAFEPOINT_S: Final = 0.005
"""Seconds between two safepoints, by judgement: an abort takes two of them at most. Doubled, an
arrival may wait 10 ms longer, and a GPU is waited for half as often."""

MAX_FRUITLESS_ABORTS: Final = 2
"""Aborts in a row after which requests are let alone, by judgement. Doubled, bursts keep offline
work from getting anywhere for twice as many steps."""

EXPECTED_S: Final = 1.0
"""Seconds for which a request that was heard of holds offline steps up: it takes milliseconds until
the scheduler has it. Doubled, a request that vLLM refuses costs offline work twice as much."""


class AbortableStep(NamedTuple):
    """A step under way that may be aborted.

    Attributes:
        number: From 1 on.
        tokens: Of each of its requests.
        written_blocks: All that it writes to; none of them holds what it is to hold before the step
            has run to its end.
        plan: By which it was scheduled.
        begun_s: When.
        safepoint_s: Seconds between two of its safepoints, as predicted.
    """

    number: int
    tokens: Mapping[str, int]
    written_blocks: frozenset[int]
    plan: CoServingPlan
    begun_s: float
    safepoint_s: float


@dataclass(slots=True)
class AbortCounts:
    """What aborts did so far.

    Attributes:
        aborts: Steps that were aborted.
        seconds: From the arrival to the output of the aborted step, added up.
        safepoint_s: Between two safepoints of an aborted step, added up: an abort takes two at
            most, and what it takes to tell the scheduler.
        late: Aborts that took longer than two of these times.
        tokens: That were computed in vain, at most.
        arrivals: Online requests that were heard of.
        most_per_arrival: Steps that one of them aborted, at most.
    """

    aborts: int = 0
    seconds: float = 0.0
    safepoint_s: float = 0.0
    late: int = 0
    tokens: int = 0
    arrivals: int = 0
    most_per_arrival: int = 0


class StepAborts:
    """The aborts of one engine.

    Args:
        on_arrival: The policy's answer: the step, online requests that wait, the last of them the
            arrival, and the time. Called by either thread.
        layer_count: Of the model, on each rank.
        every_layers: Between two safepoints; chosen by time if None.

    Attributes:
        under_way: The step that may be aborted now; no other is scheduled beside it.
        has_page: Whether all ranks have the page; None until they have said so.
    """

    def __init__(
        self,
        on_arrival: Callable[[StepUnderWay, Sequence[CoServedRequest], float], bool],
        *,
        layer_count: int,
        every_layers: int | None,
    ) -> None:
        self.under_way: AbortableStep | None = None
        self.has_page: bool | None = None
        self.counts: Final = AbortCounts()
        self._on_arrival = on_arrival
        self._layer_count = layer_count
        self._every_layers = every_layers
        self._page = AbortPage.create()
        self._number = 0
        self._last_s = 0.0
        self._last_tokens = 1
        self._fruitless: Counter[str] = Counter()
        # Of arrivals that the scheduler has not got yet; `_lock` guards them and what is asked.
        self._expected: dict[str, CoServedRequest] = {}
        self._aborts_for: Counter[str] = Counter()
        self._asked: dict[int, float] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Let go of the page; who arrives from now on aborts nothing."""
        with self._lock:
            self.under_way = None
            self._page.close()

    # --- Arrivals, on any thread -------------------------------------------------------------

    def heard(self, arrival: CoServedRequest, now_s: float) -> None:
        """An online request has come in; abort what it would wait for too long."""
        with self._lock:
            self.counts.arrivals += 1
            self._expected[arrival.request_id] = arrival
            self._consider(now_s)

    def arrived(self, request_id: str) -> None:
        """The scheduler has a request, or never will."""
        with self._lock:
            self._forget(request_id)

    def is_expecting(self, now_s: float) -> bool:
        """Whether an arrival is on its way to the scheduler."""
        with self._lock:
            for name, each in list(self._expected.items()):
                if now_s - each.arrival_s > EXPECTED_S:
                    self._forget(name)
            return bool(self._expected)

    def _consider(self, now_s: float) -> None:
        step = self.under_way
        if step is None or not self._expected:
            return
        state = StepUnderWay(
            start_s=step.begun_s,
            load=step.plan.load,
            expected_s=step.plan.expected_s,
            is_preemptible=True,
            is_aborting=step.number in self._asked,
        )
        if self._on_arrival(state, list(self._expected.values()), now_s):
            self._asked[step.number] = now_s
            self._aborts_for.update(self._expected.keys())
            most = max(self._aborts_for.values())
            self.counts.most_per_arrival = max(self.counts.most_per_arrival, most)
            self._page.ask(step.number)

    def _forget(self, request_id: str) -> None:
        """A request is expected no longer; under the lock."""
        self._expected.pop(request_id, None)
        self._aborts_for.pop(request_id, None)

    # --- Steps, on the scheduler's -----------------------------------------------------------

    @property
    def first_order(self) -> SafepointOrder:
        """What workers are told of a step, of any kind, while it is not known who has the page."""
        return SafepointOrder(0, self._page.place, self._layer_count)

    def page_opened(self, *, by_all: bool) -> None:
        """Every rank has said whether it has the page."""
        if self.has_page is None and not by_all:
            logger.warning(
                "co-serving: a worker cannot open the page by which steps are aborted, so budgets "
                "alone keep offline work from online requests; an arrival waits for the step that "
                "runs"
            )
        self.has_page = by_all

    @property
    def runs_through(self) -> bool:
        """Whether a step that is planned now may have to run to its end."""
        most = max(self._fruitless.values(), default=0)
        return not self.has_page or most >= MAX_FRUITLESS_ABORTS

    def order(self, requests: Collection[str], plan: CoServingPlan) -> SafepointOrder | None:
        """What workers are told of a step of these requests alone; None if it is to run through."""
        has_had_enough = any(self._fruitless[name] >= MAX_FRUITLESS_ABORTS for name in requests)
        if has_had_enough or not self.has_page:
            return None
        self._number += 1
        seconds = self._predicted_s(plan)
        every = self._every_layers or _layers_within(SAFEPOINT_S, seconds, self._layer_count)
        return SafepointOrder(self._number, self._page.place, every)

    def begun(
        self,
        order: SafepointOrder,
        tokens: Mapping[str, int],
        written_blocks: frozenset[int],
        plan: CoServingPlan,
    ) -> None:
        """The step of the last order was scheduled."""
        now_s = time.monotonic()
        layers = min(order.every_layers, self._layer_count)
        safepoint_s = self._predicted_s(plan) * layers / self._layer_count
        step = AbortableStep(order.step, tokens, written_blocks, plan, now_s, safepoint_s)
        with self._lock:
            # Who arrived while it was being scheduled found nothing to abort.
            self.under_way = step
            self._consider(now_s)

    def ended(self, *, is_aborted: bool) -> AbortableStep | None:
        """The output of the step under way is there; what it was."""
        now_s = time.monotonic()
        with self._lock:
            step, self.under_way = self.under_way, None
            if step is None:
                return None
            asked_s = self._asked.pop(step.number, now_s)
        if is_aborted:
            self.counts.aborts += 1
            self.counts.seconds += now_s - asked_s
            self.counts.safepoint_s += step.safepoint_s
            self.counts.late += now_s - asked_s > 2 * step.safepoint_s
            self.counts.tokens += sum(step.tokens.values())
            self._fruitless.update(list(step.tokens))
        else:
            self._last_s = now_s - step.begun_s
            self._last_tokens = max(1, sum(step.tokens.values()))
            self.got_somewhere(step.tokens)
        return step

    def got_somewhere(self, requests: Collection[str]) -> None:
        """These have got somewhere, or ended."""
        for name in requests:
            self._fruitless.pop(name, None)

    def _predicted_s(self, plan: CoServingPlan) -> float:
        if isfinite(plan.expected_s):
            return plan.expected_s
        # A step of more tokens takes longer, and at most in proportion, as part of it is fixed.
        tokens = sum(plan.offline_tokens.values())
        return self._last_s * max(1.0, tokens / self._last_tokens)


def _layers_within(seconds: float, step_s: float, layer_count: int) -> int:
    """How many layers take so long in a step that takes `step_s`; 1 if that is not known."""
    if step_s <= 0.0:
        return 1
    return max(1, min(layer_count, int(seconds * layer_count / step_s)))
