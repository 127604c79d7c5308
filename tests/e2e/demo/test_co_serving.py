"""`aqua-demo co-serving --quick` on a real vLLM, as a user runs it: `make test-demos`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN_LIMIT_S = 3600

pytestmark = [pytest.mark.engine, pytest.mark.timeout(2 * RUN_LIMIT_S)]


def test_the_quick_demo_holds_its_claims_and_leaves_report_and_plot(tmp_path: Path) -> None:
    program = Path(sys.executable).with_name("aqua-demo")
    done = subprocess.run(
        [program, "co-serving", "--quick", "--json", "--output-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == json.loads((tmp_path / "demo-report.json").read_text())
    assert all(claim["holds"] for claim in report["claims"])
    assert report["compared_answers"] == report["online_requests"] + report["offline_requests"]
    assert (tmp_path / "demo-plot.png").stat().st_size > 10_000
