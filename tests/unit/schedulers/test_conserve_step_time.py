"""Step times of co-serving: profiles, their correction, and the fixed budget without one."""

from __future__ import annotations

import json
from math import inf

import pytest

from aqua_protocol.errors import ConfigError
from aqua_schedulers.conserve import (
    MeasuredStep,
    PredictionBasis,
    StepLoad,
    StepTimeProfile,
    StepTimes,
    fitted_profile,
)
from aqua_schedulers.conserve.profile import MAX_TERM_S
from aqua_schedulers.conserve.step_time import ALONE_EVERY
from harness.step_times import PROFILE


def loads() -> list[StepLoad]:
    return [
        StepLoad().and_chunk(tokens, context)._replace(context_tokens=read)
        for tokens in (1, 32, 256, 1024, 2048)
        for context in (0, 2000)
        for read in (0, 10_000, 40_000)
    ]


def test_a_profile_is_found_again_from_the_steps_that_it_predicts() -> None:
    steps = [MeasuredStep(load, PROFILE.seconds(load)) for load in loads()]
    found = fitted_profile(steps, model="m", engine="e", gpu="g")
    assert found.relative_error < 0.05
    assert found.max_tokens == 2048
    assert StepTimeProfile.parse(found.model_dump_json()) == found


def test_a_profile_needs_steps_and_its_own_format() -> None:
    with pytest.raises(ConfigError, match="make no profile"):
        fitted_profile([], model="m", engine="e", gpu="g")
    with pytest.raises(ConfigError, match="not a step-time profile"):
        StepTimeProfile.parse('{"format": 2}')


@pytest.mark.parametrize("field", ["floor_s", "token_s", "pair_s", "request_s", "relative_error"])
@pytest.mark.parametrize("number", ["NaN", "1e999", "-1e-9"])
def test_a_profile_of_no_times_is_none(field: str, number: str) -> None:
    text = json.dumps({**PROFILE.model_dump(), field: "?"}).replace('"?"', number)
    with pytest.raises(ConfigError, match="not a step-time profile"):
        StepTimeProfile.parse(text)


def test_a_step_of_the_slowest_profile_takes_a_number_of_seconds() -> None:
    given = PROFILE.model_dump() | {"floor_s": 1e60, "exponent": 8.0}
    with pytest.raises(ConfigError, match="less than or equal"):
        StepTimeProfile.parse(json.dumps(given))
    slowest = PROFILE.model_copy(update={"token_s": MAX_TERM_S, "exponent": 8.0})
    assert slowest.seconds(StepLoad(1 << 24)) < inf


def test_a_chunk_is_the_largest_that_keeps_to_the_limit() -> None:
    times = StepTimes(PROFILE)
    load = StepLoad(8, 4000, 0.0, 8)
    tokens = times.chunk_within(load, 0.05, 0, 2048, 100)
    assert PROFILE.seconds(load.and_chunk(tokens, 100)) <= 0.05
    assert PROFILE.seconds(load.and_chunk(tokens + 1, 100)) > 0.05


def test_without_a_profile_offline_work_keeps_to_a_fixed_budget_that_overruns_cut() -> None:
    times = StepTimes(None)
    load = StepLoad(65, 0, 0.0, 2)
    assert times.basis is PredictionBasis.FIXED
    assert times.allows(load, 0.05, 64)
    assert not times.allows(load, 0.05, 65)
    assert not times.allows(load, 0.0, 1)
    times.measured(load, 0.0625, limit_s=0.05, offline_tokens=64)
    assert not times.allows(load, 0.05, 52)
    assert times.allows(load, 0.05, 51)
    for _ in range(6):
        times.measured(load, 9.0, limit_s=0.05, offline_tokens=1)
    assert not times.allows(load, 0.05, 1)
    times.measured(load, 0.06, limit_s=0.05, offline_tokens=0)
    assert not times.allows(load, 0.05, 1)
    times.measured(load, 0.04, limit_s=0.05, offline_tokens=0)
    assert times.allows(load, 0.05, 1)


def test_what_steps_without_online_requests_prove_is_not_taken_for_those_with_them() -> None:
    times = StepTimes(None)
    calm = StepLoad(64, 0, 0.0, 1)
    for _ in range(10):
        times.measured(calm, 0.01, limit_s=0.05, offline_tokens=64)
    assert times.fixed_tokens == 74
    busy = StepLoad(75, 0, 0.0, 2)
    assert times.allows(calm._replace(new_tokens=74), 0.05, 74)
    assert not times.allows(busy, 0.05, 74)
    times.measured(busy, 0.1, limit_s=0.05, offline_tokens=64)
    assert not times.allows(busy, 0.05, 33)
    assert times.fixed_tokens == 74


def test_a_fixed_budget_grows_by_steps_that_use_it_and_learns_of_those_with_a_limit() -> None:
    times = StepTimes(None)
    for tokens in (1, 31, 32):
        times.measured(StepLoad(tokens), 0.01, limit_s=0.05, offline_tokens=tokens)
    assert times.fixed_tokens == 65
    times.measured(StepLoad(65), 0.01, limit_s=0.0, offline_tokens=65)
    assert times.fixed_tokens == 65


def test_steps_that_are_late_whatever_their_size_do_not_take_the_fixed_budget_away() -> None:
    """100 tokens fit into the limit; one step in fourteen takes a fifth longer."""
    times = StepTimes(None)
    found = []
    for index in range(2000):
        tokens = times.fixed_tokens
        seconds = (0.02 + 1e-4 * tokens) * (1.2 if index % 14 == 0 else 1.0)
        times.measured(StepLoad(tokens), seconds, limit_s=0.03, offline_tokens=tokens)
        found.append(tokens)
    later = found[1000:]
    assert sum(later) / len(later) > 75
    assert max(later) <= 101


def test_a_profile_that_is_off_is_corrected_and_a_wrong_one_is_left_for_the_fixed_budget() -> None:
    times = StepTimes(PROFILE)
    load = StepLoad(512, 0, 0.0, 1)
    for _ in range(200):
        times.measured(load, 1.5 * PROFILE.seconds(load), limit_s=1.0, offline_tokens=0)
    assert times.basis.value == "profile"
    assert times.seconds(load) == pytest.approx(1.5 * PROFILE.seconds(load), rel=0.01)
    for index in range(60):
        share = (0.2, 5.0)[index % 2]
        times.measured(load, share * PROFILE.seconds(load), limit_s=1.0, offline_tokens=0)
    assert times.basis.value == "fixed"
    assert times.seconds(load) == float("inf")


def test_steps_that_the_machine_holds_up_now_and_then_do_not_make_a_good_profile_wrong() -> None:
    times = StepTimes(PROFILE)
    load = StepLoad(512, 0, 0.0, 1)
    for index in range(400):
        share = 100.0 if index % 100 == 0 else 1.0
        times.measured(load, share * PROFILE.seconds(load), limit_s=1.0, offline_tokens=0)
        assert times.basis is PredictionBasis.PROFILE, index
        assert times.seconds(load) < 1.1 * PROFILE.seconds(load), index


def test_what_steps_prove_under_a_profile_is_not_taken_for_the_fixed_budget() -> None:
    """Their limits may be longer: what may be aborted is not planned as short as what may not."""
    times = StepTimes(PROFILE)
    load = StepLoad(512, 0, 0.0, 1)
    for _ in range(100):
        times.measured(load, PROFILE.seconds(load), limit_s=1.0, offline_tokens=512)
    assert times.fixed_tokens == 64


ALONE = StepLoad(8, 4000, 0.0, 8)
"""Eight answers."""

BESIDE = ALONE.and_decode(100)
"""With another decode, for which the profile wants half a percent more time."""


def lets_in(times: StepTimes, *, stretch: float = 1.02) -> bool:
    """Whether an offline decode may lengthen such a step so much."""
    own_s = times.seconds(ALONE)
    return times.allows(BESIDE, stretch * own_s, 1, own_s)


def step(times: StepTimes, excess: float, *, pace: float = 1.0) -> bool:
    """One step, in which an offline decode takes part if it may and costs so much; if it did."""
    is_in = lets_in(times)
    seconds = pace * PROFILE.seconds(ALONE) * (1.0 + excess * is_in)
    times.paced(ALONE, BESIDE if is_in else ALONE, seconds)
    return is_in


def test_offline_tokens_that_lengthen_answers_whatever_the_profile_says_are_kept_out() -> None:
    times = StepTimes(PROFILE)
    times.paced(ALONE, ALONE, 1.3 * PROFILE.seconds(ALONE), steps=16)
    found = [step(times, 0.25, pace=1.3) for _ in range(10_000)]
    assert found[:5] == [True, True, True, True, True]
    assert found[5:50] == [False] * 45
    assert 20 < sum(found) < 100, "they are tried again, now and then"
    assert lets_in(times, stretch=1.1), "one that is due may take more than a little"
    cheap = [step(times, 0.01, pace=1.3) for _ in range(2000)]
    assert sum(cheap) > 1700


def test_what_is_known_of_some_answers_is_not_taken_for_others() -> None:
    """The profile is a tenth off for nine of them, which is not what an offline token costs."""
    nine = ALONE.and_decode(500)
    times = StepTimes(PROFILE)
    times.paced(ALONE, ALONE, PROFILE.seconds(ALONE))
    for _ in range(100):
        times.paced(nine, nine.and_decode(100), 1.1 * PROFILE.seconds(nine))
    assert times.excess == 0.0
    times.paced(nine, nine, 1.1 * PROFILE.seconds(nine))
    for _ in range(100):
        times.paced(nine, nine.and_decode(100), 1.1 * PROFILE.seconds(nine))
    assert times.excess == pytest.approx(0.0, abs=1e-9)
    assert lets_in(times)


def test_offline_tokens_that_cost_what_the_profile_says_stay_though_steps_scatter() -> None:
    """Steps scatter by more than ten times what such a token takes."""
    times = StepTimes(PROFILE)
    found = [step(times, 0.005, pace=(0.94, 1.06)[index // 3 % 2]) for index in range(8000)]
    assert sum(found) > 7800


def test_answers_alone_are_timed_again_now_and_then_though_offline_tokens_always_fit() -> None:
    times = StepTimes(PROFILE)
    found = [step(times, 0.005) for _ in range(3 * ALONE_EVERY)]
    assert found.count(False) == 2
    assert found.index(False) == ALONE_EVERY


def test_what_offline_tokens_add_is_nothing_to_a_limit_on_whole_steps() -> None:
    times = StepTimes(PROFILE)
    for _ in range(500):
        times.paced(ALONE, ALONE, PROFILE.seconds(ALONE))
        times.paced(ALONE, BESIDE, 3.0 * PROFILE.seconds(ALONE))
    assert times.excess > 0.5
    assert times.allows(BESIDE, 1.02 * times.seconds(ALONE), 1)
