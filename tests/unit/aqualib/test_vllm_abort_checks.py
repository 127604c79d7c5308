"""An engine that cannot abort a step says what it lacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aqualib.engines.vllm.options import read_options
from aqualib.engines.vllm.scheduling import abort_checks
from aqualib.engines.vllm.scheduling.abort_checks import why_not_abortable

SERVING: dict[str, Any] = {"ttft_s": 1.0, "tpot_s": 0.1}


def graphs(mixed: str) -> Any:  # noqa: ANN401 - as much of vLLM's as is read
    return SimpleNamespace(mixed_mode=lambda: SimpleNamespace(name=mixed))


def engine(**changed: Any) -> Any:  # noqa: ANN401 - as much of vLLM's as is read
    given = {
        "connector": "AquaConnector",
        "graphs": None,
        "is_moe": False,
        "runner_type": "generate",
        "use_v2_model_runner": False,
        "data_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "nnodes": 1,
        "distributed_executor_backend": "uni",
        "enable_eplb": False,
        "use_ubatching": False,
        **changed,
    }
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector=given["connector"]),
        compilation_config=SimpleNamespace(cudagraph_mode=given["graphs"]),
        model_config=SimpleNamespace(is_moe=given["is_moe"], runner_type=given["runner_type"]),
        parallel_config=SimpleNamespace(**given),
        use_v2_model_runner=given["use_v2_model_runner"],
    )


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(abort_checks, "runs_in_callers_process", lambda: False)


def why_not(
    engine: Any,  # noqa: ANN401 - as above
    *,
    worker_aborts: bool = True,
    **co_serving: object,
) -> str | None:
    options = read_options({"co_serving": {**SERVING, **co_serving}})
    return why_not_abortable(engine, options, worker_aborts=worker_aborts)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"distributed_executor_backend": "mp"},
        {"graphs": graphs("PIECEWISE")},
        {"graphs": graphs("NONE")},
        {"data_parallel_size": 2},
        {"is_moe": True},
    ],
)
def test_steps_of_an_engine_on_one_machine_can_be_aborted(changed: dict[str, Any]) -> None:
    assert why_not(engine(**changed)) is None


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"connector": "MultiConnector"}, "AquaConnector"),
        ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER=0"),
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"nnodes": 2}, "one machine"),
        ({"distributed_executor_backend": "ray"}, "one machine"),
        ({"data_parallel_size": 2, "is_moe": True}, "experts"),
        ({"enable_eplb": True}, "--enable-eplb"),
        ({"use_ubatching": True}, "--enable-dbo"),
        ({"graphs": graphs("FULL")}, "full CUDA graphs"),
        ({"runner_type": "pooling"}, "pooling"),
    ],
)
def test_an_engine_says_what_keeps_its_steps_from_being_aborted(
    changed: dict[str, Any], named: str
) -> None:
    reason = why_not(engine(**changed))
    assert reason is not None
    assert named in reason


def test_options_and_the_worker_decide_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "layer_aborts" in str(why_not(engine(), layer_aborts=False))
    assert "aborts nothing" in str(why_not(engine(), policy="priority"))
    assert "--worker-cls" in str(why_not(engine(), worker_aborts=False))
    monkeypatch.undo()
    assert "caller's process" in str(why_not(engine()))
