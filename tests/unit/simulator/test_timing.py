"""Fitting and scoring iteration times on tables with known formulas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from aqua_protocol.decoders import DECODERS
from aqua_protocol.errors import ConfigError
from aqua_protocol.hardware import GPUS
from aqua_simulator.serving.setup import EngineSpec, iteration_time
from aqua_simulator.timing.evaluation import evaluate, mape, overall
from aqua_simulator.timing.fit import Fit, fit_samples
from aqua_simulator.timing.interpolation import Curve, non_negative_fit
from aqua_simulator.timing.iteration import Chunk, ScheduledBatch, from_kernels, from_operators
from aqua_simulator.timing.profiles import Samples, read_folder
from harness.profile_tables import (
    GPU,
    LINEAR_OPERATORS,
    MODEL,
    decode_ms,
    linear_ms,
    write_csv,
    write_kernel_tables,
    write_operator_tables,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Sequence[Samples]:
    folder = tmp_path_factory.mktemp("profiles")
    write_operator_tables(folder)
    return read_folder(folder)


@pytest.fixture(scope="module")
def fit(samples: Sequence[Samples]) -> Fit:
    return fit_samples(samples)


@pytest.fixture(scope="module")
def held_out(samples: Sequence[Samples]) -> Fit:
    """A quarter of each function's rows is left for its scores."""
    return fit_samples(samples, hold_out=4)


def test_a_curve_passes_through_its_means_and_goes_on_straight() -> None:
    curve = Curve.fit(np.array([1.0, 2.0, 2.0, 4.0]), np.array([1.0, 1.0, 3.0, 4.0]))
    assert curve([1.0, 2.0, 3.0]).tolist() == [1.0, 2.0, 3.0]
    assert curve(6.0) == pytest.approx(6.0)
    assert curve(0.0) == 1.0


def test_baseline_coefficients_are_never_negative() -> None:
    work = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    falling = non_negative_fit(work, np.array([3.0, 2.0, 1.0]))
    assert np.all(falling >= 0.0)
    exact = non_negative_fit(work, np.array([3.0, 5.0, 7.0]))
    assert exact == pytest.approx([1.0, 2.0])


def test_a_fit_predicts_rows_that_it_has_not_seen(
    held_out: Fit, samples: Sequence[Samples]
) -> None:
    scores = evaluate(held_out, samples)
    assert {score.level for score in scores} == {"operator", "linear", "composite"}
    # The noise of the tables is 1 %.
    assert overall(scores, "linear") < 2.0
    assert overall(scores, "composite") < 4.0
    # A quarter of each function was held out, and only these rows count.
    rows = {score.name: score.row_count for score in scores if score.level == "operator"}
    assert rows["a100/decode_attention"] == 22


def test_tables_of_one_function_are_joined(samples: Sequence[Samples]) -> None:
    key = "a100/decode_attention"
    tables = [each for each in samples if each.key == key]
    once, twice = fit_samples(tables), fit_samples([*tables, *tables])
    assert twice[key].row_count == 2 * once[key].row_count


def test_rows_that_were_fitted_on_are_not_scored(fit: Fit, samples: Sequence[Samples]) -> None:
    assert evaluate(fit, samples) == []


def test_a_wrong_fit_scores_badly(fit: Fit, tmp_path: Path) -> None:
    table = tmp_path / "vidur_a100_Meta-Llama-3-8B_mlp.csv.gz"
    columns = [f"{name}_ms" for name in LINEAR_OPERATORS]
    rows = [
        [*(1.5 * linear_ms(name, tokens, 1) for name in LINEAR_OPERATORS), tokens, 1]
        for tokens in range(1, 500)
    ]
    write_csv(table, [*columns, "num_tokens", "num_tensor_parallel_workers"], rows)
    scores = evaluate(fit, read_folder(tmp_path))
    assert overall(scores, "linear") == pytest.approx(100 / 3, abs=3.0)


def test_a_saved_fit_is_the_same_fit_and_the_same_bytes(
    held_out: Fit, samples: Sequence[Samples], tmp_path: Path
) -> None:
    first, second = tmp_path / "one.json.gz", tmp_path / "two.json.gz"
    held_out.save(first)
    Fit.load(first).save(second)
    assert first.read_bytes() == second.read_bytes()
    loaded = Fit.load(first)
    at = (16.0, 1024.0, 32.0, 8.0)
    assert loaded["a100/decode_attention"].at(*at) == pytest.approx(
        held_out["a100/decode_attention"].at(*at)
    )
    assert evaluate(loaded, samples) == evaluate(held_out, samples)


def test_an_iteration_is_layers_times_operators_and_attention(fit: Fit) -> None:
    model = DECODERS["Llama-3-8B"]
    time_of = from_operators(fit, "a100", "Meta-Llama-3-8B", model)
    batch = ScheduledBatch((), decoding_count=64, decode_context_tokens=64 * 1024, sampled_count=64)
    names = [name for name in LINEAR_OPERATORS if name != "emb"] + ["add"]
    linear = sum(linear_ms(name, 64, 1) for name in names)
    expected_ms = 32 * (linear + decode_ms(64, 1024, 32, 8))
    measured_ms = (time_of(batch) - time_of.head(64)) * 1e3
    assert measured_ms == pytest.approx(expected_ms, rel=0.03)


def test_chunks_of_a_prompt_add_up_to_the_whole(fit: Fit) -> None:
    model = DECODERS["Llama-3-8B"]
    time_of = from_operators(fit, "a100", "Meta-Llama-3-8B", model)
    whole = time_of.attention(ScheduledBatch((Chunk(4096, 0),), 0, 0, 1))
    parts = sum(
        time_of.attention(ScheduledBatch((Chunk(1024, at),), 0, 0, 0))
        for at in range(0, 4096, 1024)
    )
    assert parts == pytest.approx(whole, rel=0.1)


def test_two_gpus_pay_for_all_reduces_and_compute_less(fit: Fit) -> None:
    model = DECODERS["Llama-3-8B"]
    one = from_operators(fit, "a100", "Meta-Llama-3-8B", model)
    two = from_operators(fit, "a100", "Meta-Llama-3-8B", model, width=2)
    assert one.linear(2048) / 2 < two.linear(2048) < one.linear(2048)


def test_a_models_own_kernels_are_preferred(tmp_path: Path) -> None:
    write_kernel_tables(tmp_path)
    fit = fit_samples(read_folder(tmp_path))
    model = DECODERS["Llama-3-8B"]
    chosen = iteration_time(fit, model, GPUS["RTX4090"], 1)
    own = from_kernels(fit, GPU, MODEL, model)
    batch = ScheduledBatch((Chunk(128, 64),), 8, 8 * 1024, 9)
    assert chosen(batch) == own(batch)


def test_an_engine_gets_the_memory_that_the_weights_leave(fit: Fit) -> None:
    engine = EngineSpec("Llama-3-8B", "A100-80GB").engine(fit, name="e")
    room = 80e9 * 0.9 - 2e9 - DECODERS["Llama-3-8B"].weight_bytes
    assert engine.memory.block_count == int(room // (16 * 131072))
    with pytest.raises(ConfigError, match="no room for a KV cache"):
        EngineSpec("Llama-3-70B", "A100-80GB").engine(fit, name="e")


def test_without_profiles_times_come_from_the_data_sheet() -> None:
    engine = EngineSpec("Llama-3-8B", "A100-80GB").engine(None, name="e")
    # Vidur's table of this model and GPU: 9.1 ms for one token, 142 ms for 2,048.
    assert engine.time_of.linear(1) == pytest.approx(9.1e-3, rel=0.02)
    assert engine.time_of.linear(2048) == pytest.approx(0.142, rel=0.15)


def test_missing_functions_are_named(fit: Fit) -> None:
    with pytest.raises(ConfigError, match=r"a100/gemm.*Fitted for that device"):
        fit["a100/gemm"]


@pytest.mark.parametrize("content", ["", "{}", '{"format": 99}', "not json"])
def test_a_file_that_is_no_fit_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "fit.json"
    path.write_text(content)
    with pytest.raises(ConfigError):
        Fit.load(path)


def test_a_profile_without_its_columns_is_refused(tmp_path: Path) -> None:
    write_csv(tmp_path / "aic_a100_sxm_gemm_perf.csv", ("m", "n"), [(1, 2)])
    with pytest.raises(ConfigError, match="no column"):
        read_folder(tmp_path)


def test_a_folder_without_profiles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(ConfigError, match="no profile tables"):
        read_folder(tmp_path)


def test_mape_is_in_percent_of_the_measured() -> None:
    assert mape(np.array([1.1, 0.8]), np.array([1.0, 1.0])) == pytest.approx(15.0)
