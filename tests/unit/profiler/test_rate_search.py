"""The search on servers whose capacity is known, on a virtual clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from aqua_profiler.load.lengths import LengthDistribution
from aqua_profiler.measure.summary import StopReason, TrialSummary
from aqua_profiler.search.journal import Journal
from aqua_profiler.search.rate_search import SearchResult, next_trial
from aqua_profiler.spec import LatencyObjective, UnloadedLatency
from harness.known_servers import CASES, CHAT
from harness.queueing import AnyServer, Server, drive, search, unloaded_of

BUDGET_S: Final = 600.0


def _search(
    server: AnyServer,
    seed: int,
    objective: LatencyObjective,
    *,
    lengths: LengthDistribution = CHAT,
    budget_s: float = BUDGET_S,
    predicted_per_s: float | None = None,
) -> tuple[SearchResult, list[TrialSummary], float]:
    unloaded = unloaded_of(server, lengths.drawn(seed), seed)
    return search(
        lambda: server,
        lengths,
        seed,
        objective,
        unloaded=unloaded,
        budget_s=budget_s,
        predicted_per_s=predicted_per_s,
    )


def test_the_same_seed_gives_the_same_search() -> None:
    first = _search(CASES["five slots"].server, 3, LatencyObjective())
    again = _search(CASES["five slots"].server, 3, LatencyObjective())
    assert first[0] == again[0]
    assert first[1] == again[1]


def test_a_resumed_search_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    server, objective = CASES["five slots"].server, LatencyObjective()
    verdict, trials, _ = _search(server, 4, objective)
    unloaded = unloaded_of(server, CHAT.drawn(4), 4)
    journal = Journal(tmp_path / "journal", {})
    journal.note_unloaded(unloaded)
    for trial in trials:
        journal.note_trial(trial)
    journal.note_burst(2.0, trials[0])
    again = Journal(tmp_path / "journal", {})
    kept = again.trials
    assert (again.unloaded, kept, again.bursts) == (unloaded, trials, [(2.0, trials[0])])
    step = next_trial(objective, unloaded, kept, left_s=100.0, budget_s=BUDGET_S, seed=4)
    assert isinstance(step, SearchResult)
    assert step.estimate == verdict.estimate


def test_a_short_budget_is_kept_and_makes_a_partial_profile() -> None:
    verdict, _, used_s = _search(CASES["five slots"].server, 1, LatencyObjective(), budget_s=15.0)
    assert used_s < 15.5
    assert not verdict.complete
    assert verdict.estimate.confidence < 0.9


def test_a_server_faster_than_the_highest_rate_allowed_is_said_to_be_so() -> None:
    verdict, _, _ = _search(CASES["one at a time"].server, 1, LatencyObjective(max_rate_per_s=6.0))
    assert "highest rate allowed" in verdict.reason
    assert verdict.complete
    assert verdict.estimate.rate_per_s == 6.0


def test_a_limit_of_tokens_is_found_where_no_queue_forms() -> None:
    server = CASES["tokens slow down with each request"].server
    verdict, trials, _ = _search(server, 2, LatencyObjective())
    assert verdict.estimate.limited_by == "tbt"
    assert verdict.estimate.rate_per_s is not None
    assert any(trial.stop is StopReason.SLOW_TOKENS or (trial.tbt_s or 0) > 0.1 for trial in trials)
    assert 9.0 < verdict.estimate.rate_per_s < 16.0


@pytest.mark.slow
def test_a_prediction_saves_requests_and_does_not_move_the_rate() -> None:
    server, truth = CASES["tokens slow down with each request"].server, 11.95
    sent: dict[float | None, int] = {}
    for factor in (None, 0.5, 1.0, 2.0):
        sent[factor] = 0
        for seed in (0, 1):
            predicted = None if factor is None else factor * truth
            verdict, trials, _ = _search(
                server, seed, LatencyObjective(), predicted_per_s=predicted
            )
            assert verdict.complete
            assert verdict.estimate.rate_per_s == pytest.approx(truth, rel=0.05)
            sent[factor] += sum(trial.sent for trial in trials)
    assert sent[1.0] < 0.7 * sent[None]
    assert max(sent[0.5], sent[2.0]) < 1.1 * sent[None]


def test_a_trial_that_a_prediction_chose_stands_for_no_steady_state() -> None:
    # Sixteen at once: 15% beyond the capacity its first 150 requests hardly wait.
    server, truth = CASES["steps, 16 at once"].server, 31.65
    verdict, trials, _ = _search(server, 0, LatencyObjective(), predicted_per_s=truth)
    assert trials[0].meets(LatencyObjective())
    assert verdict.complete
    assert verdict.estimate.rate_per_s == pytest.approx(truth, rel=0.03)


def test_nothing_is_concluded_from_a_ramp_alone() -> None:
    server, objective = CASES["sixteen slots"].server, LatencyObjective()
    unloaded = unloaded_of(server, CHAT.drawn(0), 0)
    ramp = next_trial(objective, unloaded, [], left_s=600, budget_s=600, seed=0)
    assert not isinstance(ramp, SearchResult)
    summary, _ = drive(server, CHAT.drawn(ramp.seed), ramp, objective, unloaded)
    assert summary.stop is StopReason.BACKLOG
    spent = next_trial(objective, unloaded, [summary], left_s=0.0, budget_s=600, seed=0)
    assert isinstance(spent, SearchResult)
    assert not spent.complete


def test_a_lone_request_that_misses_the_limit_leaves_no_rate_that_meets_it() -> None:
    server = Server(4, lambda _p, _r: 1.5, lambda _n, _r: 0.01)
    verdict, _, _ = _search(server, 0, LatencyObjective(min_rate_per_s=0.1))
    assert verdict.estimate.ok_per_s == 0.0
    assert not verdict.complete


def test_a_ramp_starts_where_a_server_that_takes_one_request_at_a_time_keeps_up() -> None:
    objective = replace(LatencyObjective(), max_rate_per_s=50.0)
    ramp = next_trial(
        objective, UnloadedLatency(0.1, 2.0, 0.02), [], left_s=100, budget_s=100, seed=0
    )
    assert not isinstance(ramp, SearchResult)
    assert ramp.rate_per_s * 2.0 < 1
