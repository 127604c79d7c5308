"""`make fuzz`: every Hypothesis test at random, file by file, until the time is over.

`make test` draws the same examples every time. Here each file runs under a fresh seed, which sets
the examples, the order of the files and the order of sets (PYTHONHASHSEED). A failure ends the
search with the command that repeats it; Hypothesis prints the example and a `@reproduce_failure`
line above it, and keeps it in .hypothesis/.

    python -m harness.fuzz --minutes 10 [--seed N] [PATH...]
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).resolve().parents[1]
NOTHING_COLLECTED: Final = 5
"""Pytest's exit status when no test was selected."""


def files_with_properties(paths: list[Path]) -> list[Path]:
    """Test files that use Hypothesis, but for tiers that need a device or an engine."""
    files = sorted(file for path in paths for file in path.rglob("test_*.py")) or paths
    return [
        file
        for file in files
        if not {"gpu", "engine"} & set(file.parts) and "hypothesis" in file.read_text()
    ]


def main() -> int:
    """Search until the time is over or something fails; the status is pytest's."""
    parser = argparse.ArgumentParser(prog="harness.fuzz")
    parser.add_argument("paths", nargs="*", type=Path, default=[TESTS])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None, help="of everything; random by default")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    draw = random.Random(seed)
    files = files_with_properties(options.paths)
    sys.stdout.write(f"fuzz: seed {seed}, {len(files)} files, {options.minutes:g} minutes\n")
    until_s = time.monotonic() + 60 * options.minutes
    ran, round_files = 0, list[Path]()
    while files and time.monotonic() < until_s:
        if not round_files:
            round_files = draw.sample(files, len(files))
        file, own = round_files.pop(), draw.getrandbits(32)
        status = _run(file, own)
        ran += 1
        if status not in {0, NOTHING_COLLECTED}:
            return status
    sys.stdout.write(f"fuzz: {ran} runs of a file, nothing found\n")
    return 0


def _run(file: Path, seed: int) -> int:
    command = [
        *("-m", "pytest", "-q", "-m", "hypothesis", str(file)),
        *("--hypothesis-profile=fuzz", f"--hypothesis-seed={seed}"),
    ]
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in {0, NOTHING_COLLECTED}:
        again = f"PYTHONHASHSEED={seed} {sys.executable} {' '.join(command)}"
        sys.stdout.write(f"{done.stdout}{done.stderr}\nfuzz: again with\n  {again}\n")
    else:
        sys.stdout.write(f"fuzz: {file} with seed {seed}: ok\n")
    sys.stdout.flush()
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
