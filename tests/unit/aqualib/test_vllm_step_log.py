"""Steps as an engine records them, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from aqua_schedulers.conserve import MeasuredStep, StepLoad
from aqualib.engines.vllm.operations.admin_commands import answer
from aqualib.engines.vllm.operations.step_log import (
    MAX_STEPS,
    MIN_PREFILL_TOKENS,
    RATE_MEMORY,
    PrefillRate,
    StepLog,
    StepTimer,
    load_of,
)

if TYPE_CHECKING:
    from aqualib.engines.vllm.lending.scheduler import LendingScheduler


def request(computed: int, prompt: int) -> SimpleNamespace:
    return SimpleNamespace(num_computed_tokens=computed, num_prompt_tokens=prompt)


def output(drafts: int = 0, **tokens: int) -> SimpleNamespace:
    return SimpleNamespace(
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
        scheduled_spec_decode_tokens={"decode": [-1] * drafts} if drafts else {},
    )


REQUESTS = {
    "decode": request(computed=41, prompt=30),
    "prompt": request(computed=96, prompt=200),
    "last token of a prompt": request(computed=50, prompt=50),
}


def test_a_load_is_what_the_step_computes_of_each_request() -> None:
    step = output(decode=1, prompt=64, **{"last token of a prompt": 1})
    expected = StepLoad().and_decode(41).and_chunk(64, 32).and_chunk(1, 49)
    assert load_of(step, REQUESTS) == expected


def test_steps_that_overlap_last_from_the_end_of_the_one_before() -> None:
    timer = StepTimer()
    first, second, empty, dropped, last = (
        *(output(decode=1) for _ in range(2)),
        *(output(), output(decode=1), output(decode=1)),
    )
    begun_s = ((first, 10.0), (second, 10.25), (empty, 11.5), (dropped, 12.0), (last, 12.5))
    for step, called_s in begun_s:
        timer.called(called_s)
        timer.called(called_s + 0.1)  # What is done before vLLM is called is of the step.
        timer.scheduled(step)
    ended = [timer.ended(step, at_s) for step, at_s in ((first, 11.0), (second, 11.5))]
    ended += [timer.ended(empty, 12.0), timer.ended(last, 14.0)]
    assert [step and step.seconds for step in ended] == [1.0, 0.5, 0.5, 1.5]
    assert timer.ended(output(decode=1), 15.0) is None, "it began while nothing was timed"


def test_a_step_that_is_not_timed_neither_hides_one_that_is_nor_begins_it() -> None:
    timer = StepTimer()
    untimed, timed, later = (output(decode=1) for _ in range(3))
    timer.called(10.0)
    timer.skipped()
    timer.called(10.5)
    timer.scheduled(timed)
    assert timer.ended(untimed, 11.0) is None
    step = timer.ended(timed, 12.0)
    assert step is not None
    assert step.seconds == 1.0, "since the end of the one before, though nobody timed that"
    timer.called(20.0)
    timer.skipped()
    timer.called(30.0)
    timer.scheduled(later)
    step = timer.ended(later, 31.0)
    assert step is not None
    assert not timer.is_timing
    assert step.seconds == 1.0, "the call of the untimed step before is not this one's"


def test_a_step_that_nobody_looks_at_is_timed_and_is_no_row_of_a_recording() -> None:
    timer, log = StepTimer(), StepLog()
    log.record(recording=True)
    for at_s, load in ((10.0, StepLoad()), (20.0, StepLoad().and_chunk(64, 32))):
        step = output(prompt=64)
        timer.called(at_s)
        timer.scheduled(step, load)
        ended = timer.ended(step, at_s + 2.0)
        assert ended == MeasuredStep(load, 2.0)
        log.note(ended)
    assert [each.load for each in log.steps] == [StepLoad().and_chunk(64, 32)]


def test_prompts_are_timed_by_steps_that_are_mostly_prompts() -> None:
    rate = PrefillRate()
    decodes = output(**{f"r{index}": 1 for index in range(2 * MIN_PREFILL_TOKENS)})
    few = output(prompt=MIN_PREFILL_TOKENS - 2, decode=1)
    drafted = output(drafts=MIN_PREFILL_TOKENS, decode=1 + MIN_PREFILL_TOKENS)
    for step in (decodes, drafted, few, output()):
        assert not rate.is_told_by(step)
        rate.note(step, 0.5)
    assert rate.tokens_per_s == 0.0
    rate.note(output(prompt=MIN_PREFILL_TOKENS - 1, decode=1), 0.5)
    assert rate.tokens_per_s == 2 * MIN_PREFILL_TOKENS
    rate.note(output(prompt=10 * MIN_PREFILL_TOKENS), 0.5)
    assert rate.tokens_per_s == 2 * MIN_PREFILL_TOKENS * (RATE_MEMORY + (1 - RATE_MEMORY) * 10)


def test_nothing_is_recorded_unasked_and_a_full_recording_ends() -> None:
    log = StepLog()
    step = MeasuredStep(StepLoad().and_decode(4), 0.5)
    log.note(step)
    assert log.steps == []
    log.record(recording=True)
    log.note(MeasuredStep(StepLoad(), 0.5))  # It computes nothing, so it is no step.
    for _ in range(MAX_STEPS + 5):
        log.note(step)
    assert not log.is_recording
    assert log.steps == [step] * MAX_STEPS
    log.record(recording=False)
    assert len(log.steps) == MAX_STEPS, "an end keeps what there is"
    log.record(recording=True)
    assert log.steps == []


@pytest.mark.parametrize("wrong", [{}, {"recording": "perhaps"}, {"recording": True, "more": 1}])
def test_another_command_than_to_begin_or_end_is_refused(wrong: dict[str, object]) -> None:
    engine = cast("LendingScheduler", SimpleNamespace(step_log=StepLog()))
    assert answer(engine, "record-steps", wrong)["error"]["code"] == "request_invalid"
    assert answer(engine, "record-steps", {"recording": True})["result"] == {"recording": True}
    assert engine.step_log.is_recording
