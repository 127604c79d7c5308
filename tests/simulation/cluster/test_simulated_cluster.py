"""A simulated cluster under faults; `make simulate` takes a million steps of it.

The invariants are those of `harness.simulation`. They are worth something only if they can fail:
each bug that is planted must be found.
"""

from __future__ import annotations

import re
from typing import Final

import pytest

from harness.planted_bugs import PLANTS
from harness.simulated_faults import Kind
from harness.simulation import Failure, Run, shrink, simulate

STEPS: Final = 2000
PLANT_STEPS: Final = 1000
PLANT_RUNS: Final = 40
"""Runs in which a planted bug must show itself; all do within a few."""


@pytest.mark.parametrize("seed", range(2))
def test_invariants_hold_after_every_step_and_all_comes_to_rest(seed: int) -> None:
    outcome = simulate(Run(seed, STEPS))
    assert outcome.failure is None, str(outcome.failure)
    assert outcome.steps > STEPS
    assert outcome.counts["grants"] > 0


@pytest.mark.parametrize("kind", Run(0, 0).kinds)
def test_every_fault_happens_and_is_withstood(kind: Kind) -> None:
    run = next(
        run
        for run in (Run(seed, PLANT_STEPS, kinds=(kind,)) for seed in range(100))
        if len(run.faults()) >= 3
    )
    outcome = simulate(run)
    assert outcome.failure is None, str(outcome.failure)
    assert outcome.counts[kind] >= 3


def test_a_seed_repeats_its_run_to_the_letter() -> None:
    first = simulate(Run(5, PLANT_STEPS))
    assert simulate(Run(5, PLANT_STEPS)).digest == first.digest
    assert simulate(Run(6, PLANT_STEPS)).digest != first.digest


@pytest.mark.parametrize("bug", PLANTS)
def test_planted_bug_is_found(bug: str) -> None:
    failure = _found(bug)
    assert failure is not None
    assert re.search(PLANTS[bug].what, failure.what), failure.what


def test_what_is_found_is_told_with_the_faults_that_it_takes() -> None:
    bug = "a flood shuts members out"
    with PLANTS[bug].planted() as libraries:
        failure = _found(bug)
        assert failure is not None
        shrunk = shrink(failure, libraries)
        again = simulate(shrunk.run, libraries).failure
    assert again is not None
    assert again.what == shrunk.what
    assert 0 < len(shrunk.run.faults()) < len(failure.run.faults())
    assert f"make simulate SEED={shrunk.run.seed} STEPS={shrunk.run.steps} ONLY=" in str(shrunk)


def _found(bug: str) -> Failure | None:
    plant = PLANTS[bug]
    with plant.planted() as libraries:
        for seed in range(plant.seed, plant.seed + PLANT_RUNS):
            outcome = simulate(Run(seed, PLANT_STEPS, kinds=plant.faults), libraries)
            if outcome.failure is not None:
                return outcome.failure
    return None
