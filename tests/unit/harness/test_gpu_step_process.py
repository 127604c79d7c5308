"""Steps of `make gpu` as processes: what is left of one that is ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.bounds import until

ROOT = Path(__file__).resolve().parents[3]


def test_a_test_that_a_step_was_ended_in_is_named_in_its_log(tmp_path: Path) -> None:
    tests, log = tmp_path / "test_end.py", tmp_path / "log"
    tests.write_text(
        "import threading, pytest\n"
        "@pytest.mark.gpu\n"
        "def test_too_long():\n"
        "    threading.Event().wait()\n"
    )
    step = f"Step('x', '', 'pytest --rootdir {tmp_path} {tests}', 1)"
    code = f"from harness.gpu.step import Step, by_pytest; by_pytest({step}, stands_in=False)"
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    with (
        log.open("w") as lines,
        subprocess.Popen(
            [sys.executable, "-c", code], stderr=lines, env=environment, start_new_session=True
        ) as running,
    ):
        try:
            until(lambda: "test_too_long" in log.read_text(), "named")
        finally:
            os.killpg(running.pid, signal.SIGKILL)


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """Children heed SIGHUP, also where `nohup` runs the suite: they inherit what is ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
@pytest.mark.usefixtures("hangs_up")
def test_a_lost_connection_ends_the_step_as_well(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "harness.gpu", "--stand-in", "--only", "pinning"]
    with subprocess.Popen(
        [*command, "--records", str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "tests")},
    ) as running:
        assert running.stderr is not None
        assert "[1/1] pinning" in running.stderr.readline()
        running.send_signal(signal.SIGHUP)
        assert running.wait() == 1
