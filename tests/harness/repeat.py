"""`make test-repeat`: the same tests again and again, quiet and beside busy neighbours.

A test that fails by luck or load fails sooner or later here. Each run is one process of pytest (or
`make test` for the whole suite); its outcome is one line of `out/repeat/runs.jsonl`, written when
the run has ended. Runs of this commit, of the same tests and load, count: so a search that was
stopped goes on where it was. At the end a table says how many runs there were and what failed.

    python -m harness.repeat --times 100 --busy 0 --busy 2 tests/e2e/profiler/test_pipeline.py
    python -m harness.repeat --suite --times 3 --busy 0 --busy 2

`--busy N` runs N processes a core beside the tests, each of which does nothing as fast as it can.
The whole suite alone takes three times as long beside two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from harness.gpu.provenance import commit_of

STATE: Final = Path("out/repeat/runs.jsonl")
FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Run:
    """One run that has ended.

    Attributes:
        commit: What was tested; ends in "-dirty" when files were changed.
        tests: As given to pytest, or "make test".
        busy: Busy processes a core beside it.
        status: Exit status; 0 for success.
        failed: Names of tests.
        duration_s: Of the run.
    """

    commit: str
    tests: str
    busy: int
    status: int
    failed: list[str]
    duration_s: float


def main() -> int:
    """Run what is missing, print the table; 1 if anything ever failed."""
    parser = argparse.ArgumentParser(prog="harness.repeat")
    parser.add_argument("tests", nargs="*")
    parser.add_argument("--suite", action="store_true", help="`make test` instead of named tests")
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--busy", type=int, action="append", help="processes a core; repeatable")
    options = parser.parse_args()
    if options.suite == bool(options.tests):
        parser.error("name tests, or ask for --suite")
    tests = "make test" if options.suite else " ".join(options.tests)
    commit = commit_of(Path())
    for busy in options.busy or [0]:
        missing = options.times - len(_runs(commit, tests, busy))
        with _neighbours(busy):
            for _ in range(missing):
                run = _run(commit, tests, busy, options.tests)
                sys.stdout.write(f"{tests}, busy {busy}: {'ok' if not run.status else run.failed}")
                sys.stdout.write(f" ({run.duration_s:.0f} s)\n")
                sys.stdout.flush()
    return _report(commit)


def _runs(commit: str, tests: str | None = None, busy: int | None = None) -> list[Run]:
    lines = STATE.read_text().splitlines() if STATE.exists() else []
    runs = [Run(**json.loads(line)) for line in lines]
    return [
        run
        for run in runs
        if run.commit == commit and tests in {None, run.tests} and busy in {None, run.busy}
    ]


def _run(commit: str, tests: str, busy: int, names: list[str]) -> Run:
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *names]
    started_s = time.monotonic()
    done = subprocess.run(
        pytest if names else ["make", "test", "PYTEST_ARGS=-q"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONHASHSEED": "0", **os.environ},
    )
    run = Run(
        commit=commit,
        tests=tests,
        busy=busy,
        status=done.returncode,
        failed=sorted(set(FAILED.findall(done.stdout))),
        duration_s=round(time.monotonic() - started_s, 1),
    )
    STATE.parent.mkdir(parents=True, exist_ok=True)
    with STATE.open("a") as state:
        state.write(json.dumps(asdict(run)) + "\n")
    if done.returncode:
        log = STATE.with_name(f"failure-{time.time_ns()}.log")
        log.write_text(done.stdout + done.stderr)
    return run


@contextlib.contextmanager
def _neighbours(per_core: int) -> Iterator[None]:
    """Busy processes beside the block; they end with it, and with this process."""
    processes = [
        multiprocessing.Process(target=_be_busy, args=(os.getpid(),), daemon=True)
        for _ in range(per_core * (os.cpu_count() or 1))
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def _be_busy(parent: int) -> None:
    while os.getppid() == parent:
        sum(range(1_000_000))


def _report(commit: str) -> int:
    by_kind: dict[tuple[str, int], list[Run]] = {}
    for run in _runs(commit):
        by_kind.setdefault((run.tests, run.busy), []).append(run)
    sys.stdout.write(
        f"\nAt {commit}:\n{'runs':>5} {'failed':>6} {'median s':>8} {'busy':>4}  tests\n"
    )
    for (tests, busy), runs in sorted(by_kind.items()):
        failed = sum(1 for run in runs if run.status)
        median_s = statistics.median(run.duration_s for run in runs)
        sys.stdout.write(f"{len(runs):5d} {failed:6d} {median_s:8.0f} {busy:4d}  {tests}\n")
        for name, count in Counter(name for run in runs for name in run.failed).most_common():
            sys.stdout.write(f"{'':28}{count} x {name}\n")
    return int(any(run.status for runs in by_kind.values() for run in runs))


if __name__ == "__main__":
    sys.exit(main())
