"""Policies that plan a step by one compiled function: steps are planned and taken by compiled code.

Most steps of a long run admit or decode only: no request ends, is thrown out or is refused. Python
hears of the others alone, and books them in the policy. A run is the same as where the policy is
asked for each step's plan, bit by bit; but a plan's way to Python and back takes ten times as long
as the step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Int32

from aqua_schedulers.admission import AdmissionPolicy, BatchView
from aqua_schedulers.blendserve.dual_scanner import DualScanner
from aqua_schedulers.blendserve.foresight import ForesightBlend, plan_foresight
from aqua_schedulers.blendserve.foresight_state import ForesightState, Timeline
from aqua_schedulers.blendserve.paper import PaperBlend, PaperState, plan_paper
from aqua_schedulers.compiled import compiled
from aqua_simulator.offline.cost import StepCost
from aqua_simulator.offline.kernel import take_step
from aqua_simulator.offline.state import EngineState


def steps_of(
    policy: AdmissionPolicy, engine: EngineState, cost: StepCost, usage_stride: int
) -> Callable[[BatchView], Int32[np.ndarray, " admit"]] | None:
    """A function that takes steps until something happens in one; None for other policies.

    It is told of what happened last, and returns what its own last step was to admit.
    """
    match policy:
        case PaperBlend():

            def take_paper(view: BatchView) -> Int32[np.ndarray, " admit"]:
                policy.settle(view)
                return _of_paper(engine, policy.state, cost, usage_stride)

            return take_paper
        case ForesightBlend():

            def take_foresight(view: BatchView) -> Int32[np.ndarray, " admit"]:
                policy.settle(view)
                return _of_foresight(engine, *policy.compiled_state, cost, usage_stride)

            return take_foresight
        case _:
            return None


@compiled
def _of_paper(
    engine: EngineState, policy: PaperState, cost: StepCost, usage_stride: int
) -> Int32[np.ndarray, " admit"]:
    count = engine.counters[0]
    while True:
        admitted, budget = plan_paper(
            policy,
            count.decoding_count,
            count.pending_prefill_tokens,
            count.logical_kv_tokens,
            count.capacity_tokens,
        )
        admit = policy.admitted[:admitted]
        if take_step(engine, admit, budget, cost, usage_stride):
            return admit


@compiled
def _of_foresight(
    engine: EngineState,
    scanner: DualScanner,
    state: ForesightState,
    timeline: Timeline,
    cost: StepCost,
    usage_stride: int,
) -> Int32[np.ndarray, " admit"]:
    count = engine.counters[0]
    while True:
        admitted, budget = plan_foresight(
            scanner,
            state,
            timeline,
            count.step,
            count.decoding_count,
            count.prefilling_count,
            count.pending_prefill_tokens,
            count.logical_kv_tokens,
            count.used_tokens,
            count.capacity_tokens,
        )
        admit = state.admitted[:admitted]
        if take_step(engine, admit, budget, cost, usage_stride):
            return admit
