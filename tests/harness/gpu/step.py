"""One step in a process of its own: a lost context, a crash or a hang ends this step and no other.

    python -m harness.gpu.step rows out/gpu/rows.json [--stand-in]

The outcome is written to the file in any case but a death; the parent says what became of that.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aqua_cli.files import write_json
from harness.gpu.outcome import NotRunError, Outcome, State
from harness.gpu.plan import STEPS, Step

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.gpu.device import GpuAtHand

COUNTS: Final = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected)")
BROKEN: Final = re.compile(r"^(?:FAILED|ERROR) (\S.*)", re.MULTILINE)
SKIPPED: Final = re.compile(r"^SKIPPED \[(\d+)\] (.*)", re.MULTILINE)
ON_STAND_IN: Final = "AQUA_GPU_TESTS_ON_STAND_IN"
"""Has `tests/gpu` install the stand-in and run on it."""

LEFT_OUT_ON_STAND_IN: Final = " and ".join(
    f"not {name}"
    for name in (
        *("logits_equal", "demo_runs", "recent_steps", "name_the_gpu_alike", "graph_captured"),
        *("size_place_and_spread", "any_layout"),
    )
)
"""Tests that ask torch for more than the stand-in has, and two that would take it minutes."""

LINES_KEPT: Final = 12

PIPE_BYTES: Final = 65_536
"""What is read at once: all that a pipe of Linux holds."""


def main() -> int:
    """Run one step; 0 if it has an outcome, whichever."""
    parser = argparse.ArgumentParser(prog="harness.gpu.step")
    parser.add_argument("name", choices=[step.name for step in STEPS])
    parser.add_argument("output", type=Path)
    parser.add_argument("--stand-in", action="store_true")
    options = parser.parse_args()
    step = next(step for step in STEPS if step.name == options.name)
    if step.runs.startswith("pytest "):
        outcome = by_pytest(step, stands_in=options.stand_in)
    else:
        outcome = by_function(step, stands_in=options.stand_in)
    write_json(options.output, outcome.as_json())
    return 0


def by_function(step: Step, *, stands_in: bool) -> Outcome:
    """Run a step of ours."""
    from harness.gpu.device import gpu_at_hand

    module, _, name = step.runs.partition(":")
    function: Callable[[GpuAtHand], Outcome] = getattr(
        importlib.import_module(f"harness.gpu.{module}"), name
    )
    outcome = Outcome()
    try:
        with gpu_at_hand(stands_in=stands_in) as gpu:
            outcome = function(gpu)
    except NotRunError as reason:
        return Outcome(State.NOT_RUN, str(reason))
    except Exception as error:  # noqa: BLE001 - the outcome of the step, told with its place
        outcome.state = State.FAILED
        outcome.why = f"{type(error).__name__}: {error}"
        outcome.notes += traceback.format_exc().splitlines()[-LINES_KEPT:]
    outcome.require_numbers()
    return outcome


def by_pytest(step: Step, *, stands_in: bool) -> Outcome:
    """Run tests; a warning of some library on some machine is told, and fails none.

    Each test is named as it begins, and what is said is passed on as it comes: of a step that is
    ended at its limit, the log says where it was.
    """
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-W", "default"]
    command += step.runs.split()[1:]
    environment = dict(os.environ)
    if stands_in:
        environment[ON_STAND_IN] = "1"
        is_contract = "contract" in step.runs
        command += ["-k", "on-stand-in" if is_contract else LEFT_OUT_ON_STAND_IN]
        command += ["-m", "contract" if is_contract else "gpu"]
    else:
        command += ["-m", "gpu"]
    said = bytearray()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
    ) as tests:
        assert tests.stdout is not None, "its output is a pipe"
        while part := os.read(tests.stdout.fileno(), PIPE_BYTES):
            said += part
            os.write(sys.stderr.fileno(), part)
    outcome = read_pytest(said.decode(errors="replace"), tests.returncode)
    if stands_in:
        outcome.notes.append(f"On the stand-in: {' '.join(command[command.index('-k') :])}")
    return outcome


def read_pytest(said: str, status: int) -> Outcome:
    """What a run of tests has shown."""
    outcome = Outcome()
    counts = {word.rstrip("s"): int(count) for count, word in COUNTS.findall(said)}
    table = outcome.table("Tests", "outcome", "count")
    for word, count in sorted(counts.items()):
        table.add(word, count)
    broken = BROKEN.findall(said)
    passed = counts.get("passed", 0)
    outcome.figures["tests passed"] = passed
    outcome.check(
        "every test passes", status == 0, "; ".join(broken[:LINES_KEPT]) or f"status {status}"
    )
    outcome.check("some test ran", passed > 0, passed)
    if broken or status:
        outcome.notes += said.splitlines()[-LINES_KEPT:]
    outcome.notes += [f"skipped {count}: {reason}" for count, reason in SKIPPED.findall(said)]
    return outcome


if __name__ == "__main__":
    sys.exit(main())
