from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from aqualib.engines.vllm.lending.step_meter import LARGEST_CLASS, LentState, StepMeter, step_kind

NAME = "aqua_lender_step_duration_seconds"


def seconds(steps: StepMeter, loans: LentState, tokens: str) -> tuple[float, float]:
    """Number and sum of the durations."""
    registry = CollectorRegistry()
    registry.register(steps)
    labels = {"loans": loans, "tokens": tokens}
    count, total = (
        registry.get_sample_value(f"{NAME}_{part}", labels) for part in ("count", "sum")
    )
    assert count is not None
    assert total is not None
    return count, total


def test_a_step_counts_by_what_was_lent_when_it_began() -> None:
    steps = StepMeter()
    steps.begun(4, LentState.NONE, 10.0)
    assert steps.ended(4, 10.25) == 0.25
    steps.begun(4, LentState.HELD, 11.0)
    steps.ended(4, 11.5)
    assert seconds(steps, LentState.NONE, "1-16") == (1, 0.25)
    assert seconds(steps, LentState.HELD, "1-16") == (1, 0.5)
    assert seconds(steps, LentState.RECLAIMING, "1-16") == (0, 0)


def test_steps_that_overlap_end_in_the_order_in_which_they_began() -> None:
    steps = StepMeter()
    steps.begun(4, LentState.HELD, 1.0)
    steps.begun(4, LentState.RECLAIMING, 2.0)
    steps.ended(4, 4.0)
    steps.ended(4, 4.5)
    assert seconds(steps, LentState.HELD, "1-16") == (1, 3.0)
    assert seconds(steps, LentState.RECLAIMING, "1-16") == (1, 2.5)


def test_a_step_without_tokens_is_none() -> None:
    steps = StepMeter()
    steps.begun(0, LentState.NONE, 1.0)
    steps.begun(8, LentState.HELD, 2.0)
    assert steps.ended(0, 3.0) is None
    steps.ended(8, 4.0)
    assert seconds(steps, LentState.HELD, "1-16") == (1, 2.0)


@pytest.mark.parametrize(
    ("token_count", "tokens"),
    [(1, "1-16"), (16, "1-16"), (17, "17-128"), (1024, "129-1024"), (1025, LARGEST_CLASS)],
)
def test_steps_are_compared_with_steps_of_as_many_tokens(token_count: int, tokens: str) -> None:
    steps = StepMeter()
    steps.begun(token_count, LentState.NONE, 0.0)
    steps.ended(token_count, 1.0)
    assert seconds(steps, LentState.NONE, tokens) == (1, 1.0)


def test_steps_are_of_one_kind_within_a_power_of_two() -> None:
    kinds = [step_kind(token_count) for token_count in (1, 2, 3, 4, 255, 256, 8192)]
    assert kinds == [f"under {bound} tokens" for bound in (2, 4, 4, 8, 256, 512, 16384)]
