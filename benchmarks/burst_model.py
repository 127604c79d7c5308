"""How often the bars of `vllm_burst.py` hold: its bursts on a model of its engine.

python benchmarks/burst_model.py [--seeds 16] [--kind long-prompts --block-ms 0.05] [--json]
One real burst is one draw, and a real engine serves a few in ten minutes. Here the same policies
run on the simulator's serving engine, whose step takes what was fitted to vLLM 0.32 on two
virtual cores (`benchmarks/vllm_burst.py`, 826 steps): a constant, and so much for each prompt token
and each decode. Pages cost what they cost there. Lengths differ in kind and spread; the stable rate
is a share of capacity. Prints, for each policy and kind, medians and how many bursts hold each bar.

What the model leaves out: noise, the policy's own time, and whatever a step's time depends on
beside counts of tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from functools import partial
from typing import Any, Final, NamedTuple

from _bursts import KINDS, STABLE_SHARE, paper_burst, steady
from aqua_demo.engines.online_load import busy_s
from aqua_schedulers.cfs import FairSettings, PagingTier, PolicyName, policy_named
from aqua_simulator.serving.engine import Engine, EngineSettings
from aqua_simulator.serving.memory import PagedMemory, PageStore
from aqua_simulator.serving.request import Arrival, Served
from aqua_simulator.timing.iteration import IterationTime, ScheduledBatch

BLOCKS: Final = 64
BLOCK_TOKENS: Final = 32
KV_BYTES_PER_TOKEN: Final = 8192
TRIAL_COUNT: Final = 120
POLICIES: Final = (PolicyName.CFS, PolicyName.LEAST_SERVED, PolicyName.FIRST_TOKEN)
MEAN_BAR: Final = {PolicyName.FIRST_TOKEN: 1.25}


class StepCosts(NamedTuple):
    """Seconds of an engine's step.

    Attributes:
        step_s: Whatever it computes.
        prompt_token_s, decode_s: For each prompt token, and each request that decodes.
        context_token_s: For each token that a decoding request has before it.
        block_s: For each block copied out or in.
    """

    step_s: float = 5.9e-3
    prompt_token_s: float = 0.165e-3
    decode_s: float = 0.5e-3
    context_token_s: float = 0.0
    block_s: float = 0.105e-3

    def computing_s(self, batch: ScheduledBatch) -> float:
        """What a step takes beyond the constant, copies aside."""
        return (
            self.prompt_token_s * sum(chunk.tokens for chunk in batch.chunks)
            + self.decode_s * batch.decoding_count
            + self.context_token_s * batch.decode_context_tokens
        )


MEASURED: Final = StepCosts()
"""Of the benchmark's engine, see above."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--stable", type=float, default=STABLE_SHARE)
    parser.add_argument("--slice", type=int, default=4)
    parser.add_argument("--kind", choices=KINDS, help="by default all")
    parser.add_argument("--block-ms", type=float, help="of copying a block, by default as measured")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    costs = MEASURED
    if options.block_ms is not None:
        if not 0 <= options.block_ms < math.inf:
            parser.error("--block-ms takes milliseconds, 0 or more")
        costs = costs._replace(block_s=options.block_ms / 1000)
    play = partial(serve, costs=costs)
    cases: list[dict[str, Any]] = []
    for kind in [options.kind] if options.kind else KINDS:
        lengths = KINDS[kind]
        capacity = TRIAL_COUNT / max(
            row.last_token_s
            for row in play(PolicyName.FCFS, 1, [(0.0, *each) for each in lengths(TRIAL_COUNT, 0)])
        )
        rate = options.stable * capacity
        calm = play(PolicyName.FCFS, 1, steady(lengths(TRIAL_COUNT, 1), rate, 1))
        service_s = statistics.fmean(row.completion_s for row in calm)
        for seed in range(options.seeds):
            arrivals = paper_burst(rate, service_s, seed, lengths)
            fcfs = play(PolicyName.FCFS, options.slice, arrivals)
            recompute = play(PolicyName.CFS, options.slice, arrivals, pages=False)
            for policy in POLICIES:
                found = compare(play(policy, options.slice, arrivals), fcfs, recompute)
                cases.append({"lengths": kind, "seed": seed, "policy": policy.value, **found})
        if not options.json:
            for policy in POLICIES:
                show(kind, policy, [case for case in cases if case["lengths"] == kind])
    if options.json:
        print(json.dumps(cases))


def serve(
    policy: PolicyName,
    slice_iterations: int,
    arrivals: list[tuple[float, int, int]],
    *,
    pages: bool = True,
    blocks: int = BLOCKS,
    costs: StepCosts = MEASURED,
) -> list[Served]:
    """All requests on an engine of its own; one that does not page computes again."""
    store = None
    if pages and policy is not PolicyName.FCFS:
        # Blocks that cost nothing to copy are copied in no time that shows.
        rate = BLOCK_TOKENS * KV_BYTES_PER_TOKEN / max(costs.block_s, 1e-9)
        store = PageStore("peer", 10**9, rate, is_overlapped=False, location=PagingTier.PEER)
    engine = Engine(
        "model",
        EngineSettings(
            max_num_batched_tokens=512,
            steps_in_flight=1,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            may_recompute=False,
        ),
        IterationTime("cpu", lambda _: 0.0, costs.computing_s, lambda _: 0.0, costs.step_s),
        PagedMemory(blocks, BLOCK_TOKENS),
        store,
        policy_named(
            policy, FairSettings(slice_iterations=slice_iterations), block_tokens=BLOCK_TOKENS
        ),
    )
    return engine.run([Arrival(str(index), *each) for index, each in enumerate(arrivals)])


def compare(rows: list[Served], fcfs: list[Served], recompute: list[Served]) -> dict[str, float]:
    """The keys of `vllm_burst.py` that a burst has."""

    def p99(run: list[Served]) -> float:
        return statistics.quantiles([row.ttft_s for row in run], n=100, method="inclusive")[98]

    def throughput(run: list[Served]) -> float:
        spans = [(row.arrival_s, row.last_token_s) for row in run]
        return sum(row.output_tokens for row in run) / busy_s(spans)

    def done(run: list[Served]) -> list[float]:
        return [row.completion_s for row in run]

    return {
        "ttft_p99_gain": p99(fcfs) / p99(rows),
        "ttft_max_gain": max(row.ttft_s for row in fcfs) / max(row.ttft_s for row in rows),
        "completion_ratio_vs_fcfs": statistics.fmean(done(rows)) / statistics.fmean(done(fcfs)),
        "completion_max_ratio_vs_fcfs": max(done(rows)) / max(done(fcfs)),
        "throughput_ratio_vs_fcfs": throughput(rows) / throughput(fcfs),
        "completion_gain_vs_recompute": statistics.fmean(done(recompute))
        / statistics.fmean(done(rows)),
    }


def show(kind: str, policy: PolicyName, cases: list[dict[str, Any]]) -> None:
    """Medians of one policy and kind, and how many bursts hold."""
    mine = [case for case in cases if case["policy"] == policy.value]
    bars = {
        "ttft_p99_gain": (1, 5.0),
        "ttft_max_gain": (1, 5.0),
        "completion_ratio_vs_fcfs": (-1, MEAN_BAR.get(policy, 1.5)),
        "completion_max_ratio_vs_fcfs": (-1, 1.05),
        "throughput_ratio_vs_fcfs": (1, 1.0),
        "completion_gain_vs_recompute": (1, 2.0),
    }
    parts = []
    for key, (sign, bar) in bars.items():
        held = sum(sign * case[key] >= sign * bar for case in mine)
        parts.append(f"{key} {statistics.median(case[key] for case in mine):.2f} ({held})")
    every = sum(
        all(sign * case[key] >= sign * bar for key, (sign, bar) in bars.items()) for case in mine
    )
    print(f"{kind}, {policy}: {', '.join(parts)}; all: {every} of {len(mine)}", flush=True)


if __name__ == "__main__":
    main()
