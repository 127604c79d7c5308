"""The rule of repetition: bounded in number and pause, and the same for the same seed."""

from __future__ import annotations

from random import Random

from aqua_client import RetryRule
from aqua_protocol import UnavailableError

ERROR = UnavailableError("no")
PATIENT = UnavailableError("no", retry_after_s=0.7)


def pauses(rule: RetryRule, error: UnavailableError = ERROR, seed: int = 1) -> list[float]:
    """Pauses until the rule gives up."""
    random, taken = Random(seed), list[float]()
    while (pause := rule.pause_s(error, attempt=len(taken) + 1, random=random)) is not None:
        taken.append(pause)
    return taken


def test_pauses_grow_within_their_bounds_and_repeat_for_a_seed() -> None:
    rule = RetryRule(max_attempts=6)
    taken = pauses(rule)
    assert len(taken) == 5
    assert 0.025 <= taken[0] <= 0.075
    assert taken[0] < taken[1] < taken[2] <= taken[-1] == rule.max_pause_s
    assert taken == pauses(rule)
    assert taken != pauses(rule, seed=2)


def test_what_the_coordinator_asks_for_is_the_least_and_the_bound_the_most() -> None:
    assert pauses(RetryRule(), PATIENT) == [0.7, 0.7]
    assert pauses(RetryRule(max_pause_s=0.5), PATIENT) == [0.5, 0.5]


def test_one_attempt_repeats_nothing() -> None:
    assert pauses(RetryRule(max_attempts=1)) == []
