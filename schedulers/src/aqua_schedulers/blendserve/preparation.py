"""Everything that is decided before the run: tree, lengths, densities, order.

One call prepares a pool for either policy; the data-parallel split and the batch tool's report
read the same object.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from jaxtyping import Float64, Int64

from aqua_schedulers.blendserve.cost import ResourceCost
from aqua_schedulers.blendserve.foresight import ForesightBlend
from aqua_schedulers.blendserve.lengths import LengthEstimate, RequestPool
from aqua_schedulers.blendserve.order import (
    SPLIT_SHARE,
    BlendOrder,
    TreeResources,
    blend_order,
    charged,
    fresh_tokens,
    weigh,
)
from aqua_schedulers.blendserve.paper import PaperBlend
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
        lengths: Estimated output lengths.
        resources: Compute and memory time over the tree.
        order: Requests from compute-bound to memory-bound.
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
    ) -> PaperBlend | ForesightBlend:
        """A policy that runs this pool once.

        Args:
            capacity_tokens: KV tokens that fit in the engine's memory.
        """
        if mode is BlendMode.PAPER:
            return PaperBlend(self, max_step_tokens=max_step_tokens)
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
    fresh = fresh_tokens(pool.tree, order.requests)
    compute = np.empty(pool.request_count)
    compute[order.requests] = charged(pool.tree, resources.fresh_compute_s, order.requests)
    return PreparedPool(pool, cost, lengths, resources, order, fresh, compute)
