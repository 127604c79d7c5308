"""What it brings that a calm step is bounded by what aborting it takes, simulated (ADR 0044).

python benchmarks/abort_limit.py [--requests 500] [--json]
A step of offline work stops for an arrival at its second safepoint. Here co-serving engines of few
layers, with the step times of a tiny Llama under vLLM on a CPU, serve the loads of
`vllm_coserving.py` under several values of `abort_share`, without the limit, which is the control,
and without a profile, on the fixed budget (ADR 0046). Figures are over online requests alone
(`ttft_p99`, `tpot_p99`) and over an ideal filler of the gaps (`offline_share`); `longest_abort_ms`
is from an arrival to the end of the step that it aborted.

What it leaves out: noise, the policy's own time, and profiles that are wrong.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from aqua_demo.engines.online_load import OFFLINE_PROMPT, OnlineLoad, draw_lengths
from aqua_demo.engines.race import OBJECTIVE_FACTOR
from aqua_demo.engines.scale import FULL
from aqua_schedulers.conserve import (
    ConserveSettings,
    CoServingPolicyName,
    Objectives,
    ServiceClass,
    StepLoad,
    StepTimeProfile,
    co_serving_policy,
)
from aqua_simulator.co_serving.engine import CoServingEngine
from aqua_simulator.co_serving.job import CoServingRun
from aqua_simulator.co_serving.spec import CoServingEngineSpec
from aqua_simulator.serving.request import Arrival
from aqua_simulator.timing.iteration import IterationTime, ScheduledBatch

VARIATIONS: Final = (0.5, 1.0, 2.0, 4.0)
SHARES: Final = (None, 0.1, 0.05, 0.025)
"""Of the objective for the first token; None has no limit."""
NO_LIMIT: Final = 1 << 20
"""Safepoints of a step that none is near to."""
ALONE_COUNT: Final = 40
FILLER_S: Final = 120.0

SPEC: Final = CoServingEngineSpec(
    block_count=FULL.blocks,
    kv_bytes_per_token=16_384,
    layer_count=FULL.llama.layers,
    link_bytes_per_s=5e9,
    swap_bytes_per_s=5e9,
    hbm_bytes_per_s=float("inf"),
    store_blocks=4_000,
    block_tokens=FULL.block_tokens,
    max_tokens=FULL.max_tokens // 2,
    max_running=64,
    safepoint_layers=1,
    safepoint_lag=1,
)


def cpu(floor_s: float, token_s: float, request_s: float) -> StepTimeProfile:
    """Step times of the tiny engine on some processor."""
    return StepTimeProfile(
        model="tiny Llama",
        engine="simulated",
        gpu="none",
        floor_s=floor_s,
        token_s=token_s,
        context_token_s=2e-6,
        pair_s=1e-8,
        request_s=request_s,
        max_tokens=SPEC.max_tokens,
    )


PROFILES: Final = {
    # What `burst_model.py` has of a quiet machine, and 694 offline tokens/s of a slow, busy one.
    "fast cores": cpu(5.9e-3, 0.165e-3, 0.335e-3),
    "slow cores": cpu(10e-3, 0.9e-3, 0.3e-3),
}


def offline_pool(seed: int) -> Iterator[Arrival]:
    """Requests without end, as `online_load.write_offline_file` draws them."""
    for number in itertools.count():
        for index, (prompt, output) in enumerate(draw_lengths(500, seed + 1 + number)):
            tokens = min(FULL.longest_prompt, OFFLINE_PROMPT * prompt)
            yield Arrival(f"offline-{number}-{index}", 0.0, tokens, output)


def times_by(profile: StepTimeProfile) -> IterationTime:
    """A clock by which steps take what a profile says."""

    def step_s(batch: ScheduledBatch) -> float:
        pairs = sum(chunk.tokens * (chunk.context + chunk.tokens / 2) for chunk in batch.chunks)
        count = batch.decoding_count + len(batch.chunks)
        return profile.seconds(StepLoad(batch.tokens, batch.decode_context_tokens, pairs, count))

    return IterationTime("exact", lambda _: 0.0, step_s, lambda _: 0.0)


class Bench:
    """Engines of one kind, and the objectives of its online requests."""

    def __init__(self, profile: StepTimeProfile, count: int, seed: int) -> None:
        self.profile = profile
        self.seed = seed
        self.lengths = draw_lengths(count, seed)
        self.objectives = Objectives(1.0, 1.0)
        alone = [self.serve([Arrival("one", 0.0, *pair)]) for pair in self.lengths[:ALONE_COUNT]]
        self.objectives = Objectives(
            OBJECTIVE_FACTOR * max(run.ttft_p99_s for run in alone),
            OBJECTIVE_FACTOR * max(run.tpot_p99_s for run in alone),
        )
        self.rate_per_s = 1 / statistics.fmean(run.steps[-1].end_s for run in alone)
        filler = self.serve([], FILLER_S, offline_pool(seed), CoServingPolicyName.CONSERVE)
        self.filler_per_s = filler.tokens_per_s(0.0, FILLER_S)

    def serve(
        self,
        online: list[Arrival],
        until_s: float = 0.0,
        offline: Iterator[Arrival] = iter(()),  # noqa: B008 - without end or empty
        policy: CoServingPolicyName = CoServingPolicyName.GUARDED,
        *,
        is_predicted: bool = True,
        **settings: float,
    ) -> CoServingRun:
        """What becomes of a load."""
        made = co_serving_policy(
            policy,
            self.objectives,
            self.profile if is_predicted else None,
            ConserveSettings.model_validate(settings),
            block_tokens=SPEC.block_tokens,
        )
        return CoServingEngine(SPEC, times_by(self.profile), made, offline).run(online, until_s)

    def compare(self, cv: float) -> Iterator[dict[str, Any]]:
        """One load under each share."""
        load = OnlineLoad.gamma(self.lengths, self.rate_per_s, cv, self.seed)
        online = [Arrival(f"online-{at}", *each) for at, each in enumerate(load.arrivals)]
        alone = self.serve(online)
        end_s = alone.steps[-1].end_s
        ideal_per_s = self.filler_per_s * (1 - alone.busy_share(0.0, end_s))
        default = ConserveSettings().abort_share
        for share, is_predicted in [*((each, True) for each in SHARES), (default, False)]:
            limit = (
                {"safepoints": NO_LIMIT}
                if share is None
                else {"safepoints": SPEC.layer_count, "abort_share": share}
            )
            run = self.serve(
                online, end_s, offline_pool(self.seed), is_predicted=is_predicted, **limit
            )
            offline_per_s = run.tokens_per_s(0.0, end_s, ServiceClass.OFFLINE)
            yield {
                "cv": cv,
                "profile": is_predicted,
                "abort_share": share,
                "ttft_p99": run.ttft_p99_s / alone.ttft_p99_s,
                "tpot_p99": run.tpot_p99_s / alone.tpot_p99_s,
                "offline_share": offline_per_s / ideal_per_s,
                "longest_abort_ms": 1e3 * max(run.abort_lags_s, default=0.0),
            }


def main(
    *,
    requests: Annotated[int, typer.Option(min=40, help="Online requests of a load.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Of arrivals and lengths.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare limits on what an abort may take."""
    found: dict[str, list[dict[str, Any]]] = {}
    for name, profile in PROFILES.items():
        bench = Bench(profile, requests, seed)
        loads = track(VARIATIONS, name, console=Console(stderr=True))
        found[name] = [row for cv in loads for row in bench.compare(cv)]
    if as_json:
        print(json.dumps({"requests": requests, "seed": seed, "engines": found}))
        return
    for name, rows in found.items():
        table = Table(*rows[0], title=f"{name}: over online requests alone, and the ideal filler")
        for row in rows:
            cells = ("none" if value is None else f"{value:.3f}" for value in row.values())
            table.add_row(*cells)
        Console().print(table)


if __name__ == "__main__":
    typer.run(main)
