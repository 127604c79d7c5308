"""Groups of processes that are stopped and continued, and whose clocks know nothing of it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aqua_demo.engines.paused_clock import TurnGroup

# It and its child tell what they count; it tells the time by a clock that stands still.
PROGRAM = """
import os, sys, time
from pathlib import Path
from aqua_demo.engines.paused_clock import install

place = Path(sys.argv[1])
if os.fork() == 0:
    (place / "child").write_text(str(os.getpid()))
    count = 0
    while True:
        count += 1
        (place / "counting").write_text(str(count))
        (place / "counting").rename(place / "count")
install(place / "clock")
while not (place / "count").exists():
    time.sleep(0.001)
for line in sys.stdin:
    print(time.monotonic(), flush=True)
"""


@pytest.fixture
def group(tmp_path: Path) -> Iterator[TurnGroup]:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    group = TurnGroup(command, tmp_path / "clock", tmp_path / "log")
    yield group
    group.end(patience_s=0.0)
    for pipe in (group.leader.stdin, group.leader.stdout):
        assert pipe is not None
        pipe.close()


def clock_s(group: TurnGroup) -> float:
    assert group.leader.stdin is not None
    assert group.leader.stdout is not None
    group.leader.stdin.write("\n")
    group.leader.stdin.flush()
    return float(group.leader.stdout.readline())


def test_while_a_group_is_stopped_none_of_it_works_and_its_clock_stands_still(
    group: TurnGroup, tmp_path: Path
) -> None:
    ours_s, began_s = time.monotonic(), clock_s(group)  # Ours is the longer time.
    stopped_s = 0.0
    for _ in range(3):
        group.pause()
        paused_s = time.monotonic()
        count = (tmp_path / "count").read_text()
        time.sleep(0.05)  # So long a child that runs would count thousands.
        assert (tmp_path / "count").read_text() == count
        stopped_s += time.monotonic() - paused_s
        group.resume()
        while (tmp_path / "count").read_text() == count:
            time.sleep(0.001)
    took_s = clock_s(group) - began_s
    assert 0.0 < took_s <= time.monotonic() - ours_s - stopped_s


def test_a_clock_does_not_go_back_where_its_group_ran_on_for_a_moment(
    group: TurnGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []

    def stop_late(pid: int, number: int) -> None:
        if number == signal.SIGSTOP:
            time.sleep(0.05)
            told.append(clock_s(group))
        kill(pid, number)

    kill = os.killpg
    clock_s(group)
    monkeypatch.setattr(os, "killpg", stop_late)
    group.pause()
    group.resume()
    assert clock_s(group) >= told[0]


def test_main_threads_of_a_name_get_a_core_of_their_own(group: TurnGroup, tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) == 1:
        pytest.skip("there is one core")
    clock_s(group)  # So its child is there, which has the same name.
    group.pause()
    pids = [group.leader.pid, int((tmp_path / "child").read_text())]
    group.give_core("another")
    assert [os.sched_getaffinity(pid) for pid in pids] == [set(cores[:-1])] * 2
    group.give_core(Path(f"/proc/{pids[0]}/comm").read_text().strip())
    assert [os.sched_getaffinity(pid) for pid in pids] == [{cores[-1]}] * 2


def test_what_a_group_leaves_running_ends_with_it(group: TurnGroup, tmp_path: Path) -> None:
    clock_s(group)
    group.pause()
    group.end(patience_s=0.0)
    count = (tmp_path / "count").read_text()
    time.sleep(0.05)
    assert (tmp_path / "count").read_text() == count
