"""`aqua sim whatif` as a user runs it, on the example of its how-to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from harness.bounds import HANG_S
from harness.source_tree import ROOT

EXAMPLE: Final = ROOT / "docs" / "examples" / "whatif"
QUICK: Final = ("--hours", "0.1112", "--seeds", "0", "--samples", "1", "--sample-s", "5")


def whatif(*arguments: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the command and check how it ended."""
    command = [str(Path(sys.executable).with_name("aqua-sim")), "whatif", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == code, done.stderr or done.stdout
    return done


def test_the_example_prints_errors_first_and_writes_its_report(tmp_path: Path) -> None:
    arguments = (
        EXAMPLE / "trace.csv",
        *("--cluster", EXAMPLE / "cluster.yaml", *QUICK, "--no-sensitivity"),
        *("--processes", "2", "--html", tmp_path / "report.html"),
    )
    text = whatif(*arguments).stdout
    assert text.index("off the recording") < text.index("What Aqua would bring")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_what_is_missing_is_said() -> None:
    assert "--cluster" in whatif(EXAMPLE / "trace.csv", code=2).stderr
    assert "traces" in whatif("--cluster", EXAMPLE / "cluster.yaml", code=2).stderr
