"""Aqua on a GPU that is not there: nothing goes wrong, and without any one mend something does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aqua_protocol import AquaError
from harness.gpu_failure_scenarios import FAILURE_SCENARIOS
from harness.gpu_lane_scenarios import LANE_SCENARIOS
from harness.gpu_layer_scenarios import LAYER_SCENARIOS
from harness.gpu_mends import MENDS
from harness.gpu_scenarios import SCENARIOS as ORDER_SCENARIOS
from harness.mend import Mend

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

SCENARIOS = (*ORDER_SCENARIOS, *LAYER_SCENARIOS, *LANE_SCENARIOS, *FAILURE_SCENARIOS)

DEFECTS = set(range(1, 22))
"""Numbers of the review."""

SEEDS = 3
"""Orders in which each scenario runs here."""

MORE_SEEDS = 8
"""Orders in which a missing mend must show."""


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_no_rule_of_cuda_is_broken(scenario: Callable[[int], None]) -> None:
    # What fails half-way does so in any order.
    for seed in range(1 if scenario in FAILURE_SCENARIOS else SEEDS):
        scenario(seed)


@pytest.mark.parametrize("mend", MENDS, ids=lambda mend: mend.without)
def test_each_mend_is_needed(mend: Mend) -> None:
    with mend.taken_back():
        for seed in range(MORE_SEEDS):
            try:
                mend.scenario(seed)
            except (AssertionError, AquaError):
                return
    pytest.fail(f"nobody minds that {mend.without}")


def test_each_scenario_minds_some_mend() -> None:
    assert {mend.scenario for mend in MENDS} == set(SCENARIOS)


def test_no_defect_of_the_review_lacks_a_mend() -> None:
    assert {mend.defect for mend in MENDS} >= DEFECTS
