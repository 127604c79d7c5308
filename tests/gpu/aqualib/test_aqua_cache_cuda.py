"""AquaCache and the step-loop producer on a real GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aqua_protocol import GIB, MIB, TransportKind, TransportUnavailableError
from aqualib.engines.torch_loop import CudaMemoryLimit
from aqualib.transports import select

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module", params=[TransportKind.CUDA_VMM, TransportKind.CUDA_IPC], ids=str)
def kind(request: pytest.FixtureRequest) -> TransportKind:
    kind: TransportKind = request.param
    try:
        select(kind)
    except TransportUnavailableError as refusal:
        pytest.skip(str(refusal))
    return kind


@pytest.fixture
def allowance() -> Iterator[CudaMemoryLimit]:
    device = torch.device("cuda", torch.cuda.current_device())
    yield CudaMemoryLimit(device, headroom_bytes=256 * MIB)
    torch.cuda.set_per_process_memory_fraction(1.0, device)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_equal_those_of_a_cache_that_keeps_everything(
    kind: TransportKind, dtype: torch.dtype
) -> None:
    transformers = pytest.importorskip("transformers")
    import aqualib
    from aqualib.engines.transformers import AquaCache
    from harness.tiny_models import llama, prompt

    model = llama(hidden_size=256).to("cuda", dtype)
    inputs = {name: tensor.cuda() for name, tensor in prompt(2, 700).items()}

    def generate(cache: object) -> tuple[torch.Tensor, torch.Tensor]:
        output = model.generate(
            **inputs,
            past_key_values=cache,
            max_new_tokens=60,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return output.sequences, torch.stack(output.logits)

    expected = generate(transformers.DynamicCache(config=model.config))
    with (
        aqualib.connect(
            is_offline=True, transport=kind, slab_bytes=2 * MIB, host_bytes=256 * MIB, checksum=True
        ) as aqua,
        AquaCache(model.config, max_tokens=760, resident_layers=2, aqua=aqua) as cache,
    ):
        before = torch.cuda.memory_allocated()
        found = generate(cache)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
        assert cache.statistics.paged_in_bytes > cache.statistics.paged_out_bytes > 0
        # What torch has allocated for longer than a step: the cache, and the results above.
        results = sum(tensor.nbytes for tensor in found)
        held = torch.cuda.memory_allocated() - before - results
        assert held <= cache.statistics.peak_resident_bytes + 4 * MIB


def test_what_the_recent_steps_did_not_need_can_be_lent(allowance: CudaMemoryLimit) -> None:
    workspace = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    del workspace
    allowance.step_ended()
    assert allowance.used_bytes >= 512 * MIB
    given = allowance.shrink(allowance.total_bytes)
    free, _ = torch.cuda.mem_get_info()
    assert 0 < given <= free
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(int(1.5 * GIB), dtype=torch.uint8, device="cuda")
    # The recent peak still fits, and all of it once memory is back.
    torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    allowance.grow(given)
    torch.empty(int(1.5 * GIB), dtype=torch.uint8, device="cuda")


def test_the_demo_runs_on_gpus(kind: TransportKind, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("aqua_coordinator")
    program = Path(sys.executable).with_name("aqua-demo")
    if not program.exists():
        pytest.skip("aqua-demo is not installed here")
    done = subprocess.run(
        [program, "--quick", "--checksum", "--transport", kind.value, "--output-dir", tmp_path],
        capture_output=True,
        text=True,
        check=False,
        timeout=350,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "demo-report.json").read_text())
    assert report["transport"] == kind.value
    assert report["logits_identical"] is True
