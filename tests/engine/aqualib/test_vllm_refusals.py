"""What vLLM under Aqua cannot do is refused when it starts, and the refusal says what to do."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from vllm.v1.core.sched.scheduler import Scheduler

from aqua_protocol import ConfigError
from aqualib.engines.vllm import AquaScheduler, LendingScheduler, LendingWorker
from aqualib.engines.vllm.contract import check
from aqualib.engines.vllm.contract.versions import MINORS, TRY_CONTRACT, WARNED_MINORS
from aqualib.engines.vllm.lending import scheduler
from aqualib.engines.vllm.lending.memory import HostKvMemory, lendable_cache
from aqualib.transports.host_pages import PAGE_BYTES

# vLLM and torch warn about themselves and each other; not ours to mend.
pytestmark = pytest.mark.filterwarnings("default")

BLOCKS = 4


def config(*, enable_sleep_mode: bool = False) -> Any:  # noqa: ANN401 - as much of vLLM's as is read
    return SimpleNamespace(
        instance_id="engine",
        kv_transfer_config=None,
        additional_config={"aqua": {"lend": {}}},
        scheduler_config=SimpleNamespace(async_scheduling=False),
        model_config=SimpleNamespace(
            model="tiny", served_model_name=None, enable_sleep_mode=enable_sleep_mode
        ),
        parallel_config=SimpleNamespace(world_size=1, data_parallel_index=0),
    )


@pytest.fixture
def unmade(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler without vLLM's own part: only what is looked for afterwards."""
    monkeypatch.setattr(Scheduler, "__init__", lambda *_, **__: None)


def refusal(engine: Any) -> str:  # noqa: ANN401 - a call that refuses
    with pytest.raises(ConfigError) as found:
        engine()
    assert found.value.remedy, "nobody is told what to do"
    return f"{found.value.message} | {found.value.remedy}"


@pytest.mark.usefixtures("unmade")
@pytest.mark.parametrize("kind", [AquaScheduler, LendingScheduler])
def test_a_version_that_nobody_has_tried(
    kind: type[LendingScheduler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    said = refusal(lambda: kind(config()))
    assert "vLLM 0.34.0 is not supported" in said
    assert (
        f"Install vLLM {', '.join(MINORS)} (or, with a warning, {', '.join(WARNED_MINORS)})" in said
    )


def sources_of_vllm(place: Path) -> Path:
    """Links to the Python files of the installed vLLM, in a folder of their own."""

    def others(folder: str, names: list[str]) -> set[str]:
        files = {name for name in names if Path(folder, name).is_file()}
        return {name for name in files if not name.endswith(".py")}

    here = Path(vllm.__file__).parent
    shutil.copytree(here, place / "vllm", copy_function=os.symlink, ignore=others)
    return place


@pytest.mark.usefixtures("unmade")
@pytest.mark.parametrize(("kind", "aqua"), [(AquaScheduler, {}), (LendingScheduler, {"lend": {}})])
def test_a_build_that_reads_differently_is_said_by_name_and_not_refused(
    kind: type[LendingScheduler],
    aqua: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    given = config()
    given.additional_config = {"aqua": aqua}
    same, changed = (sources_of_vllm(tmp_path / name) for name in ("same", "changed"))
    source = changed / "vllm/v1/core/sched/scheduler.py"
    text = source.read_text()
    source.unlink()
    source.write_text(
        re.sub(r"(\n    def schedule\(.*?\) -> \w+:\n)", r"\1        pass\n", text, flags=re.DOTALL)
    )
    for place, is_said in ((same, False), (changed, True)):
        monkeypatch.setattr(check, "installed_place", lambda place=place: place)
        # Refused is what `unmade` took away.
        assert "this build of vLLM has no" in refusal(lambda: kind(given))
        assert ("reads differently" in caplog.text) == is_said, caplog.text
    assert f"Aqua knows: Scheduler.schedule. After a look at it, `{TRY_CONTRACT}`" in caplog.text


@pytest.mark.usefixtures("unmade")
def test_a_build_that_has_renamed_what_lending_uses() -> None:
    said = refusal(lambda: LendingScheduler(config()))
    assert "BlockPool.evict_blocks" in said
    assert 'Run without "lend"' in said


def test_a_cache_in_another_process_or_made_by_another_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AQUA_SOCKET_DIR", str(tmp_path))
    said = refusal(scheduler.ranks_of(config(), None).__enter__)
    assert "no worker of rank 0 is here" in said
    assert "--worker-cls aqualib.engines.vllm.LendingWorker" in said


def test_sleep_mode() -> None:
    worker: Any = SimpleNamespace(vllm_config=config(enable_sleep_mode=True))
    said = refusal(lambda: LendingWorker.initialize_from_config(worker, None))
    assert "without --enable-sleep-mode" in said


def test_a_cache_that_lies_elsewhere() -> None:
    memory = HostKvMemory(PAGE_BYTES)
    ours = memory.allocate(BLOCKS * PAGE_BYTES).view(BLOCKS, -1)
    assert lendable_cache(memory, [ours], BLOCKS).block_bytes == PAGE_BYTES
    said = refusal(lambda: lendable_cache(memory, [ours, torch.zeros_like(ours)], BLOCKS))
    assert "1 of 2 parts of the KV cache" in said
    assert 'Run without "lend"' in said
    memory.close()


def test_a_cache_with_gaps_between_its_blocks() -> None:
    memory = HostKvMemory(PAGE_BYTES)
    both = memory.allocate(BLOCKS * 2 * PAGE_BYTES).view(BLOCKS, 2, PAGE_BYTES)
    assert lendable_cache(memory, [both[:, 1], both[:, 0]], BLOCKS).block_bytes == 2 * PAGE_BYTES
    assert "between the blocks" in refusal(lambda: lendable_cache(memory, [both[:, 0]], BLOCKS))
    memory.close()
