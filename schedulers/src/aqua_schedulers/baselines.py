"""The orders that blending is measured against, behind the same interface.

FCFS is the file's order; DFS, depth first, is the upper bound of prefix sharing; RANDOM is
NanoFlow-Balance of the paper; BALANCED spreads compute- and memory-bound requests evenly without
looking at prefixes. `OrderedAdmission` feeds any of them as engines do: in sequence, as memory
allows, at one token budget.

Source: BlendServe section 2.4, Table 1; section 5.1, "Baseline frameworks".
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from jaxtyping import Float64, Int32, Int64

from aqua_schedulers.admission import BatchView, StepPlan
from aqua_schedulers.blendserve.dual_scanner import MAX_ADMITTED
from aqua_schedulers.blendserve.order import charged
from aqua_schedulers.blendserve.tree import PrefixTree
from aqua_schedulers.compiled import compiled


class Baseline(StrEnum):
    """The orders by name."""

    DFS = "dfs"
    FCFS = "fcfs"
    RANDOM = "random"
    BALANCED = "balanced"

    def order(
        self, tree: PrefixTree, density: Float64[np.ndarray, " requests"], *, seed: int
    ) -> Int32[np.ndarray, " requests"]:
        """The requests of a tree, whose compute densities are given, in this order."""
        count = tree.request_count
        match self:
            case Baseline.DFS:
                return tree.depth_first()
            case Baseline.FCFS:
                return np.arange(count, dtype=np.int32)
            case Baseline.RANDOM:
                return np.random.default_rng(seed).permutation(count).astype(np.int32)
            case Baseline.BALANCED:
                # By density, then spread by the golden ratio: every stretch of this low-discrepancy
                # sequence holds the same mix, where a shuffle clumps.
                rank = np.argsort(-density, kind="stable")
                place = np.modf(np.arange(count) * ((np.sqrt(5.0) - 1.0) / 2.0))[0]
                return rank[np.argsort(place, kind="stable")].astype(np.int32)


class OrderedAdmission:
    """Admits in one given order while the predicted peak memory fits.

    Args:
        order: Every request once, shape (num_requests,).
        reserved_tokens: KV tokens to keep for each request, prompt and expected output; 0 admits
            whatever has physical room, as vLLM does, and leaves the rest to retraction.
        tree: The prompts; a step is full when the tokens that its requests compute anew fill it.
        token_budget: Tokens per step.
    """

    def __init__(
        self,
        order: Int32[np.ndarray, " requests"],
        reserved_tokens: Int64[np.ndarray, " requests"],
        tree: PrefixTree,
        *,
        token_budget: int,
    ) -> None:
        self._order = order.astype(np.int32)
        self._reserved = reserved_tokens.astype(np.int64)
        self._fresh = charged(tree, tree.edge_tokens, order).astype(np.int64)
        self._budget = token_budget
        self._retry: list[int] = []
        self._next = 0
        self._held = 0
        self._out = np.empty(MAX_ADMITTED, np.int32)
        self._nothing = np.empty(0, np.int32)

    def plan(self, view: BatchView) -> StepPlan:
        """The next requests in order."""
        if len(view.finished):
            self._held -= int(self._reserved[view.finished].sum())
        for returned in (view.refused, view.retracted):
            if len(returned):
                self._held -= int(self._reserved[returned].sum())
                self._retry[:0] = returned.tolist()
        running = view.decoding_count + view.prefilling_count
        room = view.capacity_tokens - self._held
        if self._retry:
            # One at a time: they were handed back because memory is short.
            request = self._retry[0]
            is_full = bool(self._reserved[request] > room)
            if running and (is_full or len(view.refused)):
                return StepPlan(self._nothing, self._budget, until_event=is_full)
            del self._retry[0]
            self._held += int(self._reserved[request])
            return StepPlan(np.array([request], np.int32), self._budget)
        wanted = self._budget - view.decoding_count - view.pending_prefill_tokens
        count = _in_order(
            self._order, self._reserved, self._fresh, self._next, room, wanted, self._out
        )
        if count == 0 and running == 0 and self._next < len(self._order):
            self._out[0], count = self._order[self._next], 1
        if count == 0:
            # Only what ends makes room for the next; a step that is full is so for this step alone.
            is_over = self._next == len(self._order)
            is_full = is_over or bool(self._reserved[self._order[self._next]] > room)
            return StepPlan(self._nothing, self._budget, until_event=is_full)
        admitted = self._out[:count].copy()
        self._next += count
        self._held += int(self._reserved[admitted].sum())
        return StepPlan(admitted, self._budget)


@compiled
def _in_order(
    order: Int32[np.ndarray, " requests"],
    reserved: Int64[np.ndarray, " requests"],
    fresh: Int64[np.ndarray, " requests"],
    place: int,
    room: int,
    wanted: int,
    out: Int32[np.ndarray, " max_admitted"],
) -> int:
    count = 0
    while place + count < len(order) and count < len(out) and wanted > 0:
        request = order[place + count]
        if reserved[request] > room:
            break
        room -= reserved[request]
        wanted -= fresh[request] + 1
        out[count] = request
        count += 1
    return count
