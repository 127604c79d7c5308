"""What steady trials say of a capacity that was guessed from little."""

from __future__ import annotations

import pytest

from aqua_profiler.estimate.heavy_traffic import Capacity, queue_rate
from aqua_profiler.measure.summary import StopReason, TrialSummary
from aqua_profiler.spec import LatencyObjective, UnloadedLatency

OBJECTIVE = LatencyObjective()
UNLOADED = UnloadedLatency(ttft_s=0.02, residence_s=0.3, tbt_s=0.01)
GUESS = Capacity(per_s=23.0, error=0.3, dispersion=0.5, running=10.0)
"""From a dozen first tokens at the top of a ramp, where everything is late."""


def _steady(rate: float, over_share: float, window: int = 600) -> TrialSummary:
    return TrialSummary(
        rate_per_s=rate,
        ramp=False,
        stop=StopReason.ENOUGH,
        sent=window,
        finished=window,
        shed=0,
        seconds=window / rate,
        window=window,
        ttft_s=0.05,
        ttft_p99_s=0.1,
        over_share=over_share,
        tbt_s=None,
        gaps=0,
        residence_s=0.3,
        running=10.0,
        backlogs=(),
        lateness_p99_s=0.001,
    )


def test_a_run_far_above_a_capacity_that_did_not_queue_refutes_it() -> None:
    guessed, _ = queue_rate(OBJECTIVE, UNLOADED, [], GUESS)
    found, error = queue_rate(OBJECTIVE, UNLOADED, [_steady(38.0, 0.0)], GUESS)
    assert guessed < 26.0
    assert found > 36.0
    assert error < GUESS.error


def test_a_run_below_a_capacity_that_queued_lowers_it() -> None:
    guessed, _ = queue_rate(OBJECTIVE, UNLOADED, [], GUESS)
    found, _ = queue_rate(OBJECTIVE, UNLOADED, [_steady(19.0, 0.9)], GUESS)
    assert found < 0.95 * guessed


@pytest.mark.parametrize("rate", [22.9, 23.1])
def test_a_short_run_close_to_the_capacity_says_little_on_either_side(rate: float) -> None:
    exact = Capacity(per_s=23.0, error=0.01, dispersion=0.5, running=10.0)
    before, _ = queue_rate(OBJECTIVE, UNLOADED, [], exact)
    after, _ = queue_rate(OBJECTIVE, UNLOADED, [_steady(rate, 0.0, window=40)], exact)
    assert after == pytest.approx(before, rel=0.02)
