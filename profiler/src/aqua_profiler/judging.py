"""Whether a run met the objective, and whether it lasted long enough for that to mean something."""

from __future__ import annotations

import math
from typing import Final

from aqua_profiler.objective import Objective
from aqua_profiler.summary import Stop, Summary

CLEAR_ERRORS: Final = 2.0
"""Standard errors by which a run exceeds a limit that it exceeds by more than chance."""


def meets(objective: Objective, summary: Summary) -> bool:
    """Whether a steady run met the objective."""
    return why_not(objective, summary) is None


def why_not(objective: Objective, summary: Summary) -> str | None:
    """Which limit a run exceeded: `ttft`, `tbt` or None."""
    if summary.stop in {Stop.OVERLOAD, Stop.SHED, Stop.BACKLOG}:
        return "ttft"
    if summary.stop is Stop.SLOW_TOKENS:
        return "tbt"
    if summary.tbt_s is not None and summary.tbt_s > objective.tbt_s:
        return "tbt"
    return "ttft" if summary.ttft_s > objective.ttft_s else None


def is_measured(summary: Summary) -> bool:
    """The run lasted long enough for its quantiles to count."""
    return not summary.ramp and summary.stop in {Stop.ENOUGH, Stop.TIME} and summary.window > 0


def has_clearly_slow_tokens(objective: Objective, run: Summary) -> bool:
    """Gaps between tokens exceeded their limit by more than chance."""
    if run.ramp or why_not(objective, run) != "tbt":
        return False
    if run.stop is Stop.SLOW_TOKENS or run.tbt_s is None:
        return True
    return math.log(run.tbt_s / objective.tbt_s) > CLEAR_ERRORS * run.tbt_error
