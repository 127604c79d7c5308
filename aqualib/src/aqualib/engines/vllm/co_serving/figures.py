"""What co-serving tells of itself, by the names of `operations.metrics`.

What happens is counted in plain attributes, where it happens. vLLM asks for figures once a step,
and they are made only then; not at all while one plan serves step after step and nothing happens
(`CoServing.is_told`).

Levels are those of the last plan: what it lets offline work have of a step, and how far checkpoints
lag behind what offline requests have computed. An engine without requests makes no plan, and shows
what it did last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Final

from aqua_schedulers.conserve import (
    ConservePolicy,
    CoServedRequest,
    CoServingPlan,
    PredictionBasis,
)
from aqualib.engines.vllm.co_serving.attainment import OnlineAttainment
from aqualib.engines.vllm.co_serving.step_aborts import AbortCounts, StepAborts

LAG_READINGS: Final = 16
"""Readings that one count of the checkpoint lag serves, by judgement: it takes a look at each
offline request in memory. Doubled, it costs a step half as much, and what is shown may be 32 steps
old."""


@dataclass(slots=True)
class Counts:
    """What has happened so far.

    Attributes:
        offline_tokens: Computed for offline requests.
        offline_preemptions: How often these gave their memory up.
        offline_ended: Offline requests that ended, whichever way.
        overruns: Steps with offline work that took longer than planned.
        online_preempted_first: Online requests that lost memory while an offline one held some.
    """

    offline_tokens: int = 0
    offline_preemptions: int = 0
    offline_ended: int = 0
    overruns: int = 0
    online_preempted_first: int = 0


class CoServingTotals:
    """Figures of one engine, on its scheduler's thread.

    Args:
        policy: Whose basis, queue and ledger are told of.
        attainment: Of online requests.
        aborts: None where steps run to their end.
        offline: All offline requests that the engine has, as their owner keeps them.
        block_tokens: Of a block.
        is_in_turn: Whether steps overlap but for offline ones.

    Attributes:
        counts: To be added to.
        plan: The last.
        running: Requests in memory, as that plan saw them.
        is_told: Whether the figures of the last plan have been read.
    """

    def __init__(
        self,
        policy: ConservePolicy,
        attainment: OnlineAttainment,
        aborts: StepAborts | None,
        *,
        offline: Collection[str],
        block_tokens: int,
        is_in_turn: bool,
    ) -> None:
        self.counts: Final = Counts()
        self.plan = CoServingPlan()
        self.running: Sequence[CoServedRequest] = ()
        self.is_told = False
        self._policy = policy
        self._attainment = attainment
        self._aborts = aborts
        self._offline = offline
        self._block_tokens = block_tokens
        self._is_in_turn = is_in_turn
        self._lag_blocks = 0
        self._lag_readings_left = 0
        self._lagging_count = 0

    def totals(self, *, is_last: bool = True) -> dict[str, float]:
        """Counters and levels.

        Args:
            is_last: Whether they may be read no more for long.
        """
        self.is_told = True
        times, plan, attainment = self._policy.times, self.plan, self._attainment
        is_fixed = times.basis is PredictionBasis.FIXED
        aborts = AbortCounts() if self._aborts is None else self._aborts.counts
        without_aborts = self._aborts is None or self._aborts.has_page is False
        self._count_lag(is_last=is_last)
        return {
            "online_arrivals": aborts.arrivals,
            "online_first_tokens": attainment.first_tokens,
            "online_first_tokens_in_time": attainment.first_tokens_in_time,
            "online_answers": attainment.answers,
            "online_answers_in_time": attainment.answers_in_time,
            "step_aborts": aborts.aborts,
            "step_abort_seconds": aborts.seconds,
            "step_abort_safepoint_seconds": aborts.safepoint_s,
            "step_aborts_late": aborts.late,
            "step_abort_tokens": aborts.tokens,
            "step_aborts_per_arrival": aborts.most_per_arrival,
            "offline_tokens": self.counts.offline_tokens,
            "offline_preemptions": self.counts.offline_preemptions,
            "offline_requests_ended": self.counts.offline_ended,
            "online_preempted_before_offline": self.counts.online_preempted_first,
            "co_serving_overruns": self.counts.overruns,
            "co_serving_without_aborts": float(without_aborts),
            "co_serving_steps_in_turn": float(self._is_in_turn and not without_aborts),
            "co_serving_without_profile": float(is_fixed),
            "offline_budget_tokens": float(times.fixed_tokens if is_fixed else 0),
            "offline_granted_tokens": float(sum(plan.offline_tokens.values())),
            "offline_limit_seconds": plan.limit_s if isfinite(plan.limit_s) else 0.0,
            "offline_step_excess": times.excess,
            "offline_requests_waiting": float(len(self._policy.waiting)),
            "checkpoint_lag_blocks": float(self._lag_blocks),
        }

    def _count_lag(self, *, is_last: bool) -> None:
        """Count full blocks of offline requests in memory that no acknowledged copy has.

        Now and then, as it takes a look at each; and at once when fewer or more of them have
        memory, so that no lag is left over from those that are gone.
        """
        count = len(self._offline) - len(self._policy.waiting)
        if self._lag_readings_left and count == self._lagging_count and not is_last:
            self._lag_readings_left -= 1
            return
        self._lag_readings_left, self._lagging_count = LAG_READINGS - 1, count
        waiting, checkpoint_of = self._policy.waiting, self._policy.checkpoints.of
        self._lag_blocks = 0
        for each in self.running:
            name = each.request_id
            if name in self._offline and waiting.get(name) is None:
                full = each.computed_tokens // self._block_tokens
                self._lag_blocks += max(0, full - checkpoint_of(name).saved)
