"""What a trial is taken for: waits count from the schedule, and nobody is left out."""

from __future__ import annotations

import numpy as np

from aqua_profiler.load.trial import ArrivalProcess, Trial
from aqua_profiler.measure.kv_cache import EngineFigures
from aqua_profiler.measure.recorder import TrialRecorder
from aqua_profiler.measure.summary import StopReason
from aqua_profiler.spec import LatencyObjective, UnloadedLatency

UNLOADED = UnloadedLatency(ttft_s=0.1, residence_s=0.5, tbt_s=0.01)
OBJECTIVE = LatencyObjective()


def _watch(**changes: float) -> TrialRecorder:
    trial = Trial(rate_per_s=10.0, seed=1, **changes)  # type: ignore[arg-type]
    return TrialRecorder(trial, OBJECTIVE, UNLOADED)


def test_time_to_first_token_counts_from_the_schedule_not_from_the_send() -> None:
    watch = _watch()
    for number in range(20):
        due_s = number * 0.1
        watch.scheduled(due_s, 10)
        watch.sent(number, due_s + 3.0)  # The generator was blocked.
        watch.token(number, due_s + 3.1)
        watch.finish(number, due_s + 3.1)
    summary = watch.summary(StopReason.ENOUGH, 10.0, 2.0, 6.0)
    assert abs(summary.ttft_s - 3.1) < 1e-6
    assert abs(summary.lateness_p99_s - 3.0) < 1e-6


def test_requests_without_an_answer_count_as_waiting() -> None:
    watch = _watch()
    for number in range(40):
        watch.scheduled(number * 0.1, 10)
        watch.sent(number, number * 0.1)
        if number < 10:
            watch.token(number, number * 0.1 + 0.05)
            watch.finish(number, number * 0.1 + 0.05)
    summary = watch.summary(StopReason.TIME, 10.0, 4.0, 30.0)
    assert summary.ttft_s > 20.0
    assert summary.over_share > 0.7


def test_a_backlog_measures_the_capacity_whatever_the_arrivals() -> None:
    watch = _watch(enough_backlog=100)
    due = [number / 30 for number in range(400)]
    starts = [max(at_s, number / 8) for number, at_s in enumerate(due)]
    events = sorted(
        [(at_s, 0, number) for number, at_s in enumerate(due)]
        + [(at_s + 1e-6, 1, number) for number, at_s in enumerate(starts)]
    )
    for at_s, kind, number in events:
        if kind == 0:
            watch.scheduled(at_s, 1)
            watch.sent(number, at_s)
        else:
            watch.token(number, at_s)
            watch.finish(number, at_s)
            if watch.should_stop(at_s, 30.0) is StopReason.BACKLOG:
                break
    assert watch.backlog_starts == 100
    backlog = max(
        watch.summary(StopReason.BACKLOG, 30.0, 20.0, 20.0).backlogs, key=lambda b: b.starts
    )
    assert abs(backlog.starts / backlog.seconds - 8.0) < 0.1


def test_a_run_stops_early_when_the_oldest_request_has_waited_too_long() -> None:
    watch = _watch(patience=4.0)
    watch.scheduled(0.0, 10)
    assert watch.should_stop(3.9, 10.0) is None
    assert watch.should_stop(4.1, 10.0) is StopReason.OVERLOAD


def test_a_burst_goes_on_to_its_end() -> None:
    watch = _watch(most_s=60.0, to_the_end=True)
    watch.scheduled(0.0, 10)
    assert watch.should_stop(59.0, 10.0) is None
    assert watch.should_stop(60.0, 10.0) is StopReason.TIME


def test_context_of_waiting_requests_counts_towards_the_peak() -> None:
    watch = _watch()
    for number in range(3):
        watch.scheduled(0.1 * number, 100)
    for _ in range(5):
        watch.token(0, 1.0)
    watch.finish(0, 1.0)
    watch.scheduled(2.0, 50)
    assert watch.tokens_peak == 305


def test_a_moment_of_slow_tokens_does_not_end_a_run_and_two_seconds_do() -> None:
    watch = _watch()
    number = watch.scheduled(0.0, 10)
    watch.sent(number, 0.0)
    at_s = 0.0
    for _ in range(600):
        at_s += 0.01
        watch.token(number, at_s)
    others = [watch.scheduled(at_s, 10) for _ in range(300)]
    for late_s in (0.0, 0.5):  # The server halts: 300 requests have a slow gap at once.
        for other in others:
            watch.token(other, at_s + 0.01 + late_s)
    assert watch.should_stop(at_s + 0.6, 10.0) is not StopReason.SLOW_TOKENS
    for step in range(1, 6):
        for other in others:
            watch.token(other, at_s + 0.51 + 0.5 * step)
    assert watch.should_stop(at_s + 3.1, 10.0) is StopReason.SLOW_TOKENS


def test_a_trial_is_not_steady_before_requests_have_come_and_gone_three_times() -> None:
    watch = _watch(enough_requests=50, least_s=5.0)
    # Ten requests a second, and each stays for four seconds.
    events = [(0.1 * number, 0, number) for number in range(300)]
    events += [(0.1 * number + 4.0, 1, number) for number in range(300)]
    ended_s = None
    for at_s, kind, number in sorted(events):
        if kind == 0:
            watch.scheduled(at_s, 10)
            watch.sent(number, at_s)
            watch.token(number, at_s + 0.01)
        else:
            watch.token(number, at_s)
            watch.finish(number, at_s)
        if watch.should_stop(at_s, 10.0) is StopReason.ENOUGH:
            ended_s = at_s
            break
    assert ended_s is not None
    assert 12.0 <= ended_s < 12.5


def test_the_queue_is_averaged_over_time_and_not_over_looks() -> None:
    watch = _watch()
    for number in range(20):  # Each stays for a second: that long the server is filling.
        watch.scheduled(number * 0.5, 10)
        watch.token(number, number * 0.5)
        watch.token(number, number * 0.5 + 1.0)
        watch.finish(number, number * 0.5 + 1.0)
    watch.look_inside(EngineFigures(waiting=50.0), 0.0)
    watch.look_inside(EngineFigures(waiting=0.0), 1.0)
    for at_s in (6.0, 6.1, 6.2, 6.3):
        watch.look_inside(EngineFigures(waiting=4.0), at_s)
    watch.look_inside(EngineFigures(), 7.0)  # The page could not be read: it stays as it was.
    watch.look_inside(EngineFigures(waiting=0.0), 8.0)
    watch.look_inside(EngineFigures(waiting=9.0), 11.0)  # While the last answers come in.
    queue = watch.summary(StopReason.ENOUGH, 2.0, 11.0, 12.0).queue
    assert queue is not None
    assert abs(queue[0] - 4.0 * 0.2) < 1e-9
    assert abs(queue[1] - 0.2) < 1e-9
    assert _watch().summary(StopReason.ENOUGH, 2.0, 11.0, 12.0).queue is None


def test_requests_turned_away_end_a_run() -> None:
    watch = _watch()
    for number in range(8):
        watch.scheduled(0.1 * number, 1)
        watch.turn_away(number, 0.1 * number)
    assert watch.should_stop(1.0, 10.0) is StopReason.SHED


def test_arrivals_have_the_rate_and_the_scatter_of_poisson() -> None:
    times = []
    for at_s in ArrivalProcess(Trial(rate_per_s=20.0, seed=5)):
        if at_s > 500:
            break
        times.append(at_s)
    counts = np.bincount(np.array(times, dtype=int), minlength=500)
    assert abs(len(times) / 500 - 20) < 0.8
    assert 0.8 < counts.var() / counts.mean() < 1.2


def test_a_ramp_doubles_and_stays_where_it_is_frozen() -> None:
    schedule = ArrivalProcess(Trial(rate_per_s=1.0, seed=0, doubling_s=2.0, max_rate_per_s=100.0))
    assert schedule.rate_at(4.0) == 4.0
    assert schedule.rate_at(60.0) == 100.0
    schedule.freeze(6.0)
    assert schedule.rate_at(60.0) == 8.0


def test_a_ramp_that_was_frozen_by_a_hiccup_goes_on_from_there() -> None:
    schedule = ArrivalProcess(Trial(rate_per_s=1.0, seed=0, doubling_s=2.0, max_rate_per_s=100.0))
    schedule.freeze(4.0)
    schedule.thaw(10.0)
    assert schedule.rate_at(10.0) == 4.0
    assert schedule.rate_at(12.0) == 8.0
