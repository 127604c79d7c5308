"""`aqua-profile steps` on a real vLLM: its own steps, recorded, fitted, found again by its key."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from aqua_schedulers.conserve import StepTimeKey, find_profile
from harness.tiny_llama import write_tiny_llama
from harness.vllm_server import vllm_server

pytestmark = [
    pytest.mark.timeout(900),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]

ROOT: Final = Path(__file__).resolve().parents[3]
TOKEN: Final = "operator-of-this-engine"
FLAGS: Final = (
    *("--scheduler-cls", "aqualib.engines.vllm.AquaScheduler"),
    *("--middleware", "aqualib.engines.vllm.AquaMiddleware"),
    *("--max-num-seqs", "16"),
)


def profile(folder: Path, url: str, *options: str) -> tuple[int, dict[str, Any]]:
    """What a user types; this environment has the profiler's source alone."""
    source = str(ROOT / "profiler/src")
    command = [sys.executable, "-c", "from aqua_profiler.cli import entry; entry()", "steps"]
    command += ["--endpoint", url, "--folder", str(folder), "--json", *options]
    environment = {**os.environ, "PYTHONPATH": source, "AQUA_ADMIN_TOKEN": TOKEN}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode in {0, 1}, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def test_a_real_engine_measures_its_own_steps_and_finds_the_profile_again(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "tiny-llama")
    folder = tmp_path / "profiles"
    with vllm_server(model, tmp_path / "log", *FLAGS, AQUA_ADMIN_TOKEN=TOKEN) as client:
        code, begun = profile(folder, str(client.base_url), "--budget-s", "1")
        assert (code, begun["partial"]) == (1, True)
        (journal,) = folder.iterdir()
        assert len(journal.read_text().splitlines()) == 1 + begun["done"]
        code, found = profile(folder, str(client.base_url), "--plot", str(tmp_path / "steps.png"))
        assert code == 0
        answer = client.get("/aqua/steps", headers={"Authorization": f"Bearer {TOKEN}"}).json()
    (engine,) = answer["engines"]
    assert engine["recording"] is False
    key = StepTimeKey(engine["model"], engine["engine"], engine["gpu"])
    kept = find_profile(folder, key)
    assert kept.relative_error == found["relative_error"]
    assert list(folder.iterdir()) == [folder / key.file_name], "the journal has done its work"
    assert kept.max_tokens == 256, "the largest step that this engine makes"
    assert found["loads"] > 20
    assert (tmp_path / "steps.png").stat().st_size > 10_000
