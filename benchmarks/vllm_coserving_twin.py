"""How near the simulator comes to co-serving on a real vLLM, whose step times were just measured.

    python benchmarks/vllm_coserving_twin.py [--requests 100] [--loads 5] [--json]
    python benchmarks/vllm_coserving_twin.py --raw RUN.json

Takes what `vllm_coserving.py --raw` has printed, or runs it. The simulator's engine serves the same
online requests with the step-time profile that co-serving itself went by, alone and with offline
work under the same policy.

Two numbers are read off the `control`, an online-only engine that nothing is compared with. A
machine that others use changes within minutes, so all step times are taken to be `pace` times the
profile's, by how long it was busy. And a request is on its way for `handover_s` before a step can
serve it, by the mean time to the first token: front end and engine are processes, and what an idle
one runs has left the processor's caches. Of the other engines the simulator knows nothing but what
they were asked for: `online` shows how far equal engines are apart, and `ours` is what is
predicted.

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
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from _twin import CONTROL, Engines, Figures, show, summarize
from abort_limit import SPEC, offline_pool, times_by
from aqua_demo.engines.online_load import busy_s
from aqua_demo.engines.race import Run, busy_share, offline_rate, ttft
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
from vllm_profiler import ENGINE_PYTHON, require_environments

ROUNDS: Final = 8
"""Of finding the pace, which requests that overlap depend on. Doubled, nothing changes."""
TERMS: Final = ("floor_s", "token_s", "context_token_s", "pair_s", "request_s")


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
    if "step_profile" not in document.get("raw", {}):
        raise typer.BadParameter("not printed by `vllm_coserving.py --raw`", param_hint="--raw")
    profile = StepTimeProfile.model_validate(document["raw"]["step_profile"])
    objectives = Objectives(document["inputs"]["ttft_s"], document["inputs"]["tpot_s"])
    pairs, fits = [], []
    for runs in document["raw"]["runs"].values():
        fit, real, simulated = compare(runs, profile, objectives, seed)
        fits.append(fit)
        pairs.append((real, simulated))
    found = {"loads": len(pairs)} | summarize(pairs, "online")
    found |= {"paces": [fit.pace for fit in fits], "handovers_s": [fit.handover_s for fit in fits]}
    if as_json:
        print(json.dumps(found))
    else:
        show(found, ("online", "ours"))


def measured(requests: int, loads: int, seed: int) -> str:
    """The output of `vllm_coserving.py`; its notes go to standard error."""
    require_environments()
    program = Path(__file__).with_name("vllm_coserving.py")
    counts = ("--requests", requests, "--loads", loads, "--seed", seed)
    command = [str(ENGINE_PYTHON), str(program), "--raw", *map(str, counts)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    return done.stdout


class Fit(NamedTuple):
    """What the control says of a load: step times over the profile's, seconds of a hand-over."""

    pace: float
    handover_s: float


def compare(
    runs: dict[str, Run], profile: StepTimeProfile, objectives: Objectives, seed: int
) -> tuple[Fit, Engines, Engines]:
    """Fit a load's control; figures of real engines, and of the simulator's."""
    rows = runs["online"]["online"]

    def serve(fit: Fit, *, co_serves: bool) -> CoServingRun:
        steps = profile.model_copy(
            update={each: fit.pace * getattr(profile, each) for each in TERMS}
        )
        online = [
            Arrival(
                str(at),
                row["arrival_s"] + fit.handover_s,
                row["prompt_tokens"],
                row["output_tokens"],
            )
            for at, row in enumerate(rows)
        ]
        name = CoServingPolicyName.GUARDED
        policy = co_serving_policy(name, objectives, steps, block_tokens=SPEC.block_tokens)
        pool = offline_pool(seed) if co_serves else iter(())
        engine = CoServingEngine(SPEC, times_by(steps), policy, pool)
        return engine.run(online, runs["ours"]["seconds"] if co_serves else 0.0)

    fit = fitted(runs[CONTROL], partial(serve, co_serves=False))
    real = {name: real_figures(runs[name]) for name in ("online", CONTROL, "ours")}
    real["ours"]["offline_tokens_per_s"] = offline_rate(runs["ours"])
    simulated = {}
    for name, co_serves in (("online", False), ("ours", True)):
        run = serve(fit, co_serves=co_serves)
        simulated[name] = {
            "ttft_mean": fit.handover_s + statistics.fmean(row.ttft_s for row in run.served),
            "completion_mean": fit.handover_s
            + statistics.fmean(row.completion_s for row in run.served),
        }
        if co_serves:
            rate = run.tokens_per_s(0.0, runs["ours"]["seconds"], ServiceClass.OFFLINE)
            simulated[name]["offline_tokens_per_s"] = rate
    return fit, real, simulated


def fitted(control: Run, serve: Callable[[Fit], CoServingRun]) -> Fit:
    """The pace at which an engine is busy for as long, and how long requests are on their way."""
    fit = Fit(1.0, 0.0)
    busy_real_s = busy_share(control) * control["seconds"]
    wait_s = statistics.fmean(map(ttft, control["online"]))
    for _ in range(ROUNDS):
        served = serve(fit).served
        busy = busy_s([(row.arrival_s - fit.handover_s, row.last_token_s) for row in served])
        simulated_s = statistics.fmean(row.ttft_s for row in served)
        fit = Fit(fit.pace * busy_real_s / busy, max(0.0, wait_s - simulated_s))
    return fit


def real_figures(run: Run) -> Figures:
    """Mean seconds of online requests to the first token and to the last."""
    return {
        "ttft_mean": statistics.fmean(map(ttft, run["online"])),
        "completion_mean": statistics.fmean(
            row["end_s"] - row["arrival_s"] for row in run["online"]
        ),
    }


if __name__ == "__main__":
    typer.run(main)
