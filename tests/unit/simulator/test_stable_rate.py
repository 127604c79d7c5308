"""The rate that a simulated engine sustains, where arithmetic gives it, and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aqua_protocol.errors import ConfigError
from aqua_protocol.prediction import PredictedRate, read_prediction
from aqua_simulator.serving.engine import Engine, EngineSettings
from aqua_simulator.serving.memory import PagedMemory
from aqua_simulator.serving.stable_rate import stable_rate
from aqua_simulator.timing.iteration import IterationTime

STEP_S = 0.1


def engine(token_s: float = 0.0, places: int = 256) -> Engine:
    time_of = IterationTime(
        "test", lambda tokens: token_s * tokens, lambda _: 0.0, lambda _: 0.0, STEP_S
    )
    settings = EngineSettings(max_num_seqs=places, steps_in_flight=1)
    return Engine("engine", settings, time_of, PagedMemory(1 << 16))


@pytest.mark.slow
def test_one_place_sustains_as_many_requests_as_it_can_end() -> None:
    # Ten steps each, one request at a time: one a second, and a little less before waits are long.
    found = stable_rate(lambda: engine(places=1), [(8, 10)], ttft_s=3.0, tbt_s=1.0)
    assert 0.7 < found < 1.05


def test_tokens_that_slow_down_with_the_batch_bound_the_rate() -> None:
    # A step takes 0.2 s with ten requests in it. If that were their mean number, and not nearly
    # their most, then in the 1.6 s that each stays for its eight steps ten would come.
    found = stable_rate(lambda: engine(token_s=0.01), [(1, 8)], ttft_s=9.0, tbt_s=0.2)
    assert 2.0 < found < 10 / 1.6


def test_limits_that_no_rate_keeps_are_refused() -> None:
    with pytest.raises(ConfigError, match="no rate keeps"):
        stable_rate(engine, [(8, 10)], ttft_s=0.01, tbt_s=1.0)


def test_a_prediction_is_read_back_and_anything_else_refused(tmp_path: Path) -> None:
    path = tmp_path / "prediction.json"
    told = PredictedRate(model="a", gpu="b", rate_per_s=2.5, ttft_s=1.0, tbt_s=0.1)
    path.write_text(told.model_dump_json())
    assert read_prediction(path) == told
    for text in ("[]", json.dumps({**told.model_dump(), "rate_per_s": -1.0}), "no JSON"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="no predicted rate"):
            read_prediction(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_prediction(tmp_path / "absent")
