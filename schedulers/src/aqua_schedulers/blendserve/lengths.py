"""How long requests will generate: known, sampled, or taken from the requests most like them.

Output length decides whether a request is compute- or memory-bound, and it is unknown before.
Requests with a common prefix tend to have a common purpose, so the lengths of a small sample are
spread over the prefix tree: a request takes the mean of the nearest subtree around it that holds
a sample. For a subtree without a sample of its own that is its siblings' mean, as in the paper.
Media generation states its length in the request; such lengths are used as they are.

Where prompts share nothing, prefixes explain nothing. Beyond the paper a caller may therefore say
of what *kinds* requests are (by task, by length of the prompt): a request takes the mean of the
smallest group that holds it and evidence, a subtree or a kind.

Beyond the paper we keep the second moment too: memory time grows with the square of the length,
and the square of a mean is far below the mean of squares where lengths scatter (a lognormal with
sigma 1 has a ratio of 2.7). The paper's mode ignores it.

Source: BlendServe section 3.2, "Output length sampling for compute density".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from aqua_protocol.errors import ConfigError
from aqua_schedulers.blendserve.tree import ROOT, PrefixTree
from aqua_schedulers.compiled import compiled

UNKNOWN: Final = -1
"""Fixed: stands for an unknown length in an array of lengths."""

DEFAULT_OUTPUT_TOKENS: Final = 256.0
"""Tokens where there is neither a sample nor a limit: the mean that the paper gives chat requests.
Doubled, such pools count as more memory-bound."""


LEAST_OF_KIND: Final = 4
"""Observed lengths of a kind before it is believed: the mean of one or two says little of lengths
that scatter. Doubled, rare kinds take the mean of their neighbours in the tree."""


@dataclass(frozen=True, eq=False)
class LengthEstimate:
    """Output lengths as far as they are known before the run.

    Attributes:
        mean: Expected output tokens, at least 1, shape (num_requests,).
        square: Expected square of the output tokens, at least mean^2, shape (num_requests,).
        exact: Whether `mean` is the length itself, shape (num_requests,).
        group: Tree node, or number of a kind beyond the nodes', whose sample a request relies on,
            shape (num_requests,); what the run observes about one of a group holds for the others.
    """

    mean: Float64[np.ndarray, " requests"]
    square: Float64[np.ndarray, " requests"]
    exact: Bool[np.ndarray, " requests"]
    group: Int32[np.ndarray, " requests"]

    def take(self, requests: Int64[np.ndarray, " taken"]) -> LengthEstimate:
        """The estimates of some requests, as a pool of their own."""
        return LengthEstimate(
            self.mean[requests], self.square[requests], self.exact[requests], self.group[requests]
        )


def choose_sample(
    tree: PrefixTree, known_tokens: Int32[np.ndarray, " requests"], *, probability: float, seed: int
) -> Int32[np.ndarray, " sampled"]:
    """Requests whose length is worth finding out before the run, in ascending order.

    Requests of known length are never chosen. At least one is chosen where any is unknown.

    Raises:
        ConfigError: `probability` is not in (0, 1].
    """
    if not 0.0 < probability <= 1.0:
        raise ConfigError(f"sampling probability {probability} is not in (0, 1]")
    unknown = np.flatnonzero(known_tokens == UNKNOWN)
    if len(unknown) == 0:
        return np.empty(0, np.int32)
    count = max(1, round(probability * len(unknown)))
    # Every k-th in depth-first order from a random start: each subtree is sampled in proportion
    # to its size, where independent draws would leave small ones out by bad luck.
    order = tree.depth_first()
    order = order[known_tokens[order] == UNKNOWN]
    start = np.random.default_rng(seed).random()
    picks = ((np.arange(count) + start) * len(order) / count).astype(np.int64)
    return np.sort(order[picks]).astype(np.int32)


@dataclass(frozen=True, eq=False)
class RequestPool:
    """Offline requests, all known in advance; arrays have one entry per request.

    Attributes:
        tree: The prompts.
        known_tokens: Output lengths that the requests state themselves, UNKNOWN elsewhere.
        sampled_tokens: Output lengths found out by sampling, UNKNOWN elsewhere.
        limit_tokens: Most that each request may generate (`max_tokens`); None without limits.
        kinds: For each way to tell kinds of requests apart, the number of each request's, from 0.
    """

    tree: PrefixTree
    known_tokens: Int32[np.ndarray, " requests"]
    sampled_tokens: Int32[np.ndarray, " requests"]
    limit_tokens: Int32[np.ndarray, " requests"] | None = None
    kinds: tuple[Int32[np.ndarray, " requests"], ...] = ()

    def __post_init__(self) -> None:
        count = self.tree.request_count
        for name in ("known_tokens", "sampled_tokens", "limit_tokens"):
            array = getattr(self, name)
            if array is not None and len(array) != count:
                raise ConfigError(f"{name} has {len(array)} entries, the tree {count} requests")
            if array is not None and np.any((array < 1) & (array != UNKNOWN)):
                raise ConfigError(f"{name} must be at least 1, or UNKNOWN")

    @property
    def request_count(self) -> int:
        """Requests of the pool."""
        return self.tree.request_count

    def estimate(self) -> LengthEstimate:
        """Output lengths as far as the pool knows them."""
        tree, known, observed = self.tree, self.known_tokens, self.sampled_tokens
        given = np.where(known != UNKNOWN, known, observed)
        exact = given != UNKNOWN
        sampled = (observed != UNKNOWN) & (known == UNKNOWN)
        nodes = np.zeros(len(tree.parent))
        leaves = nodes[tree.inner_count :]
        leaves[sampled] = 1.0
        number = tree.subtree_sums(nodes)
        leaves[sampled] = observed[sampled]
        total = tree.subtree_sums(nodes)
        leaves[sampled] = observed[sampled].astype(np.float64) ** 2
        squares = tree.subtree_sums(nodes)
        group = _nearest_sampled(tree.parent, number, tree.inner_count)
        is_leaf = np.zeros(len(nodes))
        is_leaf[tree.inner_count :] = 1.0
        size = tree.subtree_sums(is_leaf)
        for kinds in self.kinds:
            first, count = len(number), int(kinds.max(initial=-1)) + 1
            lengths = np.where(sampled, observed, 0).astype(np.float64)
            of_kind = (sampled.astype(np.float64), lengths, lengths**2, np.ones(len(kinds)))
            number, total, squares, size = (
                np.concatenate([sums, np.bincount(kinds, values, count)])
                for sums, values in zip((number, total, squares, size), of_kind, strict=True)
            )
            kind = (first + kinds).astype(np.int32)
            is_better = (number[kind] >= LEAST_OF_KIND) & (size[kind] < size[group])
            group = np.where(is_better, kind, group)
        if number[ROOT] > 0:
            mean, square = total[group] / number[group], squares[group] / number[group]
        else:
            mean = np.full(self.request_count, DEFAULT_OUTPUT_TOKENS)
            square = mean**2
        if self.limit_tokens is not None:
            scale = np.minimum(1.0, self.limit_tokens / mean)
            mean, square = mean * scale, square * scale**2
        mean = np.maximum(1.0, np.where(exact, given, mean))
        square = np.where(exact, mean**2, np.maximum(square, mean**2))
        return LengthEstimate(mean, square, exact, group)


@compiled
def _nearest_sampled(
    parent: Int32[np.ndarray, " nodes"], number: Float64[np.ndarray, " nodes"], inner_count: int
) -> Int32[np.ndarray, " requests"]:
    """The lowest ancestor of each request that holds a sample; the root where none does."""
    holder = np.zeros(inner_count, np.int32)
    for node in range(1, inner_count):
        holder[node] = node if number[node] > 0 else holder[parent[node]]
    group = np.empty(len(parent) - inner_count, np.int32)
    for request in range(len(group)):
        group[request] = holder[parent[inner_count + request]]
    return group
