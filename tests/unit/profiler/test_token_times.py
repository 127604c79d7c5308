"""The rate that token times allow: from what trials near it show, not from their own quantiles."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from aqua_profiler.estimate.token_times import token_time_rate
from aqua_profiler.load.lengths import lengths_of
from aqua_profiler.load.trial import Trial
from aqua_profiler.measure.gap_histogram import gap_histograms
from aqua_profiler.measure.summary import TrialSummary
from aqua_profiler.spec import LatencyObjective, UnloadedLatency
from harness.queueing import Server, drive

OBJECTIVE = LatencyObjective()
UNLOADED = UnloadedLatency(0.02, 0.3, 0.03)
GENERATOR = random.Random(4)
LENGTHS = lengths_of([(10, GENERATOR.randrange(2, 24)) for _ in range(400)])
SERVER = Server(64, lambda _p, _r: 0.02, lambda n, _r: 0.02 + 0.004 * n)


def _paced(rate: float, seed: int, requests: int = 400) -> tuple[TrialSummary, float, float]:
    trial = Trial(rate, seed=seed, enough_requests=requests, most_s=1e9, patience=1e9)
    summary, _ = drive(
        SERVER, LENGTHS.drawn(seed), trial, OBJECTIVE, UNLOADED, to_the_end=True, drain_s=60.0
    )
    assert summary.tbt_s is not None
    return summary, summary.gaps_per_request, summary.tbt_s


def test_short_runs_below_the_limit_tell_where_it_is() -> None:
    truth = _truth()
    for seed in range(5):
        trials = [_paced(share * truth, 10 * seed + n) for n, share in enumerate((0.9, 0.96, 1.0))]
        found = token_time_rate([trial for trial, _, _ in trials], trials[0][1], 0.01)
        assert found is not None
        assert abs(found[0] / truth - 1) < 0.05, (seed, found, truth)


def _truth() -> float:
    """Where the limit of 21 requests at once is exceeded by a hundredth of all gaps.

    The server shares itself: with so many requests in it, the chance of each number is a product.
    """
    level = np.arange(1, 400, dtype=float)
    token_s = 0.02 + 0.004 * np.minimum(level, 64)
    gaps = np.minimum(level, 64) / token_s
    mean_s = 0.02 + (np.mean([output for _, output in LENGTHS.pairs]) - 1) * token_s
    leaving = np.cumsum(np.log(np.minimum(level, 64) / mean_s))

    def share(rate: float) -> float:
        visits = level * np.log(rate) - leaving
        mass = np.exp(visits - visits.max()) * gaps
        return float(mass[token_s > OBJECTIVE.tbt_s].sum() / mass.sum())

    low, high = 1.0, 40.0
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (low, middle) if share(middle) > 0.01 else (middle, high)
    return low


def test_the_error_shrinks_as_the_runs_come_to_the_limit() -> None:
    truth = _truth()
    far = [_paced(share * truth, n) for n, share in enumerate((0.5, 0.55, 0.6))]
    near = [_paced(share * truth, n) for n, share in enumerate((0.97, 1.0, 1.03))]
    errors = []
    for trials in (far, near):
        found = token_time_rate([trial for trial, _, _ in trials], trials[0][1], 0.01)
        assert found is not None
        errors.append(found[1])
    assert errors[0] > 2 * errors[1]


def test_tokens_that_never_slow_down_set_no_limit() -> None:
    changes = (np.arange(0.0, 100.0), np.tile([3.0, 4.0], 50))
    ended_s = np.arange(0.5, 99.5, 0.1)
    gaps = (ended_s, np.full(ended_s.size, 0.02), np.full(ended_s.size, 4.0))
    parts = gap_histograms(changes, gaps, 0.1, 0.0, 100.0)
    summary, _, _ = _paced(5.0, 1)
    assert token_time_rate([replace(summary, paces=parts)], 10.0, 0.01) is None


def test_a_queue_of_requests_does_not_make_tokens_slow() -> None:
    """Five at once, each token 83 ms: however many wait, no gap exceeds 100 ms."""
    server = Server(5, lambda _p, _r: 0.05, lambda _n, _r: 0.083)
    trial = Trial(8.0, seed=1, enough_requests=300, most_s=1e9, patience=1e9)
    summary, _ = drive(server, LENGTHS.drawn(1), trial, OBJECTIVE, UNLOADED, to_the_end=True)
    assert token_time_rate([summary], summary.gaps_per_request, 0.01) is None


def test_gaps_and_seconds_are_kept_by_the_requests_in_the_system() -> None:
    changes = (np.array([0.0, 1.0, 3.0]), np.array([1.0, 2.0, 1.0]))
    gaps = (np.array([0.5, 2.0, 3.5]), np.array([0.05, 0.2, 0.1]), np.array([1.0, 2.0, 1.0]))
    parts = gap_histograms(changes, gaps, 0.1, 0.0, 4.0)
    assert np.allclose(np.sum([[*p.seconds, 0, 0][:3] for p in parts], axis=0), [0, 2, 2])
    slow = {(level, gap > 0): count for part in parts for level, gap, count in part.gaps}
    assert slow == {(1, False): 1, (2, True): 1}


@pytest.mark.parametrize("limit_s", [0.1, 0.05])
def test_a_gap_as_long_as_the_limit_keeps_it(limit_s: float) -> None:
    times = (np.array([0.0]), np.array([1.0]))
    parts = gap_histograms(
        times, (np.array([0.5]), np.array([limit_s]), np.array([1.0])), limit_s, 0.0, 1.0
    )
    assert [gap for part in parts for _, gap, _ in part.gaps] == [0]
