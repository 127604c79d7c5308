"""PlanCache: for how long a plan of the co-serving policy stands, and how fast its steps follow.

A plan in which online requests decode and no offline request computes or moves serves further
steps: what it says stays right until something happens, and nearly right for some steps after. What
happens to an offline request ends it. When online requests come and go it is *regrouped*: it goes
on for those that there are, once all of them decode again, and its steps are counted on. So what it
says of offline requests is never older than `SETTLED_STEPS` steps, and a plan is made for the
prompts in between.

Runs of such steps say what online requests take alone, and the steps in which offline tokens stand
beside answers what these add. Both are told to the policy, from the call of a step to the call of
the next: that is what a user waits for a token, with all that the engine does in between.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from aqua_schedulers.conserve import (
    CoServedRequest,
    CoServingPlan,
    CoServingView,
    ServiceClass,
    StepLoad,
)

SETTLED_STEPS: Final = 15
"""Steps beyond its own that a plan serves while nothing happens, by judgement. Doubled, planning
costs such steps half as much, and an offline request that becomes due, or starved, or fits beside
longer answers, is noticed after twice as many."""


class _SettledPlan(NamedTuple):
    """A plan that serves a step without being made anew.

    Attributes:
        plan: Its online tokens and load are those of the requests that there are now.
        online_tokens: What online requests may have in a step, all together.
    """

    plan: CoServingPlan
    online_tokens: int


@dataclass(slots=True)
class _Run:
    """Steps of one kind that follow each other: how many, and when the first began."""

    plan: CoServingPlan
    since_s: float = 0.0
    steps: int = 0


class PlanCache:
    """The last plan while it stands; on the scheduler's thread.

    Args:
        paced: Told of a run that is over: its plan, and the seconds from one step to the next.
        block_tokens: Of a block.
    """

    def __init__(
        self, paced: Callable[[CoServingPlan, float, int], None], *, block_tokens: int
    ) -> None:
        self._paced = paced
        self._block_tokens = block_tokens
        self._settled: _SettledPlan | None = None
        self._running_count = 0
        # Blocks that the online requests take in each step from now on, the last one first.
        self._growth: list[int] = []
        self._taken = 0
        self._granted = 0
        self._is_outdated = False
        self._run: _Run | None = None

    @property
    def stands(self) -> bool:
        """Whether the last plan serves further steps, for whichever online requests there are."""
        return self._settled is not None

    @property
    def wants_online(self) -> bool:
        """Whether it is to be regrouped before it serves another step."""
        return self._settled is not None and self._is_outdated

    def drop(self) -> None:
        """Something has happened to an offline request, or may have."""
        self._settled = None
        self._granted = 0

    def paused(self) -> None:
        """The step that begins is not planned; how long the engine paused is no step's time."""
        self.drop()
        self._run = None

    def online_changed(self, now_s: float) -> None:
        """An online request came or went; it may have been the last for long."""
        self.end_run(now_s)
        self._is_outdated = True
        self._granted = 0

    def end_run(self, now_s: float) -> None:
        """The next step is not like those before it, or is planned anew."""
        run, self._run = self._run, None
        if run is not None and run.steps:
            self._paced(run.plan, (now_s - run.since_s) / run.steps, run.steps)

    def planned(
        self, plan: CoServingPlan, online_tokens: int, view: CoServingView, *, is_stalled: bool
    ) -> None:
        """A step was planned.

        Args:
            plan: Which vLLM follows.
            online_tokens: What online requests may have in it.
            view: By which it was made.
            is_stalled: Whether a step before came to nothing, so that arrivals are left out.
        """
        had, steps_left = self._settled, len(self._growth)
        self.drop()
        if plan.offline_tokens:
            self._run = _Run(plan, view.now_s, 1)
        if is_stalled or _moves_offline(plan):
            return
        online = [each for each in view.running if each.service_class is ServiceClass.ONLINE]
        if not view.arriving and plan.online_tokens == len(online) and _all_decode(online):
            settled = _SettledPlan(plan, online_tokens)
            self._settle(settled, online, len(view.running), SETTLED_STEPS, after=1)
        elif had is not None and steps_left:
            # Online requests have prompts, and offline ones nothing, as before.
            self._settled = _SettledPlan(plan, online_tokens)
            self._growth.pop()
            self._is_outdated = True

    def regroup(
        self,
        online: Sequence[CoServedRequest],
        running_count: int,
        *,
        bounds_online: bool,
    ) -> None:
        """Have the plan go on for these online requests, if all of them decode.

        Args:
            online: All in memory.
            running_count: Requests of both classes.
            bounds_online: Whether online requests may have no more than a token each.
        """
        assert self._settled is not None, "no plan stands"
        count = len(online)
        if not _all_decode(online):
            return
        load = StepLoad()
        for each in online:
            load = load.and_decode(each.known_tokens)
        plan = self._settled.plan._replace(online_tokens=count, load=load, online_load=load)
        tokens = count if bounds_online else self._settled.online_tokens
        self._settle(_SettledPlan(plan, tokens), online, running_count, len(self._growth))

    def next(
        self, free_blocks: int, running_count: int, now_s: float
    ) -> tuple[CoServingPlan, int] | None:
        """The plan of the step that begins, and its online tokens; None if one is to be made.

        Args:
            free_blocks: For what online requests grow by.
            running_count: Requests of both classes.
            now_s: When the step begins.
        """
        self._granted = 0
        if self._settled is None or self._is_outdated or not self._growth or self._run is None:
            return None
        if running_count != self._running_count or free_blocks < self._growth[-1]:
            return None
        self._taken = self._growth.pop()
        self._run.since_s = self._run.since_s or now_s
        self._run.steps += 1
        return self._settled

    def grant(self, free_blocks: int) -> None:
        """Let further steps begin without a look, as many as these blocks are enough for.

        Args:
            free_blocks: Before the step that was given its plan last. Only these requests may take
                any: no online request waits, and no memory is lent.
        """
        left = free_blocks - self._taken
        self._granted = 0
        for taken in reversed(self._growth):
            left -= taken
            if left < 0:
                return
            self._granted += 1

    def goes_on(self) -> bool:
        """Whether the step that begins was granted; it is counted then."""
        if not self._granted or self._run is None:
            return False
        self._granted -= 1
        self._growth.pop()
        self._run.steps += 1
        return True

    def _settle(
        self,
        settled: _SettledPlan,
        online: Sequence[CoServedRequest],
        running_count: int,
        steps: int,
        *,
        after: int = 0,
    ) -> None:
        """Have a plan serve so many steps, the first of them so many after this one."""
        self._settled = settled
        self._running_count = running_count
        self._is_outdated = False
        self._run = _Run(settled.plan)
        self._growth = [0] * steps
        size = self._block_tokens
        for each in online:
            tokens, held_blocks = each.known_tokens, each.held_blocks
            if after:
                held_blocks = max(held_blocks, -(-tokens // size))
            first = max(0, held_blocks * size + 1 - tokens - after)
            for step in range(first, steps, size):
                self._growth[-1 - step] += 1


def _moves_offline(plan: CoServingPlan) -> bool:
    """Whether offline requests compute or are moved."""
    return any((plan.preempt, plan.offline_tokens, plan.admit, plan.copy_in, plan.copy_out))


def _all_decode(online: Sequence[CoServedRequest]) -> bool:
    """Whether there are online requests, and each takes a token in each step."""
    return bool(online) and all(each.is_decode for each in online)
