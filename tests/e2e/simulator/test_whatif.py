"""`aqua sim whatif` as a user runs it, on the example of its how-to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from aqua_simulator.cli import app
from harness.command import run_here
from harness.source_tree import ROOT

EXAMPLE: Final = ROOT / "docs" / "examples" / "whatif"
RUN_LIMIT_S: Final = 900
"""Kernels are compiled where none are cached: half a minute of a processor."""
QUICK: Final = ("--hours", "0.1112", "--seeds", "0", "--samples", "1", "--sample-s", "5")


pytestmark = pytest.mark.timeout(2 * RUN_LIMIT_S)


def test_the_example_prints_errors_first_and_writes_its_report(tmp_path: Path) -> None:
    arguments = (
        EXAMPLE / "trace.csv",
        *("--cluster", EXAMPLE / "cluster.yaml", *QUICK, "--no-sensitivity"),
        *("--processes", "2", "--html", tmp_path / "report.html"),
    )
    command = [str(Path(sys.executable).with_name("aqua-sim")), "whatif", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr or done.stdout
    text = done.stdout
    assert text.index("off the recording") < text.index("What Aqua would bring")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_what_is_missing_is_said() -> None:
    for given, missing in (
        ((EXAMPLE / "trace.csv",), "--cluster"),
        (("--cluster", EXAMPLE / "cluster.yaml"), "traces"),
    ):
        done = run_here(app, "aqua-sim", "whatif", *given)
        assert done.returncode == 2
        assert missing in done.stderr
