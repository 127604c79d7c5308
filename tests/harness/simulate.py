"""`make simulate`: the simulated cluster, a million steps of it, or one run again.

    python -m harness.simulate                                  a million steps, seeds 0, 1, ...
    python -m harness.simulate --seed 7 --steps 5000            one run
    python -m harness.simulate --seed 7 --steps 5000 --only 2,5 --until 900

A run that fails is told with how to repeat it, after it was shrunk, and ends the search.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count, islice
from typing import Final

import torch

from harness.simulation import Failure, Outcome, Run, shrink, simulate

TOTAL_STEPS: Final = 1_000_000
RUN_STEPS: Final = 5000
"""Before a run comes to rest, which takes some thousands more."""


def main() -> int:
    """Search; the status is 1 when something was found."""
    parser = argparse.ArgumentParser(prog="harness.simulate")
    parser.add_argument("--seed", type=int, default=None, help="of the one run to make")
    parser.add_argument("--steps", type=int, default=None, help="of it, or of all runs")
    parser.add_argument("--only", default=None, help="faults that happen, by number; or none")
    parser.add_argument("--until", type=int, default=None, help="come to rest after this step")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if options.seed is not None:
        only = None if options.only is None else _numbers(options.only)
        run = Run(options.seed, options.steps or RUN_STEPS, only, options.until)
        outcomes: Iterator[Outcome] = iter([simulate(run)])
        return _tell(outcomes, total_steps=0)
    with multiprocessing.get_context("fork").Pool(options.processes, _begin) as pool:
        outcomes = pool.imap(_one, islice(count(), 1 << 20))
        return _tell(outcomes, total_steps=options.steps or TOTAL_STEPS)


def _numbers(text: str) -> tuple[int, ...]:
    return () if text == "none" else tuple(int(number) for number in text.split(","))


def _begin() -> None:
    torch.set_num_threads(1)


def _one(seed: int) -> Outcome:
    return simulate(Run(seed, RUN_STEPS))


def _tell(outcomes: Iterator[Outcome], total_steps: int) -> int:
    began_s, steps, runs, met = time.monotonic(), 0, 0, Counter[str]()
    for outcome in outcomes:
        steps += outcome.steps
        runs += 1
        met.update(outcome.counts)
        if outcome.failure is not None:
            _say(f"found {outcome.failure}\nshrinking it")
            shrunk: Failure = shrink(outcome.failure)
            _say(f"simulate: {shrunk}")
            return 1
        if steps >= total_steps:
            break
    _say(f"simulate: {steps} steps in {runs} runs, {time.monotonic() - began_s:.0f} s: all held")
    _say("  " + ", ".join(f"{what} {number}" for what, number in sorted(met.items())))
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
