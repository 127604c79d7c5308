"""Policies that plan and settle a step by compiled functions: their steps are compiled loops.

Python is needed where estimates are corrected, some dozen times in a run, and for policies of other
kinds. A run is the same as where the policy is asked for each step's plan, bit by bit; but a plan's
way to Python and back takes ten times as long as the step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Int32

from aqua_schedulers.admission import AdmissionPolicy, BatchView
from aqua_schedulers.blendserve.dual_scanner import DualScanner, settle
from aqua_schedulers.blendserve.foresight import ForesightBlend, plan_foresight
from aqua_schedulers.blendserve.foresight_state import ForesightState, Timeline, settle_state
from aqua_schedulers.blendserve.paper import PaperBlend, PaperState, plan_paper
from aqua_schedulers.compiled import compiled, compiled_part
from aqua_simulator.offline.cost import StepCost
from aqua_simulator.offline.kernel import take_step
from aqua_simulator.offline.state import EngineState


def steps_of(
    policy: AdmissionPolicy,
    state: EngineState,
    engine: EngineState,
    cost: StepCost,
    usage_stride: int,
) -> Callable[[BatchView], Int32[np.ndarray, " admit"]] | None:
    """A function that takes steps until Python is needed; None for other policies.

    It is told of what happened last, and returns what its own last step was to admit.

    Args:
        state: Of the engine, and `engine` the handle of it.
    """
    match policy:
        case PaperBlend():

            def take_paper(view: BatchView) -> Int32[np.ndarray, " admit"]:
                policy.settle(view)
                return _of_paper(engine, policy.state, cost, usage_stride)

            return take_paper
        case ForesightBlend():
            finished = np.empty(len(state.prompt), np.int32)

            def take_foresight(view: BatchView) -> Int32[np.ndarray, " admit"]:
                policy.settle(view)
                admit, settled = _of_foresight(
                    engine, *policy.compiled_state, cost, usage_stride, finished, policy.until_look
                )
                policy.note(finished[:settled], state.output[finished[:settled]])
                return admit

            return take_foresight
        case _:
            return None


@compiled_part
def _returned(
    engine: EngineState, admit: Int32[np.ndarray, " admit"]
) -> Int32[np.ndarray, " returned"]:
    """What the last step threw out or refused."""
    count = engine.counters[0]
    retracted = engine.retracted[: count.retracted_count]
    return np.concatenate((retracted, admit[count.admitted_count :]))


@compiled
def _of_paper(
    engine: EngineState, policy: PaperState, cost: StepCost, usage_stride: int
) -> Int32[np.ndarray, " admit"]:
    """Steps to the end of the last request: the policy learns nothing on the way."""
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
            if count.is_stuck or count.done_count == len(engine.prompt):
                return admit
            finished = engine.finished[: count.finished_count]
            settle(policy.scanner, finished, _returned(engine, admit))


@compiled
def _of_foresight(
    engine: EngineState,
    scanner: DualScanner,
    state: ForesightState,
    timeline: Timeline,
    cost: StepCost,
    usage_stride: int,
    settled: Int32[np.ndarray, " requests"],
    until: int,
) -> tuple[Int32[np.ndarray, " admit"], int]:
    """Steps until so many requests have finished.

    Those of the last step are left to be settled; how many there were before, in `settled`, is
    returned beside what the last step was to admit.
    """
    count = engine.counters[0]
    settled_count = 0
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
            is_over = count.is_stuck or count.done_count == len(engine.prompt)
            if is_over or settled_count + count.finished_count >= until:
                return admit, settled_count
            finished = engine.finished[: count.finished_count]
            settle_state(scanner, state, finished, _returned(engine, admit))
            for request in finished:
                settled[settled_count] = request
                settled_count += 1
