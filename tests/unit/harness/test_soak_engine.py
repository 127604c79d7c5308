"""The verdict over a storm: what it calls wrong, and that a storm that did not happen fails."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Final

from harness.engine_storm import Happening
from harness.soak_engine import Fault, Verdict

FIGURES: Final = ("forced", "restored_tokens", "prefix_hit_tokens", "drained_bytes")
GOOD: Final = Verdict(
    rounds=10,
    counts=Counter(dict.fromkeys(("answers", *Happening, *Fault), 3)),
    engine=dict.fromkeys(FIGURES, 5),
    processes=[{"fds": 40.0, "threads": 9.0}] * 10,
    control_wrong=4,
)


def test_a_storm_that_changed_nothing_is_good() -> None:
    assert GOOD.found() == []


def test_each_thing_that_did_not_happen_is_named() -> None:
    for name in ("answers", *Happening, *Fault):
        counts = GOOD.counts.copy()
        del counts[name]
        (found,) = replace(GOOD, counts=counts).found()
        assert found == f"the storm did not happen: no {name}"
    for name in FIGURES:
        (found,) = replace(GOOD, engine={**GOOD.engine, name: 0}).found()
        assert found == f"the storm did not happen: no {name.replace('_', ' ')}"


def test_wrong_answers_and_loads_that_decide_nothing_are_told() -> None:
    (found,) = replace(GOOD, counts=GOOD.counts + Counter(wrong=1)).found()
    assert found == "1 of 3 answers are not those of vLLM alone"
    (found,) = replace(GOOD, control_wrong=0).found()
    assert found == "no answer changed when loads were zeroed, so they decide nothing"


def test_what_is_left_at_rest_and_what_grows_is_told() -> None:
    assert replace(GOOD, left=["round 1: 2 requests"]).found() == ["round 1: 2 requests"]
    growing = [{"fds": 40.0 + number, "threads": 9.0} for number in range(10)]
    (found,) = replace(GOOD, processes=growing).found()
    assert found == "fds grow by 1.00 a round, from 40"
