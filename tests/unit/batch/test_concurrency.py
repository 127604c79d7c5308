"""How many requests an engine gets: much where it has room, little where others wait."""

from __future__ import annotations

from aqua_batch.service.dispatch.concurrency import FIRST_LIMIT, AdmissionLimit, LoadSample


def metrics(**values: float) -> str:
    """What vLLM tells, of one engine."""
    told = {"num_requests_waiting": 0.0, **values}
    lines = [f'vllm:{name}{{engine="0",model_name="m"}} {value}' for name, value in told.items()]
    return "# HELP vllm:x of vLLM\n" + "\n".join([*lines, "python_info 1.0"])


def load(**values: float) -> LoadSample:
    found = LoadSample.of(metrics(**values))
    assert found is not None
    return found


def test_an_engine_with_room_is_filled_within_few_looks() -> None:
    limit = AdmissionLimit(256)
    for _ in range(4):
        limit.calm(int(limit.value))
    assert limit.value == 256


def test_a_limit_that_is_not_used_does_not_grow() -> None:
    limit = AdmissionLimit(256)
    for _ in range(100):
        limit.calm(3)
        limit.answered(3)
    assert limit.value == FIRST_LIMIT


def test_the_limit_stays_about_what_the_engine_can_do() -> None:
    """An engine that is congested beyond 40 at once."""
    limit, values = AdmissionLimit(256), []
    for _ in range(500):
        running = int(limit.value)
        (limit.congested if running > 40 else limit.calm)(running)
        values.append(limit.value)
    steady = values[20:]
    assert max(steady) <= 45
    assert sum(steady) / len(steady) >= 28


def test_congestion_counts_once_until_what_is_too_much_has_ended() -> None:
    limit = AdmissionLimit(FIRST_LIMIT)
    limit.congested(16)
    for running in (16, 12, 9):
        limit.congested(running)
    assert limit.value == 8
    limit.congested(8)
    assert limit.value == 4


def test_an_engine_that_is_full_of_others_keeps_a_single_request() -> None:
    limit = AdmissionLimit(256)
    for _ in range(20):
        limit.congested(int(limit.value))
    assert limit.value == 1
    limit.congested(0)
    assert limit.value == 1


def test_without_metrics_answers_let_the_limit_grow_until_a_refusal() -> None:
    limit = AdmissionLimit(64)
    for _ in range(200):
        limit.answered(int(limit.value))
    assert limit.value == 64
    limit.congested(64)
    for _ in range(33):
        limit.answered(int(limit.value))
    assert 32.9 < limit.value < 33.1  # One for a round of answers.


def test_a_queue_that_stays_is_congestion_and_one_that_passes_is_none() -> None:
    idle, waits = load(), load(num_requests_waiting=3)
    assert waits.is_congested(waits, None)
    assert not waits.is_congested(idle, None)
    assert not idle.is_congested(waits, None)


def test_memory_that_is_taken_back_or_all_but_full_is_congestion() -> None:
    assert load(num_preemptions_total=5).is_congested(load(num_preemptions_total=4), None)
    assert not load(num_preemptions_total=5).is_congested(load(num_preemptions_total=5), None)
    assert load(kv_cache_usage_perc=0.97).is_congested(load(), None)


def test_first_tokens_that_come_too_late_are_congestion_where_a_time_is_wanted() -> None:
    def first_tokens(total_s: float, count: int) -> LoadSample:
        return load(
            time_to_first_token_seconds_sum=total_s, time_to_first_token_seconds_count=count
        )

    before = first_tokens(100.0, 50)
    assert first_tokens(104.0, 52).is_congested(before, 1.5)
    assert not first_tokens(104.0, 52).is_congested(before, 2.5)
    assert not first_tokens(104.0, 52).is_congested(before, None)
    assert not before.is_congested(before, 0.001)


def test_an_engine_that_co_serves_is_believed_only_where_it_refuses() -> None:
    text = metrics(num_requests_waiting=9) + "\naqua:offline_requests_waiting 9\n"
    found = LoadSample.of(text)
    assert found is not None
    assert not found.is_congested(found, 0.001)


def test_sums_go_over_all_parts_of_an_engine_and_strangers_tell_nothing() -> None:
    two = "\n".join(f'vllm:num_requests_waiting{{engine="{i}"}} 2.0' for i in range(2))
    found = LoadSample.of(two)
    assert found is not None
    assert found.waiting == 4
    assert LoadSample.of("python_info 1.0\n") is None
