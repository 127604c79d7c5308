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
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Int64

from aqua_protocol.errors import ConfigError
from aqua_simulator.offline.cost import StepCost
from aqua_simulator.offline.engine import optimal
from aqua_simulator.offline.workload import OfflineWorkload
from aqua_simulator.workloads.sources import MMLU, OPENVID, Source

_PROBE_REQUESTS = 20_000
"""Requests drawn to learn a source's means; the counts move by less than one in a hundred. Doubled,
they move by less and a blend is drawn later."""


@dataclass(frozen=True, slots=True)
class Means:
    """Per-request means of a source, shared prefixes computed once over many requests."""

    compute_s: float
    memory_s: float
    saved_tokens: float
    total_tokens: float


def draw(counts: Sequence[tuple[Source, int]], *, seed: int) -> OfflineWorkload:
    """A workload of so many requests of each source."""
    generator = np.random.default_rng(seed)
    parents: list[Int64[np.ndarray, " _"]] = []
    tokens: list[Int64[np.ndarray, " _"]] = []
    leaves: list[Int64[np.ndarray, " _"]] = []
    outputs: list[Int64[np.ndarray, " _"]] = []
    origins: list[Int64[np.ndarray, " _"]] = []
    node_count = 0
    for number, (source, count) in enumerate(counts):
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
        origins.append(np.full(count, number))
    order = np.arange(sum(count for _, count in counts))
    generator.shuffle(order)
    source_of = np.concatenate(origins)[order].astype(np.int64)
    known = np.array([source.known_output for source, _ in counts])
    return OfflineWorkload(
        node_parent=np.concatenate(parents).astype(np.int64),
        node_tokens=np.concatenate(tokens).astype(np.int64),
        leaf=np.concatenate(leaves)[order].astype(np.int64),
        output_tokens=np.concatenate(outputs)[order].astype(np.int64),
        known_output=known[source_of],
        source=source_of,
        source_names=tuple(source.name for source, _ in counts),
    )


@lru_cache(maxsize=64)
def means(source: Source, cost: StepCost, *, seed: int = 0) -> Means:
    """What a request of the source brings to a blend."""
    workload = draw([(source, _PROBE_REQUESTS)], seed=seed)
    bound = optimal(workload, cost)
    saved = int(workload.prompt_tokens.sum()) - workload.distinct_prompt_tokens
    return Means(
        bound.compute_s / _PROBE_REQUESTS,
        bound.memory_s / _PROBE_REQUESTS,
        saved / _PROBE_REQUESTS,
        workload.total_tokens / _PROBE_REQUESTS,
    )


def blend_counts(
    compute_source: Source, *, density: float, sharing: float, request_count: int, cost: StepCost
) -> list[tuple[Source, int]]:
    """Requests of `compute_source`, MMLU and OpenVid that give the density and the sharing.

    Raises:
        ConfigError: No such blend exists.
    """
    sources = (compute_source, MMLU, OPENVID)
    rows = [means(source, cost) for source in sources]
    system = np.array(
        [
            [row.compute_s - density * row.memory_s for row in rows],
            [row.saved_tokens - sharing * row.total_tokens for row in rows],
            [1.0 for _ in rows],
        ]
    )
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
