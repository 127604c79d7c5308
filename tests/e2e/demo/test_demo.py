"""`aqua-demo`, as a user runs it: the story, the report, the negative controls, and the exits."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from aqua_demo.cli import app
from harness.bounds import HANG_S
from harness.command import run_here

RUN_LIMIT_S = 900
END_LIMIT_S = HANG_S

pytestmark = pytest.mark.timeout(2 * RUN_LIMIT_S)

DEMO = [str(Path(sys.executable).with_name("aqua-demo")), "--quick", "--transport", "memfd"]


@dataclass(frozen=True)
class Finished:
    """A run that came to its end by itself."""

    status: int
    stdout: str
    stderr: str
    directory: Path
    scratch: Path

    @property
    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.directory / "demo-report.json").read_text())
        return report


def _run(directory: Path, *options: str) -> Finished:
    scratch = directory / "tmp"
    scratch.mkdir(parents=True)
    done = subprocess.run(
        [*DEMO, "--output-dir", str(directory), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_LIMIT_S,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    return Finished(done.returncode, done.stdout, done.stderr, directory, scratch)


def _left_in(scratch: Path) -> list[Path]:
    """Ours; torch keeps a cache directory there."""
    return list(scratch.glob("aqua-*"))


@pytest.fixture(scope="module")
def short_directory() -> Iterator[Path]:
    """A path short enough for the Unix sockets below it."""
    with tempfile.TemporaryDirectory(prefix="aqua-e2e-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def finished(short_directory: Path) -> Finished:
    finished = _run(short_directory / "good", "--json")
    assert finished.status == 0, finished.stderr
    return finished


def test_every_claim_of_the_story_holds(finished: Finished) -> None:
    report = finished.report
    assert all(claim["holds"] for claim in report["claims"]), report["claims"]
    assert report["tokens_identical"] is True
    assert report["logits_identical"] is True
    assert report["tokens"] > 150
    assert report["transport"] == "memfd"
    assert report["link_gb_per_s"] > 0


def test_memory_really_went_out_and_came_back(finished: Finished) -> None:
    report = finished.report
    assert report["paged_out_bytes"] > 0
    assert report["paged_in_bytes"] > report["paged_out_bytes"]
    assert report["spilled_bytes_peak"] > 0
    assert report["returned_bytes"] > 0
    assert report["peak_resident_bytes"] <= report["budget_bytes"] < report["kv_bytes"]
    assert report["reclaims"]
    for reclaim in report["reclaims"]:
        assert set(reclaim) == {"bytes", "first_slab_ms", "total_ms"}
        assert reclaim["bytes"] > 0
        assert 0 < reclaim["first_slab_ms"] <= reclaim["total_ms"]


def test_the_timeline_shows_pages_at_the_peer_then_in_host_memory_then_at_the_peer(
    finished: Finished,
) -> None:
    report, timeline = finished.report, finished.report["timeline"]
    phases = {phase["name"]: phase for phase in report["phases"]}
    assert list(phases) == ["start", "prefill", "harvest", "burst", "calm", "again", "verify"]
    lengths = {len(timeline[name]) for name in ("at_s", "tokens", "peer_bytes", "host_bytes")}
    assert len(lengths) == 1

    def at_end_of(phase: str) -> tuple[int, int]:
        until_s = phases[phase]["until_s"]
        last = max(i for i, at_s in enumerate(timeline["at_s"]) if at_s <= until_s)
        return timeline["peer_bytes"][last], timeline["host_bytes"][last]

    for phase in ("harvest", "again"):
        peer, host = at_end_of(phase)
        assert peer > host, phase
    peer, host = at_end_of("burst")
    assert host > peer


def test_json_goes_to_standard_output_alone(finished: Finished) -> None:
    printed = json.loads(finished.stdout)
    report = finished.report
    del report["timeline"]
    assert printed == report
    assert finished.stderr == ""


def test_the_plot_and_the_logs_are_there_and_nothing_else_is_left(finished: Finished) -> None:
    assert (finished.directory / "demo-plot.png").read_bytes().startswith(b"\x89PNG")
    logs = {path.name for path in (finished.directory / "demo-logs").iterdir()}
    assert logs == {"coordinator.log", "producer.log", "consumer.log", "reference.log"}
    assert _left_in(finished.scratch) == []


def test_one_changed_byte_is_noticed_by_the_comparison(short_directory: Path) -> None:
    finished = _run(short_directory / "corrupt", "--corrupt-one-byte")
    assert finished.status == 1
    assert "one stored byte has been changed" in finished.stderr
    assert "not so: so do all logits, bit for bit" in finished.stderr
    assert finished.report["logits_identical"] is False
    assert _left_in(finished.scratch) == []


def test_one_changed_byte_is_noticed_by_the_checksum(short_directory: Path) -> None:
    finished = _run(short_directory / "checked", "--corrupt-one-byte", "--checksum")
    assert finished.status == 1
    assert "not what was stored" in finished.stderr
    assert not (finished.directory / "demo-report.json").exists()
    assert _left_in(finished.scratch) == []


@contextmanager
def _running(directory: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A demo in the middle of its story, and all processes that belong to it."""
    scratch = directory / "tmp"
    scratch.mkdir(parents=True)
    with subprocess.Popen(
        [*DEMO, "--output-dir", str(directory)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    ) as demo:
        assert demo.stderr is not None
        family: list[psutil.Process] = []
        try:
            said = []
            for line in demo.stderr:
                said.append(line)
                if "consumer: borrows" in line:
                    break
            else:
                pytest.fail("the demo ended early:\n" + "".join(said))
            family = psutil.Process(demo.pid).children(recursive=True)
            # The coordinator and its Valkey, the producer and the consumer.
            assert len(family) >= 4, family
            yield demo, family
        finally:
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            demo.kill()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Children take Ctrl-C, also where a shell runs us in the background and has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def own_signals() -> Iterator[None]:
    """This process takes signals as before, whatever the command that it runs has done."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_run_leaves_nothing_behind(short_directory: Path) -> None:
    directory = short_directory / "interrupted"
    with _running(directory) as (demo, family):
        demo.send_signal(signal.SIGINT)
        _, stderr = demo.communicate(timeout=END_LIMIT_S)
        assert demo.returncode == 130
        assert "everything is stopped\naqua-demo: interrupted" in stderr
        _, alive = psutil.wait_procs(family, timeout=END_LIMIT_S)
        assert alive == []
    assert _left_in(directory / "tmp") == []


def test_a_killed_run_leaves_no_process_behind(short_directory: Path) -> None:
    with _running(short_directory / "killed") as (demo, family):
        demo.kill()
        demo.wait(END_LIMIT_S)
        _, alive = psutil.wait_procs(family, timeout=END_LIMIT_S)
        assert alive == []


@pytest.mark.usefixtures("own_signals")
def test_a_transport_that_cannot_work_here_is_refused_with_a_way_out(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("it can work here")
    options = ("--quick", "--transport", "cuda_vmm", "--output-dir", tmp_path)
    done = run_here(app, "aqua-demo", *options)
    assert done.returncode == 3
    assert "cuda_vmm needs" in done.stderr
    assert "memfd" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("own_signals")
def test_a_directory_that_cannot_be_written_is_refused_with_a_way_out() -> None:
    done = run_here(app, "aqua-demo", *DEMO[1:], "--output-dir", "/proc/nowhere")
    assert done.returncode == 2
    assert "/proc/nowhere" in done.stderr
    assert "Check the path" in done.stderr
