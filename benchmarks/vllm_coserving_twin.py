"""How near the simulator comes to co-serving on a real vLLM, whose step times were just measured.

    python benchmarks/vllm_coserving_twin.py [--requests 100] [--loads 5] [--json]
    python benchmarks/vllm_coserving_twin.py --raw RUN.json

Takes what `vllm_coserving.py --raw` has printed, or runs it. The simulator's engine serves the same
online requests with the step-time profile that co-serving itself went by, alone and with offline
work under the same policy. A machine that others use changes within minutes, so all step times are
taken to be as much longer or shorter as the `control` says, which is an online-only engine that
nothing is compared with (`pace`). Of the other engines the simulator knows nothing but what they
were asked for.

Printed are the simulator's errors in the means of the time to the first token and of the completion
of online requests, and in offline tokens, medians over the loads and the worst; how far two equal
engines were apart; and of the changes that co-serving makes beyond that, how many have the same
direction in the simulator.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from abort_limit import SPEC, offline_pool, times_by
from aqua_cli import print_table
from aqua_demo.engines.online_load import busy_s
from aqua_demo.engines.race import Run, offline_rate, ttft
from aqua_schedulers.conserve import (
    CoServingPolicyName,
    Objectives,
    ServiceClass,
    StepTimeProfile,
    co_serving_policy,
)
from aqua_simulator.co_serving.engine import CoServingEngine
from aqua_simulator.co_serving.job import CoServingRun
from aqua_simulator.serving.request import Arrival

ENGINE_PYTHON: Final = Path(".venv-engine/bin/python")
ROUNDS: Final = 8
"""Of finding the pace, which requests that overlap depend on. Doubled, nothing changes."""
FIGURES: Final = ("ttft_mean", "completion_mean")
TERMS: Final = ("floor_s", "token_s", "context_token_s", "pair_s", "request_s")

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Compared:
    """One load on real engines and on the simulator's: figures by engine.

    Attributes:
        pace: Of steps, over what they took when they were measured.
    """

    pace: float
    real: dict[str, Figures]
    simulated: dict[str, Figures]


def main(
    *,
    raw: Annotated[Path | None, typer.Option(help="What was printed; else it is run.")] = None,
    requests: Annotated[int, typer.Option(help="Online requests of a load.", min=20)] = 100,
    loads: Annotated[int, typer.Option(help="Loads, from the calmest on.", min=1, max=5)] = 5,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.", min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare co-serving on a real engine with a simulated one."""
    text = measured(requests, loads, seed) if raw is None else raw.read_text()
    document = json.loads(text)
    profile = StepTimeProfile.model_validate(document["raw"]["step_profile"])
    objectives = Objectives(document["inputs"]["ttft_s"], document["inputs"]["tpot_s"])
    found = {
        name: compare(runs, profile, objectives, seed)
        for name, runs in document["raw"]["runs"].items()
    }
    if as_json:
        print(json.dumps(summarize([*found.values()])))
    else:
        show(summarize([*found.values()]))


def measured(requests: int, loads: int, seed: int) -> str:
    """The output of `vllm_coserving.py`; its notes go to standard error."""
    program = Path(__file__).with_name("vllm_coserving.py")
    counts = ("--requests", requests, "--loads", loads, "--seed", seed)
    command = [str(ENGINE_PYTHON), str(program), "--raw", *map(str, counts)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


def compare(
    runs: dict[str, Run], profile: StepTimeProfile, objectives: Objectives, seed: int
) -> Compared:
    """A load on real engines beside the simulator's at their pace."""
    rows = runs["online"]["online"]
    online = [
        Arrival(str(at), row["arrival_s"], row["prompt_tokens"], row["output_tokens"])
        for at, row in enumerate(rows)
    ]

    def serve(pace: float, *, co_serves: bool) -> CoServingRun:
        steps = profile.model_copy(update={each: pace * getattr(profile, each) for each in TERMS})
        name = CoServingPolicyName.GUARDED
        policy = co_serving_policy(name, objectives, steps, block_tokens=SPEC.block_tokens)
        pool = offline_pool(seed) if co_serves else iter(())
        engine = CoServingEngine(SPEC, times_by(steps), policy, pool)
        return engine.run(online, runs["ours"]["seconds"] if co_serves else 0.0)

    pace = 1.0
    for _ in range(ROUNDS):
        served = serve(pace, co_serves=False).served
        pace *= busy_of(runs["control"]) / busy_s([(r.arrival_s, r.last_token_s) for r in served])
    real = {name: real_figures(runs[name]) for name in ("online", "control", "ours")}
    real["ours"]["offline_tokens_per_s"] = offline_rate(runs["ours"])
    simulated = {}
    for name, co_serves in (("online", False), ("ours", True)):
        run = serve(pace, co_serves=co_serves)
        simulated[name] = {
            "ttft_mean": statistics.fmean(row.ttft_s for row in run.served),
            "completion_mean": statistics.fmean(row.completion_s for row in run.served),
        }
        if co_serves:
            rate = run.tokens_per_s(0.0, runs["ours"]["seconds"], ServiceClass.OFFLINE)
            simulated[name]["offline_tokens_per_s"] = rate
    return Compared(pace, real, simulated)


def busy_of(run: Run) -> float:
    """Seconds in which any online request was unfinished."""
    return busy_s([(row["arrival_s"], row["end_s"]) for row in run["online"]])


def real_figures(run: Run) -> Figures:
    """Mean seconds of online requests to the first token and to the last."""
    return {
        "ttft_mean": statistics.fmean(map(ttft, run["online"])),
        "completion_mean": statistics.fmean(
            row["end_s"] - row["arrival_s"] for row in run["online"]
        ),
    }


def summarize(found: list[Compared]) -> dict[str, Any]:
    """Errors, what equal engines differ by, and directions."""
    summary: dict[str, Any] = {"loads": len(found), "paces": [each.pace for each in found]}
    spread = {
        figure: statistics.median(
            abs(each.real["control"][figure] / each.real["online"][figure] - 1) for each in found
        )
        for figure in FIGURES
    }
    for name in ("online", "ours"):
        summary[name] = {}
        for figure in found[0].simulated[name]:
            errors = [each.simulated[name][figure] / each.real[name][figure] - 1 for each in found]
            summary[name][f"{figure}_error"] = statistics.median(errors)
            summary[name][f"{figure}_worst"] = max(errors, key=abs)
    changes = [
        (change_of(each.real, figure), change_of(each.simulated, figure))
        for each in found
        for figure in FIGURES
        if abs(change_of(each.real, figure)) > spread[figure]
    ]
    rights = sum((real > 0) == (simulated > 0) for real, simulated in changes)
    return summary | {"spread": spread, "directions": len(changes), "directions_right": rights}


def change_of(figures: dict[str, Figures], figure: str) -> float:
    """By which share co-serving makes a figure larger."""
    return figures["ours"][figure] / figures["online"][figure] - 1


def show(summary: dict[str, Any]) -> None:
    """A row for each engine."""
    rows = []
    for name in ("online", "ours"):
        errors = [f"{value:+.1%}" for value in summary[name].values()]
        rows.append([name, *errors, *["-"] * (6 - len(errors))])
    spread = [text for each in summary["spread"].values() for text in (f"±{each:.1%}", "")]
    rows.append(["equal engines", *spread, "-", ""])
    columns = ["", "mean TTFT", "worst", "mean completion", "worst", "offline tokens", "worst"]
    print_table("simulated to real", columns, rows)
    print(f"directions: {summary['directions_right']} of {summary['directions']} right")


if __name__ == "__main__":
    typer.run(main)
