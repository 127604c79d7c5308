"""`aqua-profile` as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aqua_profiler.report.files import write_profile
from aqua_protocol.profile import ModelProfile, ProfileLabel
from harness.bounds import HANG_S
from harness.closed_pipe import into_closed_pipe

COMMAND = [sys.executable, "-c", "from aqua_profiler.cli import entry; entry()"]


@pytest.mark.parametrize("form", ["text", "json", "placer", "kubernetes"])
def test_a_reader_that_has_left_ends_the_command_without_a_trace(tmp_path: Path, form: str) -> None:
    path = tmp_path / "profile.json"
    write_profile(
        ModelProfile(
            model="llama",
            label=ProfileLabel.CONSUMER,
            needed_bytes=15 * 10**9,
            hbm_bytes=80 * 10**9,
        ),
        path,
    )
    command = [*COMMAND, "show", str(path), "--format", form]
    assert subprocess.run(command, check=True, capture_output=True, timeout=HANG_S).stdout
    done = into_closed_pipe(command, 100)
    assert (done.returncode, done.stderr) == (1, "")
