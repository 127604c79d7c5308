"""The demos that need a real vLLM in their quick form, as a user runs them: `make test-demos`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN_LIMIT_S = 3600

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2 * RUN_LIMIT_S)]


def quick_report(command: str, folder: Path) -> dict[str, Any]:
    """The report of a demo that held its claims, which left a plot beside it."""
    program = Path(sys.executable).with_name("aqua-demo")
    done = subprocess.run(
        [program, command, "--quick", "--json", "--output-dir", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report == json.loads((folder / "demo-report.json").read_text())
    assert all(claim["holds"] for claim in report["claims"])
    assert (folder / "demo-plot.png").stat().st_size > 10_000
    return report


def test_the_quick_co_serving_demo_holds_its_claims(tmp_path: Path) -> None:
    report = quick_report("co-serving", tmp_path)
    assert report["compared_answers"] == report["online_requests"] + report["offline_requests"]


def test_the_quick_batch_demo_holds_its_claims(tmp_path: Path) -> None:
    report = quick_report("batch", tmp_path)
    asked = (tmp_path / "demo-logs/offline.jsonl").read_text().splitlines()
    assert report["offline_requests"] == len(asked)
    assert report["figures"]["dispatcher_held"] > 0
    assert report["figures"]["engine_held"] > 0
