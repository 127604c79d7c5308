"""The demo leaves no process behind, however it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from aqua_demo.messages import Command, ConsumerSample, Failure, LogLine
from aqua_demo.processes import Child, DemoError, ProcessGroup
from harness.bounds import HANG_S

END_LIMIT_S = HANG_S
READY = "import sys, time; print('ready', file=sys.stderr, flush=True); time.sleep(600)"


@contextmanager
def _pidfd(pid: int) -> Iterator[int]:
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)


def _has_ended(pidfd: int) -> bool:
    readable, _, _ = select.select([pidfd], [], [], END_LIMIT_S)
    return bool(readable)


def _wait_for_line(child: Child, text: str) -> None:
    """Wait until the child has logged `text`."""
    for _ in range(600):
        if text in child.log.read_text():
            return
        assert child.wait(0.05) is None, child.log_tail()
    pytest.fail(f"{child.name} never said {text!r}: {child.log_tail()}")


def test_a_process_ends_when_its_parent_is_killed() -> None:
    parent_code = textwrap.dedent(
        """
        import os, subprocess, sys, time
        command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
        child = subprocess.Popen(
            [sys.executable, "-m", "aqua_demo.parent_death", str(os.getpid()), *command],
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        child.stdout.readline()
        print(child.pid, flush=True)
        time.sleep(600)
        """
    )
    with subprocess.Popen([sys.executable, "-c", parent_code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        try:
            with _pidfd(child_pid) as pidfd:
                parent.kill()
                assert _has_ended(pidfd)
        finally:
            with suppress(ProcessLookupError):
                os.kill(child_pid, signal.SIGKILL)


def test_nothing_runs_for_a_parent_that_is_gone_already() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "aqua_demo.parent_death", "1", sys.executable, "-c", "print('ran')"],
        capture_output=True,
        check=False,
        timeout=END_LIMIT_S,
    )
    assert done.returncode == 1
    assert done.stdout == b""


def test_leaving_the_crew_ends_every_child_and_what_it_started(tmp_path: Path) -> None:
    grandparent = textwrap.dedent(
        f"""
        import subprocess, sys, time
        subprocess.Popen([sys.executable, "-c", {READY!r}])
        time.sleep(600)
        """
    )
    with ProcessGroup(tmp_path) as group:
        child = group.start_service("service", [sys.executable, "-c", grandparent], {})
        _wait_for_line(child, "ready")
        family = [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]
        assert len(family) == 2
    _, alive = psutil.wait_procs(family, timeout=END_LIMIT_S)
    assert alive == []


def test_a_child_that_will_not_stop_is_killed(tmp_path: Path) -> None:
    stubborn = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {READY}"
    with ProcessGroup(tmp_path, patience_s=0.1) as group:
        child = group.start_service("stubborn", [sys.executable, "-c", stubborn], {})
        _wait_for_line(child, "ready")
    assert child.exit_status == -signal.SIGKILL


def test_a_service_that_ends_early_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with ProcessGroup(tmp_path) as group:
        child = group.start_service(
            "service", [sys.executable, "-c", "raise SystemExit('no such luck')"], {}
        )
        assert child.wait(END_LIMIT_S) == 1
        with pytest.raises(DemoError, match="no such luck"):
            group.require_services()


def test_settings_of_the_user_do_not_reach_the_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AQUA_REDIS_URL", "redis://elsewhere")
    show = "import os; print(sorted(name for name in os.environ if name.startswith('AQUA_')))"
    with ProcessGroup(tmp_path) as group:
        child = group.start_service("service", [sys.executable, "-c", show], {"AQUA_OURS": "1"})
        assert child.wait(END_LIMIT_S) == 0
        assert child.log.read_text().strip() == "['AQUA_OURS']"


def _talker(code: str) -> str:
    """A program that speaks the demo's language; `Parent` is `p` in its code."""
    return textwrap.dedent(
        """
        import os
        from aqua_protocol import ConfigError
        from aqua_demo.child import Parent
        with Parent(os.getppid()) as p:
        """
    ) + textwrap.indent(textwrap.dedent(code), "    ")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[ProcessGroup]:
    with ProcessGroup(tmp_path) as group:
        yield group


def _start(group: ProcessGroup, tmp_path: Path, code: str) -> Child:
    return Child(
        "talker",
        [sys.executable, "-c", _talker(code)],
        log=tmp_path / "talker.log",
        environment={},
        heard=group.heard,
    )


def test_a_child_says_what_it_means_even_when_a_library_prints(
    group: ProcessGroup, tmp_path: Path
) -> None:
    child = _start(group, tmp_path, "print('noise'); p.news('hello'); p.finished.wait()")
    with closing(_Stopped(child)):
        heard = group.heard.get(timeout=END_LIMIT_S)
        assert (heard.name, heard.report) == ("talker", LogLine(text="hello"))
        child.send(Command(finish=True))
        assert group.heard.get(timeout=END_LIMIT_S).report is None
        assert child.wait(END_LIMIT_S) == 0
        assert "noise" in child.log.read_text()


def test_an_expected_failure_of_a_child_arrives_as_its_error(
    group: ProcessGroup, tmp_path: Path
) -> None:
    child = _start(group, tmp_path, "raise ConfigError('wrong knob', remedy='Turn it.')")
    with closing(_Stopped(child)):
        report = group.heard.get(timeout=END_LIMIT_S).report
        assert isinstance(report, Failure)
        assert (report.error.message, report.error.remedy) == ("wrong knob", "Turn it.")


def test_gibberish_of_a_child_is_a_failure_not_a_crash(group: ProcessGroup, tmp_path: Path) -> None:
    child = _start(group, tmp_path, "p._out.write('{}\\n'); p._out.flush(); p.finished.wait()")
    with closing(_Stopped(child)):
        report = group.heard.get(timeout=END_LIMIT_S).report
        assert isinstance(report, Failure)
        assert "talker" in report.error.message


def test_a_child_finishes_when_its_parent_hangs_up(group: ProcessGroup, tmp_path: Path) -> None:
    child = _start(group, tmp_path, "p.news('up'); p.finished.wait()")
    with closing(_Stopped(child)):
        group.heard.get(timeout=END_LIMIT_S)
        assert child._process.stdin is not None
        child._process.stdin.close()
        assert child.wait(END_LIMIT_S) == 0


class _Stopped:
    """Stops a child at the end of a test."""

    def __init__(self, child: Child) -> None:
        self._child = child

    def close(self) -> None:
        self._child.stop(patience_s=0.1)


def test_messages_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ValueError, match="extra"):
        ConsumerSample.model_validate({"typo": 1})


def test_what_others_print_does_not_get_between_the_lines_of_a_program() -> None:
    code = textwrap.dedent(
        """
        import os
        from aqua_demo.child import own_output

        out = own_output()
        out.write("one ")
        print("printed", flush=True)
        os.system("echo printed")
        out.write("line")
        out.flush()
        """
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "one line"
    assert done.stderr == "printed\nprinted\n"
