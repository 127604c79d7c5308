"""What blending costs: preprocessing a large pool, and deciding each step.

    python benchmarks/blendserve.py [--requests 400000] [--json]

Preprocessing is everything from token ids to a policy: prefix tree, sampling, densities, sort,
split, merge. The pool is made of the paper's three kinds (benchmark questions under long shared
instructions, chats under a system prompt, generated media), scaled to the same number of prompt
tokens per request as its 400,000 requests and 230M tokens. Steps are timed one by one in a run of
the forecast engine over a smaller pool, whose batch is as large.

Paper: preprocessing "several minutes", 0.08 ms a step on average, P99 0.23 ms (section 5.5).
"""

from __future__ import annotations

import argparse
import json
import resource
import time

import numpy as np
from numpy.typing import NDArray

from aqua_batch.forecast import forecast
from aqua_protocol.decoders import DECODERS
from aqua_protocol.hardware import GPUS
from aqua_schedulers.admission import AdmissionPolicy, BatchView, StepPlan
from aqua_schedulers.blendserve import (
    UNKNOWN,
    BlendMode,
    PrefixTree,
    PreparedPool,
    RequestPool,
    ResourceCost,
    choose_sample,
    prepare,
)

COST = ResourceCost.of(DECODERS["Llama-3.1-8B"], GPUS["A100-80GB"])
CAPACITY_TOKENS = 457_000
VOCABULARY = 128_000


def make_pool(count: int, seed: int) -> tuple[NDArray[np.int32], NDArray[np.int64], RequestPool]:
    """Token ids, offsets, and a pool without its tree's cost; about 575 tokens a prompt."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(3, count, p=[0.6, 0.399, 0.001])
    subjects = [rng.integers(0, VOCABULARY, 620, dtype=np.int32) for _ in range(57)]
    heads = [rng.integers(0, VOCABULARY, 40, dtype=np.int32) for _ in range(3)]
    subject = rng.integers(0, 57, count)
    own = np.where(kind == 0, 110, np.minimum(4000, rng.lognormal(5.2, 1.0, count)).astype(int) + 1)
    shared = np.where(kind == 0, 660, 40)
    offsets = np.concatenate([[0], np.cumsum(own + shared)]).astype(np.int64)
    tokens = np.empty(int(offsets[-1]), np.int32)
    for request in range(count):
        place = offsets[request]
        tokens[place : place + 40] = heads[kind[request]]
        if kind[request] == 0:
            tokens[place + 40 : place + 660] = subjects[subject[request]]
        start, end = place + shared[request], offsets[request + 1]
        tokens[start:end] = rng.integers(0, VOCABULARY, end - start, dtype=np.int32)
    outputs = np.select(
        [kind == 0, kind == 1],
        [2, np.minimum(2000, rng.lognormal(4.2, 1.0, count)) + 1],
        np.minimum(100_000, rng.lognormal(9.3, 0.8, count)) + 1,
    ).astype(np.int32)
    return tokens, offsets, _pool(tokens, offsets, kind, outputs)


def _pool(
    tokens: NDArray[np.int32],
    offsets: NDArray[np.int64],
    kind: NDArray[np.int64],
    outputs: NDArray[np.int32],
) -> RequestPool:
    tree = PrefixTree.from_tokens(tokens, offsets)
    known = np.where(kind == 2, outputs, UNKNOWN).astype(np.int32)
    sampled = np.full(len(outputs), UNKNOWN, np.int32)
    chosen = choose_sample(tree, known, probability=0.01, seed=0)
    sampled[chosen] = outputs[chosen]
    return RequestPool(tree, known, sampled)


class Timed:
    """A policy, and how long each of its answers took."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self._policy = policy
        self.seconds: list[float] = []

    def plan(self, view: BatchView) -> StepPlan:
        """Answer and note the time."""
        started = time.perf_counter()
        answer = self._policy.plan(view)
        self.seconds.append(time.perf_counter() - started)
        return answer


def time_steps(prepared: PreparedPool, mode: BlendMode) -> dict[str, float]:
    """Milliseconds per step of one policy."""
    timed = Timed(prepared.policy(capacity_tokens=CAPACITY_TOKENS, mode=mode))
    course = forecast(prepared, timed, capacity_tokens=CAPACITY_TOKENS)
    spent = np.array(timed.seconds[1:]) * 1e3  # the first includes loading compiled code
    return {
        "steps": float(course.step_count),
        "mean_ms": float(spent.mean()),
        "p99_ms": float(np.quantile(spent, 0.99)),
        "share_of_optimal": course.optimal_s / course.makespan_s,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400_000)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    _, _, warm = make_pool(2_000, seed=1)
    prepare(warm, COST)  # compiles
    started = time.perf_counter()
    tokens, offsets, pool = make_pool(arguments.requests, seed=0)
    making = time.perf_counter() - started
    started = time.perf_counter()
    tree = PrefixTree.from_tokens(tokens, offsets)
    built = time.perf_counter()
    choose_sample(tree, pool.known_tokens, probability=0.01, seed=0)
    prepared = prepare(RequestPool(tree, pool.known_tokens, pool.sampled_tokens), COST)
    prepared.policy(capacity_tokens=CAPACITY_TOKENS)
    ended = time.perf_counter()
    small = prepare(make_pool(max(2_000, arguments.requests // 20), seed=2)[2], COST)
    result = {
        "requests": arguments.requests,
        "prompt_tokens": len(tokens),
        "optimal_sharing": tree.optimal_sharing,
        "tree_s": built - started,
        "order_s": ended - built,
        "preprocessing_s": ended - started,
        "making_the_pool_s": making,
        "peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "step": {mode.value: time_steps(small, mode) for mode in BlendMode},
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(
        f"{result['requests']} requests, {len(tokens) / 1e6:.0f}M prompt tokens: preprocessing "
        f"{result['preprocessing_s']:.1f} s (tree {result['tree_s']:.1f} s), peak memory "
        f"{result['peak_memory_gib']:.1f} GiB with the pool itself"
    )
    for mode in BlendMode:
        step = time_steps(small, mode)
        print(
            f"{mode.value:10} {step['mean_ms']:.3f} ms a step, p99 {step['p99_ms']:.3f} ms "
            f"({step['steps']:.0f} steps)"
        )


if __name__ == "__main__":
    main()
