"""Machines that change their speed between trials: seen as such, and not taken for load."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Final

import pytest

from aqua_profiler.estimate.speed_drift import drift_of, rescaled
from aqua_profiler.estimate.token_times import token_time_rate
from aqua_profiler.load.lengths import lengths_of
from aqua_profiler.load.trial import Trial
from aqua_profiler.measure.summary import TrialSummary
from aqua_profiler.search.rate_search import SearchResult
from aqua_profiler.spec import LatencyObjective
from harness.queueing import Server, drive, search, true_rate_in_steps, unloaded_of

pytestmark = pytest.mark.slow

OBJECTIVE: Final = LatencyObjective()
GENERATOR: Final = random.Random(4)
LENGTHS: Final = lengths_of([(10, GENERATOR.randrange(2, 24)) for _ in range(400)])
BUDGET_S: Final = 600.0
SLOWNESS: Final = (0.0, 0.12, -0.1, 0.05, -0.12, 0.1, -0.05)
"""Logarithms of how slow the machine is, trial by trial."""


def _server(slowness: float) -> Server:
    def token_s(n: int, chance: random.Random) -> float:
        return math.exp(slowness) * (0.02 + 0.004 * n) * chance.lognormvariate(0, 0.2)

    return Server(64, lambda _p, _r: 0.02 * math.exp(slowness), token_s)


def _run(slowness: float, seed: int, rate: float = 12.0) -> TrialSummary:
    server = _server(slowness)
    unloaded = unloaded_of(server, LENGTHS.drawn(0), 0)
    trial = Trial(rate, seed=seed, enough_requests=400, most_s=1e9, patience=1e9)
    return drive(server, LENGTHS.drawn(seed), trial, OBJECTIVE, unloaded, to_the_end=True)[0]


def _search(
    slowness: Callable[[], float], seed: int
) -> tuple[SearchResult, list[TrialSummary], float]:
    unloaded = unloaded_of(_server(0.0), LENGTHS.drawn(seed), seed)
    return search(
        lambda: _server(slowness()), LENGTHS, seed, OBJECTIVE, unloaded=unloaded, budget_s=BUDGET_S
    )


def test_a_constant_machine_has_no_drift_at_any_load() -> None:
    trials = [_run(0.0, seed, rate) for seed, rate in enumerate((9.0, 11.0, 12.0, 13.0, 10.0))]
    assert drift_of([trial.paces for trial in trials]) is None


def test_the_speed_of_each_run_is_told_apart_from_its_load() -> None:
    rates = (12.0, 10.0, 13.0, 11.0, 12.5, 10.5, 11.5)
    trials = [_run(slow, seed, rates[seed]) for seed, slow in enumerate(SLOWNESS)]
    drift = drift_of([trial.paces for trial in trials])
    assert drift is not None
    assert drift.slowness == pytest.approx(SLOWNESS, abs=0.03)


def test_two_runs_are_too_few_to_speak_of_drift() -> None:
    assert drift_of([_run(slow, seed).paces for seed, slow in enumerate((0.2, -0.2))]) is None


def test_a_run_put_to_another_speed_is_as_if_it_had_been_made_at_it() -> None:
    usual, slow = _run(0.0, 1), _run(0.2, 1, rate=12.0 * math.exp(-0.2))
    found = [
        token_time_rate([trial], trial.gaps_per_request, 0.01)
        for trial in (usual, replace(rescaled(slow, 0.2), rate_per_s=12.0))
    ]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1][0] == pytest.approx(found[0][0], rel=0.05)


def test_a_search_on_a_drifting_machine_goes_on_and_finds_the_usual_rate() -> None:
    truth = true_rate_in_steps(
        _server(0.0), LENGTHS, OBJECTIVE, low=5.0, high=40.0, requests=10_000
    )
    for seed in range(3):
        slowness = cycle(SLOWNESS[seed:] + SLOWNESS[:seed])
        verdict, trials, used_s = _search(partial(next, slowness), seed)
        steady, _, short_s = _search(lambda: 0.0, seed)
        rate = verdict.estimate.rate_per_s
        assert rate is not None
        assert abs(rate / truth - 1) < 0.12, (seed, rate, truth)
        assert verdict.estimate.drift > 0.05
        assert steady.estimate.drift == 0.0
        # Not a word longer where nothing changes, and never into what is left for bursts.
        assert short_s < 0.5 * used_s
        assert used_s < 0.75 * BUDGET_S
        assert len(trials) > 8
