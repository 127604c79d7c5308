"""Whether a trial met the objective, and whether it lasted long enough to tell."""

from __future__ import annotations

import math
from typing import Final

from aqua_profiler.measure.summary import StopReason, TrialSummary
from aqua_profiler.objective import LatencyObjective

CLEAR_ERRORS: Final = 2.0
"""Standard errors by which a trial exceeds a limit that it exceeds by more than chance."""


def meets(objective: LatencyObjective, summary: TrialSummary) -> bool:
    """Whether a steady trial met the objective."""
    return why_not(objective, summary) is None


def why_not(objective: LatencyObjective, summary: TrialSummary) -> str | None:
    """Which limit a trial exceeded: `ttft`, `tbt` or None."""
    if summary.stop in {StopReason.OVERLOAD, StopReason.SHED, StopReason.BACKLOG}:
        return "ttft"
    if summary.stop is StopReason.SLOW_TOKENS:
        return "tbt"
    if summary.tbt_s is not None and summary.tbt_s > objective.tbt_s:
        return "tbt"
    return "ttft" if summary.ttft_s > objective.ttft_s else None


def is_measured(summary: TrialSummary) -> bool:
    """The trial lasted long enough for its quantiles to count."""
    return (
        not summary.ramp
        and summary.stop in {StopReason.ENOUGH, StopReason.TIME}
        and summary.window > 0
    )


def has_clearly_slow_tokens(objective: LatencyObjective, trial: TrialSummary) -> bool:
    """Gaps between tokens exceeded their limit by more than chance."""
    if trial.ramp or why_not(objective, trial) != "tbt":
        return False
    if trial.stop is StopReason.SLOW_TOKENS or trial.tbt_s is None:
        return True
    return math.log(trial.tbt_s / objective.tbt_s) > CLEAR_ERRORS * trial.tbt_error
