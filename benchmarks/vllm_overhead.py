"""What the fair scheduler costs a step: `schedule()` at 256 running requests, beside vLLM's own.

Two engines of a model that hardly computes run the same 256 requests in turns. Every call of
`schedule()` is timed, and the medians of those that left 256 requests running are compared; rounds
alternate and the median ratio of the pairs counts, so that a busy machine slows both sides. Nobody
waits, as in the steady state: then a step asks the policy once and tracks nothing.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from vllm_burst import ENGINE_PYTHON, Arrival, Bench, lending, note, policies, write_model

RUNNING: Final = 256
REQUESTS: Final[list[Arrival]] = [(0.0, 16, 96)] * RUNNING
BLOCKS: Final = RUNNING * 5
SHAPE: Final = {"layers": 1, "hidden": 64}
MAX_OVERHEAD: Final = 0.10


def main(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    rounds: Annotated[int, typer.Option(help="Pairs of runs.", min=1)] = 5,
) -> None:
    """Measure the scheduler's overhead."""
    times: dict[str, list[float]] = {"stock": [], "aqua": []}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aqua-burst-")))
        python = str(ENGINE_PYTHON if ENGINE_PYTHON.exists() else sys.executable)
        model = folder / "model"
        write_model(python, model, SHAPE)
        environment = stack.enter_context(lending(python, folder))
        engines = {
            name: stack.enter_context(Bench(python, model, BLOCKS, options, environment))
            for name, options in (("stock", None), ("aqua", policies(8)["best"]))
        }
        for turn in range(rounds):
            note(f"round {turn + 1} of {rounds}")
            for name, engine in engines.items():
                times[name].append(engine.run(REQUESTS)["schedule_us"][str(RUNNING)]["median"])
    ratios = [ours / stock - 1 for stock, ours in zip(times["stock"], times["aqua"], strict=True)]
    summary: dict[str, Any] = {
        "running": RUNNING,
        "stock_schedule_us": statistics.median(times["stock"]),
        "aqua_schedule_us": statistics.median(times["aqua"]),
        "overhead_ratio": statistics.median(ratios),
    }
    if as_json:
        print(json.dumps(summary | {"raw": times}))
    else:
        print(
            f"schedule() at {RUNNING} running: stock {summary['stock_schedule_us']:.0f} us, Aqua "
            f"{summary['aqua_schedule_us']:.0f} us, {summary['overhead_ratio']:+.1%} "
            f"(bar {MAX_OVERHEAD:+.0%})"
        )


if __name__ == "__main__":
    typer.run(main)
