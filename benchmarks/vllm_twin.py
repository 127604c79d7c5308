"""How near the simulator comes to bursts on a real vLLM, whose step times it measures first.

    python benchmarks/vllm_twin.py [--bursts 5] [--kind long-prompts] [--json]

The engines of `vllm_burst.py` serve some requests that say what a step costs, by least squares: a
constant, each prompt token, each decode and the tokens before it, each block copied. Then come
bursts, each of them served by the engines and by the simulator's engine with these costs and the
same policies. A second engine of vLLM's own serves them, too: by how much equal engines differ is
by how much anybody can miss, and by how much its steps are slower or faster than they were, so are
all costs taken to be (`pace`), for a machine that others use changes within minutes. Of the engines
that it is compared with, the simulator knows nothing of the burst.

Printed for each scheduler are the simulator's errors in the mean time to the first token and the
mean completion, medians over the bursts and the worst; and of the ratios to vLLM's own order, how
many the simulator has on the right side of 1, of those that are further from it than equal engines.
"""

from __future__ import annotations

import json
import statistics
from typing import Annotated, Final

import numpy as np
import typer
from scipy.optimize import nnls

from _burst_race import note, race, started
from _bursts import KINDS, STABLE_SHARE, paper_burst
from _twin import CONTROL, Engines, Figures, show, summarize
from aqua_demo.engines.online_load import Arrival
from aqua_schedulers.cfs import PolicyName
from burst_model import StepCosts
from burst_model import serve as simulate
from vllm_burst import (
    CALM_TRIAL_COUNT,
    CAPACITY_COUNT,
    POLICY_NAMES,
    calm,
    completions,
    policies,
    ttfts,
)

SIMULATED: Final = {
    "fcfs": (PolicyName.FCFS, False),
    "recompute": (PolicyName.CFS, False),
    "aqua": (PolicyName.CFS, True),
    "best": (PolicyName.FIRST_TOKEN, True),
}
"""Policy, and whether it pages, of each scheduler of `vllm_burst.py`."""
SLICE: Final = 4


def main(
    *,
    bursts: Annotated[int, typer.Option(help="Bursts to draw.", min=1)] = 5,
    kind: Annotated[str, typer.Option(help=f"Lengths: {', '.join(KINDS)}.")] = "chats",
    seed: Annotated[int, typer.Option(help="Of the first burst; others follow.")] = 0,
    blocks: Annotated[int, typer.Option(help="KV blocks of 32 tokens.", min=24)] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure step costs, then compare bursts on real engines with simulated ones."""
    if kind not in KINDS:
        raise typer.BadParameter(f"{kind} is none of {', '.join(KINDS)}", param_hint="--kind")
    lengths = KINDS[kind](CAPACITY_COUNT + CALM_TRIAL_COUNT, -1)
    with started({**policies(SLICE), CONTROL: None}, blocks) as engines:
        rate, service_s, _ = calm(engines["fcfs"], STABLE_SHARE, lengths)
        note("what a step costs under each scheduler")
        trial = paper_burst(rate, service_s, seed - 1, KINDS[kind])
        costs = {name: costs_of(run["steps"]) for name, run in race(engines, trial).items()}
        pairs, paces = [], []
        for index in range(bursts):
            load = paper_burst(rate, service_s, seed + index, KINDS[kind])
            note(f"burst {index + 1} of {bursts}: {len(load)} requests")
            runs = race(engines, load)
            pace = pace_of(runs[CONTROL]["steps"], costs[CONTROL])
            note(f"steps take {pace:.2f} times as long as when they were measured")
            paces.append(pace)
            now = {name: StepCosts(*(pace * each for each in cost)) for name, cost in costs.items()}
            real = {name: means(run["rows"]) for name, run in runs.items()}
            pairs.append((real, twin(load, now, blocks)))
    found = {"bursts": len(pairs)} | summarize(pairs, "fcfs") | {"paces": paces}
    if as_json:
        print(json.dumps(found | {"costs": {name: each._asdict() for name, each in costs.items()}}))
    else:
        show(found, POLICY_NAMES)


def costs_of(steps: list[list[float]]) -> StepCosts:
    """What fits best: prompt tokens, decodes, tokens before these, blocks paged; seconds."""
    rows = np.array(steps)
    causes = np.column_stack([np.ones(len(rows)), rows[:, :4]])
    return StepCosts(*(float(each) for each in nnls(causes, rows[:, 4])[0]))


def pace_of(steps: list[list[float]], costs: StepCosts) -> float:
    """Seconds that steps took, over what they cost when that was measured."""
    rows = np.array(steps)
    causes = np.column_stack([np.ones(len(rows)), rows[:, :4]])
    return float(rows[:, 4].sum() / (causes @ np.array(costs)).sum())


def means(rows: list[dict[str, float]]) -> Figures:
    """Mean seconds to the first token and to the last."""
    return {
        "ttft_mean": statistics.fmean(ttfts(rows)),
        "completion_mean": statistics.fmean(completions(rows)),
    }


def twin(load: list[Arrival], costs: dict[str, StepCosts], blocks: int) -> Engines:
    """The same burst on the simulator's engine, under each scheduler."""
    found = {}
    for name, (policy, pages) in SIMULATED.items():
        rows = simulate(policy, SLICE, load, pages=pages, blocks=blocks, costs=costs[name])
        found[name] = {
            "ttft_mean": statistics.fmean(row.ttft_s for row in rows),
            "completion_mean": statistics.fmean(row.completion_s for row in rows),
        }
    return found


if __name__ == "__main__":
    typer.run(main)
