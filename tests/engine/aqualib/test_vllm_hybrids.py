"""Models whose layers keep windows, latents or states, under Aqua: a stock vLLM (CPU build).

Outputs are those of an engine that was never preempted, and change when what is loaded is zeroed.
`test_vllm_interleavings` draws histories of the same groups by seed; here the kernels and the
layouts are real.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from aqua_protocol import MIB
from harness.tiny_hybrids import write_tiny_hybrid
from harness.vllm_program import Scenario, run

pytestmark = [
    pytest.mark.timeout(900),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]

ROOM: Final[dict[str, Any]] = {
    "policy": "cfs",
    "slice_iterations": 4,
    "store_bytes": "32MiB",
    "is_offline": True,
}
ENVIRONMENT: Final = {"AQUA_SLAB_BYTES": str(MIB), "AQUA_CHECKSUM": "1"}


ENGINES: Final[dict[str, dict[str, Any]]] = {
    "gemma-3": {"num_gpu_blocks_override": 56},
    "gpt-oss": {"num_gpu_blocks_override": 36},
    "mistral": {"num_gpu_blocks_override": 18},
    "deepseek-v2": {
        "num_gpu_blocks_override": 48,
        # The other one for CPUs, which those with AMX get, takes no float32.
        "attention_config": {"backend": "CPU_MLA"},
        # With vLLM's operator for CPUs, answers of latent attention hang on what shares the step.
        "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    },
    "mistral in fp8": {"num_gpu_blocks_override": 18, "kv_cache_dtype": "fp8"},
    "granite-4": {"num_gpu_blocks_override": 20},
}
SHARING: Final = [family for family in ENGINES if family != "granite-4"]
"""Those whose requests can share prefixes; a state is of one request."""


class Stock(NamedTuple):
    scenario: Scenario
    tokens: dict[str, list[int]]


@pytest.fixture(scope="module", params=ENGINES)
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """What vLLM answers by itself for a model of the family."""
    folder: Path = tmp_path_factory.mktemp(request.param)
    family, _, fp8 = request.param.partition(" in ")
    if fp8 and "avx512f" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("vLLM has fp8 on a CPU with AVX-512 alone")
    model = str(write_tiny_hybrid(folder, family))
    scenario = Scenario(model, engine=ENGINES[request.param])
    tokens: dict[str, list[int]] = run(scenario)["tokens"]
    outputs = [tuple(each) for each in tokens.values()]
    assert len(set(outputs)) == len(outputs), "degenerate outputs would prove nothing"
    return Stock(scenario, tokens)


def paged(stock: Stock, aqua: dict[str, Any], **changed: Any) -> dict[str, Any]:  # noqa: ANN401
    scenario = dataclasses.replace(stock.scenario, aqua={**ROOM, **aqua}, **changed)
    answer = run(scenario, **ENVIRONMENT)
    assert answer["forced"] >= 10, answer
    assert answer["paging"]["restored_tokens"] > 300, answer
    assert answer["held_places"] == 0, answer
    return answer


def test_preempted_requests_answer_as_if_never_preempted(stock: Stock) -> None:
    # All that is in the store is spoiled on the way: what is lost is computed again.
    answer = paged(stock, {}, overlaps_steps=True, spoil_at_step=60)
    assert answer["tokens"] == stock.tokens
    assert answer["paging"]["lost_blocks"] > 0


def test_zeroed_loads_change_the_answers(stock: Stock) -> None:
    answer = paged(stock, {}, zeroes_loads=True)
    same = sum(answer["tokens"][name] == tokens for name, tokens in stock.tokens.items())
    assert same <= len(stock.tokens) // 4, f"{same} outputs do not depend on loads"


@pytest.mark.parametrize("stock", SHARING, indirect=True)
def test_prefixes_of_finished_requests_are_loaded_by_later_ones(stock: Stock) -> None:
    answer = run(
        dataclasses.replace(
            stock.scenario, aqua={**ROOM, "prefix_tier": True}, rounds=2, output_tokens=40
        ),
        **ENVIRONMENT,
    )
    first = {name: tokens[:40] for name, tokens in stock.tokens.items()}
    assert {name: answer["tokens"][name] for name in first} == first
    again = {name.replace("0-", "1-", 1): tokens for name, tokens in first.items()}
    assert {name: answer["tokens"][name] for name in again} == again
    assert answer["paging"]["prefix_hit_tokens"] > 0
