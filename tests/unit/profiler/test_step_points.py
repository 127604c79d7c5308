"""What of recorded steps counts, and how far off a profile is on loads that it has not seen."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from aqua_profiler.errors import EndpointGarbledError
from aqua_profiler.measure.step_points import (
    DECODE_STEPS,
    REPEATS,
    EngineLimits,
    StepPoint,
    StepRecording,
    points_of,
    rows_of,
)
from aqua_schedulers.conserve import MeasuredStep, StepLoad, StepTimeProfile, fitted_profile

LIMITS = EngineLimits(
    step_tokens=8192,
    requests=256,
    context_tokens=32_768,
    memory_tokens=500_000,
    vocabulary=32_000,
)
TRUTH = StepTimeProfile(
    model="llama",
    engine="vLLM",
    gpu="A100",
    floor_s=0.0095,
    token_s=90e-6,
    exponent=1.75,
    context_token_s=45e-9,
    pair_s=3e-9,
    request_s=8e-6,
    max_tokens=8192,
)


def made_by(point: StepPoint, limits: EngineLimits, rng: random.Random) -> list[MeasuredStep]:
    """Steps that an engine with chunked prefill makes of a point, with times that scatter."""
    loads = []
    for _ in range(REPEATS if not point.batch else 1):
        for first in range(0, point.prompt, limits.step_tokens) if not point.batch else ():
            tokens = min(limits.step_tokens, point.prompt - first)
            loads.append(StepLoad().and_chunk(tokens, first))
    for step in range(DECODE_STEPS if point.batch else 0):
        load = StepLoad()
        for _ in range(point.batch):
            load = load.and_decode(point.context + step)
        if point.prompt and step % 2:
            load = load.and_chunk(min(point.prompt, limits.step_tokens - point.batch), 0)
        loads.append(load)
    steps = [MeasuredStep(load, TRUTH.seconds(load) * rng.gauss(1.0, 0.03)) for load in loads]
    # The first of each point waits for something else: a compilation, a collection.
    return [steps[0]._replace(seconds=steps[0].seconds * 40), *steps[1:]]


def test_a_profile_of_an_engines_points_predicts_loads_that_it_has_not_seen() -> None:
    rng = random.Random(7)
    rows = [row for point in points_of(LIMITS) for row in rows_of(made_by(point, LIMITS, rng))]
    rng.shuffle(rows)
    found = fitted_profile(rows, model="llama", engine="vLLM", gpu="A100")
    assert found.relative_error < 0.06
    assert found.max_tokens == LIMITS.step_tokens
    for load in (
        StepLoad().and_decode(700),
        StepLoad(100, 100 * 3000, 0.0, 100),
        StepLoad(50, 50 * 500, 0.0, 50).and_chunk(1500, 2000),
        StepLoad().and_chunk(6000, 20_000),
    ):
        assert found.seconds(load) == pytest.approx(TRUTH.seconds(load), rel=0.06), load


def test_a_step_that_was_interrupted_makes_no_row() -> None:
    load = StepLoad().and_chunk(128, 0)
    steps = [MeasuredStep(load, seconds) for seconds in (3.0, 0.012, 0.010, 0.011)]
    (row,) = rows_of(steps)
    assert row == (load, 0.011)
    assert rows_of(steps[:2]) == [], "of two nobody knows which one was interrupted"


@pytest.mark.parametrize(
    "limits",
    [
        LIMITS,
        LIMITS._replace(context_tokens=512, memory_tokens=736, step_tokens=256),
        LIMITS._replace(requests=1, step_tokens=64),
        LIMITS._replace(memory_tokens=64),
        LIMITS._replace(context_tokens=16, memory_tokens=16),
    ],
)
def test_points_stay_within_what_an_engine_takes(limits: EngineLimits) -> None:
    points = points_of(limits)
    assert len(set(map(str, points))) == len(points), "by their names they are resumed"
    for point in points:
        output = DECODE_STEPS * (1 + bool(point.prompt))
        held = point.batch * (point.context + output) + point.prompt
        assert held <= limits.memory_tokens or not point.batch
        assert point.batch <= limits.requests
        assert max(point.context + output, point.prompt + 1) <= limits.context_tokens or (
            limits.context_tokens <= 2 * DECODE_STEPS
        )
    chunks = [point.prompt for point in points if not point.batch]
    assert all(shorter < longer for shorter, longer in pairwise(chunks))


def test_an_answer_of_another_form_is_refused_by_name() -> None:
    with pytest.raises(EndpointGarbledError, match="another form"):
        StepRecording.parse({"model": "m", "engine": "e", "gpu": "g", "limits": {}, "steps": []})
