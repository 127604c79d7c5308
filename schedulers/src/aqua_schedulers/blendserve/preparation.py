"""Everything that is decided before the run: tree, lengths, densities, order.

One call prepares a pool for either policy; the batch tool's report reads the same object. For
several engines `split_among` cuts the order (section 6.1, "Data parallelism"): each gets one
stretch from the left end and one from the right, chosen so that both resources are divided evenly.
Every part then has the density of the whole pool, and only the prompts along the cuts are computed
twice. The last engine gets what lies in the middle.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from jaxtyping import Float64, Int32, Int64

from aqua_protocol.errors import ConfigError
from aqua_schedulers.blendserve.cost import ResourceCost
from aqua_schedulers.blendserve.foresight import ForesightBlend
from aqua_schedulers.blendserve.lengths import LengthEstimate, RequestPool
from aqua_schedulers.blendserve.order import (
    SPLIT_SHARE,
    BlendOrder,
    TreeResources,
    blend_order,
    charged,
    weigh,
)
from aqua_schedulers.blendserve.paper import DENSE_TOKENS, PaperBlend
from aqua_schedulers.blendserve.tree import PrefixTree

MAX_STEP_TOKENS = 2048
"""Tokens per step where nothing else is said: vLLM's offline default is of this size. Doubled,
steps take longer and waste less of the weights they read."""


class BlendMode(StrEnum):
    """The two policies that run a prepared pool: ours, the default, and the one as published."""

    FORESIGHT = "foresight"
    PAPER = "paper"


@dataclass(frozen=True, eq=False)
class PreparedPool:
    """A pool in blended order, with what was used to find it.

    Attributes:
        fresh_tokens: Prompt tokens that no earlier request of the order computes, by request.
        compute_s: Compute of each request, shared prefixes charged to the first in order.
    """

    pool: RequestPool
    cost: ResourceCost
    lengths: LengthEstimate
    resources: TreeResources
    order: BlendOrder
    fresh_tokens: Int64[np.ndarray, " requests"]
    compute_s: Float64[np.ndarray, " requests"]

    @property
    def tree(self) -> PrefixTree:
        """The prefix tree of the pool."""
        return self.pool.tree

    @property
    def reserved_tokens(self) -> Int64[np.ndarray, " requests"]:
        """KV tokens of each request at its expected peak."""
        peak = self.tree.prompt_tokens + np.ceil(self.lengths.mean).astype(np.int64)
        return np.asarray(peak)

    def policy(
        self,
        *,
        capacity_tokens: int,
        mode: BlendMode = BlendMode.FORESIGHT,
        max_step_tokens: int = MAX_STEP_TOKENS,
        dense_tokens: int = DENSE_TOKENS,
    ) -> PaperBlend | ForesightBlend:
        """A policy that runs this pool once, where `capacity_tokens` of KV fit in memory.

        Args:
            dense_tokens: Fewest to which the published policy paces a step.
        """
        if mode is BlendMode.PAPER:
            return PaperBlend(self, max_step_tokens=max_step_tokens, least_step_tokens=dense_tokens)
        return ForesightBlend(
            self, capacity_tokens=capacity_tokens, max_step_tokens=max_step_tokens
        )


def prepare(
    pool: RequestPool,
    cost: ResourceCost,
    *,
    lengths: LengthEstimate | None = None,
    split_share: float = SPLIT_SHARE,
) -> PreparedPool:
    """Estimate lengths, weigh the tree and order the pool.

    Args:
        lengths: Estimates from a larger pool that this one is part of; None to estimate here.
    """
    if lengths is None:
        lengths = pool.estimate()
    resources = weigh(pool.tree, lengths, cost)
    order = blend_order(pool.tree, resources, split_share=split_share)
    fresh = charged(pool.tree, pool.tree.edge_tokens, order.requests).astype(np.int64)
    compute = charged(pool.tree, resources.fresh_compute_s, order.requests)
    return PreparedPool(pool, cost, lengths, resources, order, fresh, compute)


def split_among(prepared: PreparedPool, engine_count: int) -> list[Int32[np.ndarray, " part"]]:
    """Requests of each engine, in the order in which the pool holds them.

    Returns:
        One array per engine; together every request exactly once. An engine may get none when
        there are more engines than requests.

    Raises:
        ConfigError: `engine_count` is not positive.
    """
    if engine_count < 1:
        raise ConfigError(f"cannot split among {engine_count} engines", remedy="Use at least one.")
    requests = prepared.order.requests
    count = len(requests)
    # Sums up to each place: what the first k requests of the order take.
    compute = np.concatenate([[0.0], np.cumsum(prepared.compute_s[requests])])
    memory = np.concatenate([[0.0], np.cumsum(prepared.resources.leaf_memory_s[requests])])
    left, right = 0, count
    parts = []
    for engine in range(engine_count - 1):
        share = (engine + 1) / engine_count
        cut_left, cut_right = _cuts(compute, memory, share, left, right)
        parts.append(np.concatenate([requests[left:cut_left], requests[cut_right:right]]))
        left, right = cut_left, cut_right
    parts.append(requests[left:right])
    return parts


def _cuts(
    compute: Float64[np.ndarray, " places"],
    memory: Float64[np.ndarray, " places"],
    share: float,
    least_left: int,
    most_right: int,
) -> tuple[int, int]:
    """Places (l, r) such that [0, l) and [r, n) together hold `share` of both resources.

    For each l there is one r that makes the memory right; more on the left means less on the
    right, and the left is denser, so the compute of the pair grows with l: bisection.
    """
    count = len(compute) - 1
    low, high = least_left, most_right
    while low < high:
        middle = (low + high) // 2
        right = _right_for(memory, share * memory[-1] - memory[middle], middle, most_right)
        held = compute[middle] + compute[count] - compute[right]
        if held < share * compute[-1]:
            low = middle + 1
        else:
            high = middle
    return low, _right_for(memory, share * memory[-1] - memory[low], low, most_right)


def _right_for(memory: Float64[np.ndarray, " places"], wanted: float, least: int, most: int) -> int:
    """First place of a right stretch that holds about `wanted` memory seconds."""
    place = int(np.searchsorted(memory, memory[-1] - wanted))
    return min(most, max(least, place))
