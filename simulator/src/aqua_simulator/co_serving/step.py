"""A step of the co-serving engine: what it computes, and where an abort may end it.

A step without online requests stops between groups of layers, its *safepoints*. An abort takes
effect at the next safepoint after the arrival and `safepoint_lag` more, because kernels are
launched ahead; one that would take effect at the end of the step is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aqua_schedulers.conserve import CoServingPlan, StepLoad, StepUnderWay
from aqua_simulator.co_serving.job import CoServedJob
from aqua_simulator.co_serving.spec import CoServingEngineSpec
from aqua_simulator.timing.iteration import ScheduledBatch

StepWork = Sequence[tuple[CoServedJob, int]]
"""Requests and the tokens that each computes."""


@dataclass(slots=True)
class CoServingStep:
    """The step that runs.

    Attributes:
        end_s: An abort brings it forward.
        stall_s: Of its beginning, what all wait for copies.
    """

    plan: CoServingPlan
    start_s: float
    end_s: float
    load: StepLoad
    work: StepWork
    stall_s: float
    is_aborting: bool = False

    @property
    def begin_s(self) -> float:
        """When it begins to compute."""
        return self.start_s + self.stall_s

    def under_way(self) -> StepUnderWay:
        """The step as the arrival handler sees it."""
        plan = self.plan
        return StepUnderWay(
            self.begin_s, plan.load, plan.expected_s, plan.is_preemptible, self.is_aborting
        )

    def abort(self, spec: CoServingEngineSpec, now_s: float) -> bool:
        """Stop at the safepoint that an abort reaches; False if the step ends by itself first."""
        group_s = (self.end_s - self.begin_s) * spec.safepoint_layers / spec.layer_count
        passed = max(0.0, (now_s - self.begin_s) / group_s)
        abort_s = self.begin_s + (int(passed) + 1 + spec.safepoint_lag) * group_s
        if abort_s >= self.end_s:
            return False
        self.end_s, self.is_aborting = abort_s, True
        return True


def load_of(batch: ScheduledBatch) -> StepLoad:
    """What a batch is to a step-time profile."""
    requests = batch.decoding_count + len(batch.chunks)
    return StepLoad(batch.tokens, batch.decode_context_tokens, batch.token_pairs, requests)
