"""`make gpu`: everything that only a GPU can tell, in steps that can be repeated.

    python -m harness.gpu                  what has not passed yet, most valuable first
    python -m harness.gpu --only rows      these steps, whatever was before
    python -m harness.gpu --stand-in       the same steps on the stand-in: shows that they run
    python -m harness.gpu --list           the steps, and what has become of each
    python -m harness.gpu --report         write the page from the records and run nothing

Records are in `out/gpu` (`out/gpu-stand-in`), one process a step, one run at a time; those of other
hardware stay, and a file that cannot be read is kept under another name. On a GPU each run writes
`docs/measurements/gpu.md` with its plots, and the thresholds that the transports read. On the
stand-in both go beside the records, and say what they are.

Exit status: 0 if every step has passed or cannot run here, 1 if one failed, there was no time for
one, or records cannot be read or written, 2 for wrong usage, 3 if a GPU or a package is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from harness.cuda.results import NAME
from harness.gpu import needs
from harness.gpu.outcome import Outcome, State
from harness.gpu.plan import (
    BUDGET_MINUTES,
    LIMIT_S,
    STEPS,
    Budget,
    Step,
    fingerprint,
    still_to_run,
    unknown,
)
from harness.gpu.provenance import Origin, commit_of, now

if TYPE_CHECKING:
    from harness.gpu.records import Record

ROOT: Final = Path(__file__).resolve().parents[3]
OK, FAILED, MISSING = 0, 1, 3


def main() -> int:
    """Run what is left, write the page."""
    options = _options()
    if missing := needs.missing_modules():
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        _say(f"make gpu needs packages that are not installed: {', '.join(missing)}.")
        _say(needs.BRING.format(python=python, packages=" ".join(missing)))
        return MISSING
    if not options.stand_in and not options.report and (reason := needs.why_no_gpu()):
        _say(f"make gpu needs a GPU, and there is none to use: {reason}.")
        _say("To see the same steps run on the stand-in for a driver: make gpu STAND_IN=1")
        return MISSING
    from aqua_protocol import AquaError

    try:
        return _Run(options).run()
    except (AquaError, OSError) as error:
        _say(f"make gpu cannot go on: {error}")
        return FAILED


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="harness.gpu", description="Everything that only a GPU can tell, in resumable steps."
    )
    parser.add_argument("--stand-in", action="store_true", help="no GPU: show that the steps run")
    parser.add_argument("--minutes", type=float, default=BUDGET_MINUTES, help="of this run, in all")
    parser.add_argument("--only", default="", help="steps by name, with commas; run again if good")
    parser.add_argument("--list", action="store_true", help="list the steps and run nothing")
    parser.add_argument("--report", action="store_true", help="write the page and run nothing")
    parser.add_argument("--records", type=Path, help="folder of the records")
    options = parser.parse_args()
    options.only = [name for name in options.only.split(",") if name]
    if wrong := unknown(options.only):
        names = ", ".join(step.name for step in STEPS)
        parser.error(f"no step is called {', '.join(wrong)}; there are {names}")
    if not options.minutes > 0:
        parser.error("--minutes must be more than 0")
    if options.records is None:
        options.records = ROOT / "out" / ("gpu-stand-in" if options.stand_in else "gpu")
    return options


class _Run:
    """One run, from the records of those before it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        found = self._read()
        self.origin = None if options.report else _origin(stands_in=options.stand_in)
        last = max((record.origin for record in found), key=lambda o: o.measured_at, default=None)
        here = self.origin or last
        hardware = here.hardware if here is not None else ""
        self.fingerprints = {step.name: fingerprint(step, ROOT, hardware) for step in STEPS}
        # What was taken on another machine is not this one's, and is kept for it.
        self.records = {r.step: r for r in found if r.origin.hardware == hardware}
        self.others = [record for record in found if record.origin.hardware != hardware]

    def _read(self) -> list[Record]:
        from aqua_protocol import ConfigError
        from harness.gpu.records import read_records, set_aside

        try:
            return read_records(self.options.records)
        except ConfigError as error:
            if self.options.report or self.options.list:
                raise
            # On a borrowed GPU, minutes count more than what was there before.
            aside = set_aside(self.options.records)
            _say(f"{error.message}. It is kept as {_near(aside)}, and every step is run.")
            return []

    def run(self) -> int:
        from harness.gpu.records import alone

        left = still_to_run(STEPS, self.records, self.fingerprints)
        if self.options.only:
            left = [step for step in STEPS if step.name in self.options.only]
        if self.options.list:
            for step in STEPS:
                record = self.records.get(step.name)
                word = "to run" if step in left else "passed"
                if record is not None and step in left:
                    word = f"{record.outcome.state}, to run again"
                sys.stdout.write(f"{step.name:14} {word:24} {step.what}\n")
            return OK
        late: list[str] = []
        if not self.options.report:
            with alone(self.options.records):
                late = self._run_steps(left)
        self._write()
        failed = [n for n, r in self.records.items() if r.outcome.state is State.FAILED]
        if failed:
            _say(f"failed: {', '.join(failed)}")
        if late:
            _say(f"no time was left for {', '.join(late)}: run it again")
        is_empty = self.options.report and not self.records
        return FAILED if failed or late or is_empty else OK

    def _run_steps(self, steps: list[Step]) -> list[str]:
        """Run them within the budget; the names of those for which there was no time."""
        from harness.gpu.records import Record, write_records

        begin, late = time.monotonic(), []
        budget = Budget(self.options.minutes * 60)
        if not steps:
            _say("nothing to do: every step has passed, and nothing has changed")
        for number, step in enumerate(steps, 1):
            budget.spent_s = time.monotonic() - begin
            if not budget.allows(step):
                late.append(step.name)
                continue
            _say(f"[{number}/{len(steps)}] {step.name}: {step.what} (about {step.usual_s:.0f} s)")
            started_s = time.monotonic()
            outcome = self._in_process(step, budget.limit_s(step))
            if outcome is None:
                late.append(step.name)
                continue
            seconds = time.monotonic() - started_s
            assert self.origin is not None, "a run that measures knows where"
            mark = self.fingerprints[step.name]
            self.records[step.name] = Record(step.name, mark, seconds, self.origin, outcome)
            write_records(self.options.records, [*self.others, *self.records.values()])
            for check in outcome.checks:
                if not check.is_met:
                    _say(f"    not so: {check.what}: {check.found}")
            _say(f"    {outcome.state} in {seconds:.0f} s {outcome.why}".rstrip())
        return late

    def _in_process(self, step: Step, limit_s: float) -> Outcome | None:
        """What became of a step; None if it was ended by the run's limit and not by its own."""
        folder: Path = self.options.records
        folder.mkdir(parents=True, exist_ok=True)
        output, log = folder / f"{step.name}.json", folder / f"{step.name}.log"
        output.unlink(missing_ok=True)
        command = [sys.executable, "-m", "harness.gpu.step", step.name, str(output)]
        command += ["--stand-in"] if self.options.stand_in else []
        with log.open("w") as lines:
            process = subprocess.Popen(
                command, stdout=lines, stderr=lines, cwd=ROOT, start_new_session=True
            )
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                if limit_s < min(step.limit_s, LIMIT_S):
                    return None
                why = f"ended after {limit_s:.0f} s, its limit"
                return Outcome(State.FAILED, f"{why}; what it said is in {_near(log)}")
            finally:  # A step's own processes as well, also when someone presses Ctrl-C.
                _end_group(process)
        if output.exists():
            return Outcome.from_json(json.loads(output.read_text(encoding="utf-8")))
        said = log.read_text(errors="replace").strip().splitlines()[-1:]
        why = f"died with status {process.returncode}: {' '.join(said)}"
        return Outcome(State.FAILED, f"{why}; what it said is in {_near(log)}")

    def _write(self) -> None:
        from harness.gpu.pages import write_page, write_thresholds

        if not self.records:
            _say(f"nothing to write: no records in {_near(self.options.records)}")
            return
        for path in (
            write_page(ROOT, self.options.records, self.records),
            write_thresholds(ROOT, self.options.records, self.records),
        ):
            if path is not None:
                _say(f"written: {_near(path)}")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _origin(*, stands_in: bool) -> Origin:
    """Where this run measures; no context is made on the GPU, which would be in the steps' way."""
    import torch

    from aqualib.transports.cuda_driver import load_driver
    from harness.gpu.facts import kernel_driver

    name, driver = NAME, "none"
    if not stands_in:
        name, driver = load_driver().name_of(0), kernel_driver()
    return Origin(name, driver, str(torch.__version__), commit_of(ROOT), now(), stands_in)


def _near(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    # Ended from outside, by a time limit or a lost connection: the step under way ends as well.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` has it so.
            signal.signal(number, lambda *_: sys.exit(FAILED))
    sys.exit(main())
