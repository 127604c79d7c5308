"""Blends of sources with a wanted compute density and prefix sharing: BlendServe's workloads.

How many requests of each source: density and sharing of a blend are ratios of sums, so for a given
number of requests three linear equations give the three counts. A compute-bound source and OpenVid
set the density, MMLU sets the sharing.

Requests come in random order (arrival order of the pool); the tree is exact, as every source knows
which prefix its requests share. MMLU has 14,042 questions and large blends need more: lengths are
drawn again, as new questions of the same subjects.

Source: BlendServe sections 5.1 and A.1. The section says 400,000 requests, the appendix 40,000; the
results are those of 400,000.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Float64, Int64

from aqua_protocol.errors import ConfigError
from aqua_schedulers.blendserve.tree import PrefixTree
from aqua_simulator.offline.cost import StepCost
from aqua_simulator.offline.engine import optimal
from aqua_simulator.offline.workload import OfflineWorkload
from aqua_simulator.workloads.sources import MMLU, OPENVID, Source

_PROBE_REQUESTS = 20_000
"""Requests drawn to learn a source's means; the counts move by less than one in a hundred. Doubled,
they move by less and a blend is drawn later."""


def draw(counts: Sequence[tuple[Source, int]], *, seed: int) -> OfflineWorkload:
    """A workload of so many requests of each source."""
    generator = np.random.default_rng(seed)
    parents: list[Int64[np.ndarray, " _"]] = []
    tokens: list[Int64[np.ndarray, " _"]] = []
    leaves: list[Int64[np.ndarray, " _"]] = []
    outputs: list[Int64[np.ndarray, " _"]] = []
    known: list[Bool[np.ndarray, " _"]] = []
    node_count = 0
    for source, count in counts:
        prompts, output = source.lengths(count, generator)
        groups = source.group_lengths()
        root = node_count
        parents.append(np.concatenate([[-1], np.full(len(groups), root)]))
        tokens.append(np.concatenate([[source.system_tokens], groups]))
        node_count += 1 + len(groups)
        member = generator.integers(0, len(groups), count) + 1 if len(groups) else 0
        parents.append(np.broadcast_to(root + member, count))
        tokens.append(prompts)
        leaves.append(node_count + np.arange(count))
        node_count += count
        outputs.append(output)
        known.append(np.full(count, source.known_output))
    order = np.arange(sum(count for _, count in counts))
    generator.shuffle(order)
    ends = np.concatenate(leaves)[order]
    return OfflineWorkload(
        PrefixTree.from_segments(np.concatenate(parents), np.concatenate(tokens), ends),
        output_tokens=np.concatenate(outputs)[order].astype(np.int64),
        known_output=np.concatenate(known)[order],
    )


@lru_cache(maxsize=64)
def _means(source: Source, cost: StepCost) -> Float64[np.ndarray, " 4"]:
    """What a request of the source brings to a blend, shared prefixes computed once over many.

    Returns:
        Compute seconds, memory seconds, tokens that sharing saves, and all tokens, per request.
    """
    workload = draw([(source, _PROBE_REQUESTS)], seed=0)
    bound = optimal(workload, cost)
    saved = int(workload.prompt_tokens.sum()) - workload.tree.distinct_tokens
    sums = [bound.compute_s, bound.memory_s, saved, workload.total_tokens]
    return np.array(sums) / _PROBE_REQUESTS


def blend_counts(
    compute_source: Source, *, density: float, sharing: float, request_count: int, cost: StepCost
) -> list[tuple[Source, int]]:
    """Requests of `compute_source`, MMLU and OpenVid that give the density and the sharing.

    Raises:
        ConfigError: No such blend exists.
    """
    sources = (compute_source, MMLU, OPENVID)
    compute_s, memory_s, saved, total = np.array([_means(source, cost) for source in sources]).T
    system = np.array([compute_s - density * memory_s, saved - sharing * total, np.ones(3)])
    scale = np.abs(system).max(axis=1)
    solution = np.linalg.solve(system / scale[:, None], np.array([0.0, 0.0, request_count]) / scale)
    counts = np.rint(solution).astype(int)
    if np.any(counts < 0):
        raise ConfigError(
            f"no blend of {', '.join(source.name for source in sources)} has density {density} "
            f"and sharing {sharing}",
            remedy="Move both towards what the sources have by themselves.",
        )
    return list(zip(sources, counts.tolist(), strict=True))
