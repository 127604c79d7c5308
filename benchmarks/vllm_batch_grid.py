"""What protects people from a batch beside them: llm-d's grid on a real vLLM, in one run.

People come in bursts, with idle phases between; offline requests are always there. Engines take
turns, as in `vllm_coserving.py`, so that all meet the same requests on the same machine:

    online only     vLLM without offline work; twice, and their difference is the noise
    no gateway      vLLM with all offline requests at once, first come first served
    stock priority  the same under vLLM's own priorities
    cap N           vLLM with N offline requests at once, as behind a gateway that counts them
    ours            co-serving, offline requests marked as the batch service marks them

Caps take turns with vLLM without offline work, cap by cap, since engines take memory. Figures are
time to the first token and time between tokens of online requests at the 99th percentile, over the
mean of both without offline work, and how fast offline requests went in idle phases, in which an
engine had no online request. `bars`: ours has a ratio of 1.10 at most, and the highest rate of all
that stay below 2.

What it does not show: a GPU's numbers, nor what a gateway's HTTP costs: offline requests come from
the clients of a race, not through `aqua batch serve`, which bounds how many there are at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from _burst_race import SHAPE, note
from aqua_cli.figures import AMBER, BLUE, FAINT, RED, TEAL, figure
from aqua_demo.engines.online_load import OnlineLoad, draw_lengths, p99, write_offline_file
from aqua_demo.engines.race import (
    AT_ONCE,
    Order,
    Run,
    ServedEngine,
    measure_alone,
    p99_ttft,
    race,
    serve,
)
from aqua_demo.engines.scale import FULL, co_serving_options
from vllm_coserving import ALONE_COUNT, OFFLINE_COUNT, measure_steps
from vllm_profiler import ENGINE_PYTHON, require_environments, write_model

ALL_AT_ONCE: Final = 200
"""Offline requests where nothing bounds them, many times what fits into memory. Doubled, more of
them wait in the engine's queue, of which an online request passes over none or all."""
BAR: Final = 1.10
HURTS: Final = 2.0
"""Times the TTFT of online requests alone, from which a way is no choice."""
COLOURS: Final = {"no gateway": RED, "stock priority": AMBER, "ours": TEAL}


def main(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    requests: Annotated[int, typer.Option(help="Online requests.", min=20)] = 300,
    caps: Annotated[str, typer.Option(help="Offline requests at once, by commas.")] = "1,2,4,8,16",
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.", min=0)] = 0,
    step_profile: Annotated[Path | None, typer.Option(help="Else it is measured.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the staircase, .png or .svg.")] = None,
) -> None:
    """Measure online latency by the batch rate in idle phases."""
    require_environments()
    # Else engines that have no turn stay stopped for ever.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="aqua-grid-")))
        model, offline = folder / "model", folder / "offline.jsonl"
        write_model(model, SHAPE)
        write_offline_file(offline, OFFLINE_COUNT, seed, FULL.longest_prompt)
        options = FULL.engine_options()

        def start(name: str, aqua: dict[str, Any] | None = None, **engine: Any) -> ServedEngine:  # noqa: ANN401 - vLLM's options
            note(f"starting {name}")
            served = ServedEngine(folder / name, model, options | engine, aqua, str(ENGINE_PYTHON))
            stack.callback(served.close)
            served.await_ready()
            return served

        engines = {name: start(name) for name in ("online", "control")}
        lengths = draw_lengths(requests, seed)
        inputs = measure_alone(
            lambda load: serve(engines["online"], Order(load)), lengths[:ALONE_COUNT]
        )
        profile = str(step_profile or measure_steps(model, folder))
        engines["ours"] = start("ours", co_serving_options(inputs, step_profile=profile))
        engines["stock priority"] = start("stock-priority", scheduling_policy="priority")
        engines["no gateway"] = start("no-gateway")
        load = OnlineLoad.on_off(lengths, 1 / inputs["service_s"], seed)
        note(f"{requests} online requests in {load.length_s:.0f} s")
        alone = Order(load, seed=seed)
        beside = {"ours": AT_ONCE, "stock priority": ALL_AT_ONCE, "no gateway": ALL_AT_ONCE}
        orders = {name: Order(load, offline, count, seed=seed) for name, count in beside.items()}
        runs = race(engines, orders | {"online": alone, "control": alone})
        found = compared(runs)
        for name in beside:
            engines.pop(name).close()
        for cap in map(int, caps.split(",")):
            bounded = Order(load, offline, cap, seed=seed)
            runs = race(engines, {"online": alone, "control": bounded})
            row = compared({"online": runs["online"], f"cap {cap}": runs["control"]})
            found[f"cap {cap}"] = row[f"cap {cap}"]
            note(json.dumps(row))
    safe = {k: each for k, each in found.items() if each["ttft_p99_ratio"] < HURTS}
    fastest = max(safe, key=lambda name: safe[name]["idle_tokens_per_s"], default=None)
    bars = {
        "ttft_p99_ratio": found["ours"]["ttft_p99_ratio"] <= BAR,
        "highest_rate_of_those_below_2": fastest == "ours",
    }
    if plot is not None:
        draw(found, plot)
    if as_json:
        machine = {"cpus": os.cpu_count(), "machine": platform.processor() or platform.machine()}
        print(json.dumps({"scenarios": found, "bars": bars, "inputs": inputs, "machine": machine}))
    else:
        show(found, bars)


def compared(runs: dict[str, Run]) -> dict[str, dict[str, float]]:
    """The figures of each run, over those without offline work in the same race."""
    alone = [runs[name] for name in ("online", "control") if name in runs]
    ttft_s = statistics.fmean(map(p99_ttft, alone))
    itl_s = statistics.fmean(map(p99_itl, alone))
    return {
        name: {
            "ttft_p99_s": p99_ttft(run),
            "ttft_p99_ratio": p99_ttft(run) / ttft_s,
            "itl_p99_s": p99_itl(run),
            "itl_p99_ratio": p99_itl(run) / itl_s,
            **idle_rates(run),
        }
        for name, run in runs.items()
    }


def p99_itl(run: Run) -> float:
    """Seconds between two tokens of an online request, the 99th percentile over all of them."""
    return p99([b - a for row in run["online"] for a, b in pairwise(row["token_s"])])


def idle_rates(run: Run) -> dict[str, float]:
    """Share of the time without an online request, and what offline work got done in it."""
    spans, until_s = [], 0.0
    for row in sorted(run["online"], key=lambda row: float(row["arrival_s"])):
        if row["arrival_s"] > until_s:
            spans.append((until_s, float(row["arrival_s"])))
        until_s = max(until_s, float(row["end_s"]))
    idle_s = sum(end - begin for begin, end in spans)
    tokens = 0
    for row in run["offline"]:
        for number, at_s in enumerate(row["token_s"]):
            if any(begin <= at_s < end for begin, end in spans):
                # The prompt has been computed when the first token comes.
                tokens += 1 + (int(row["prompt_tokens"]) if number == 0 else 0)
    return {
        "idle_share": idle_s / float(run["seconds"]),
        "idle_tokens_per_s": tokens / idle_s if idle_s else 0.0,
    }


def draw(found: dict[str, dict[str, float]], path: Path) -> None:
    """Online latency over the batch rate: the staircase of caps, and who is off it."""
    with figure(path, width=7.5, height=4.2) as drawing:
        axes = drawing.subplots()
        caps = {name: each for name, each in found.items() if name.startswith("cap")}
        points = sorted((c["idle_tokens_per_s"], c["ttft_p99_ratio"], n) for n, c in caps.items())
        if points:
            axes.step(*zip(*(each[:2] for each in points), strict=True), where="post", color=BLUE)
        for rate, ratio, name in points:
            axes.plot(rate, ratio, "o", color=BLUE)
            axes.annotate(name, (rate, ratio), (4, -12), textcoords="offset points", fontsize=8)
        for name, colour in COLOURS.items():
            place = found[name]["idle_tokens_per_s"], found[name]["ttft_p99_ratio"]
            axes.plot(*place, "D", color=colour)
            axes.annotate(name, place, (6, 4), textcoords="offset points", fontsize=8)
        axes.axhline(HURTS, color=FAINT, linestyle=":")
        axes.axhline(1.0, color=FAINT)
        axes.set_yscale("log")
        axes.set_xlabel("offline tokens a second in idle phases")
        axes.set_ylabel("online TTFT p99, over online only")
        axes.set_title("What a batch costs people, by how fast it goes while they are away")


def show(found: dict[str, dict[str, float]], bars: dict[str, bool]) -> None:
    """The figures by scenario."""
    columns = ("ttft_p99_s", "ttft_p99_ratio", "itl_p99_s", "itl_p99_ratio", "idle_tokens_per_s")
    print(f"{'':16}" + "".join(f"{name:>20}" for name in columns))
    for name, each in found.items():
        print(f"{name:16}" + "".join(f"{each[column]:20.3f}" for column in columns))
    for name, holds in bars.items():
        print(f"{name}: {'holds' if holds else 'missed'}")


if __name__ == "__main__":
    typer.run(main)
