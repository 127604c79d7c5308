"""The prefix tree of a pool of requests, as flat arrays.

What it owns: which parts of which prompts are the same. Every request is a leaf of its own, every
inner node is a piece of prompt that at least two requests share; nodes are numbered so that a
parent comes before its children, inner nodes first, then one leaf per request. Aggregates over
subtrees are then one backward sweep, orders one forward sweep, and 400,000 requests fit in a few
tens of megabytes: no object per node, none per token.

How it is built: a group of requests that share a prefix extends it by what all of them have in
common (each compared with the first, only up to the shortest match so far), then splits by the
next token. Every prompt token that is shared is read once per group it lies in, the rest never:
O(tokens + N log N), where sorting whole prompts would read shared prefixes again and again.

Source: BlendServe section 3.1; section 4, "Offline prefix tree".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
from jaxtyping import Float64, Int32, Int64

from aqua_protocol.errors import ConfigError
from aqua_schedulers.compiled import compiled

ROOT = 0
"""Fixed: the empty prefix is node 0. It has no tokens and no parent (-1)."""

_Summed = TypeVar("_Summed", Int64[np.ndarray, " nodes"], Float64[np.ndarray, " nodes"])


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """Prompts as paths.

    Attributes:
        parent: Parent of each node, shape (num_nodes,); -1 for the root, below the node otherwise.
        edge_tokens: Tokens that a node adds to its parent's path, shape (num_nodes,).
        inner_count: Nodes that are not leaves; request r is the leaf `inner_count + r`.
    """

    parent: Int32[np.ndarray, " nodes"]
    edge_tokens: Int64[np.ndarray, " nodes"]
    inner_count: int

    @property
    def request_count(self) -> int:
        """Requests, which is leaves."""
        return len(self.parent) - self.inner_count

    @cached_property
    def end_tokens(self) -> Int64[np.ndarray, " nodes"]:
        """Tokens from the root to the end of each node, shape (num_nodes,)."""
        return _path_sums(self.parent, self.edge_tokens)

    @property
    def prompt_tokens(self) -> Int64[np.ndarray, " requests"]:
        """Prompt length of each request, shape (num_requests,)."""
        return self.end_tokens[self.inner_count :]

    @property
    def distinct_tokens(self) -> int:
        """Prompt tokens if every shared prefix is computed exactly once."""
        return int(self.edge_tokens.sum())

    @property
    def optimal_sharing(self) -> float:
        """Share of prompt tokens that perfect prefix sharing saves."""
        total = int(self.prompt_tokens.sum())
        return 1.0 - self.distinct_tokens / total if total else 0.0

    def subtree_sums(self, values: Float64[np.ndarray, " nodes"]) -> Float64[np.ndarray, " nodes"]:
        """Sum of `values` (one per node) over the subtree of each node."""
        sums = np.array(values, dtype=np.float64)
        _sum_up(self.parent, sums)
        return sums

    def path_sums(self, values: Float64[np.ndarray, " nodes"]) -> Float64[np.ndarray, " nodes"]:
        """Sum of `values` (one per node) from the root to each node, itself included."""
        return _path_sums(self.parent, np.asarray(values, dtype=np.float64))

    def depth_first(
        self, key: Float64[np.ndarray, " nodes"] | None = None
    ) -> Int32[np.ndarray, " requests"]:
        """Requests in depth-first order, siblings by ascending `key` (one per node).

        Without a key siblings keep their numbers: inner nodes as they were found, then leaves.
        """
        nodes = np.arange(len(self.parent))
        order = np.argsort(key, kind="stable") if key is not None else nodes
        leaf_count = self.subtree_sums((nodes >= self.inner_count).astype(np.float64))
        return _emit(
            self.parent, order.astype(np.int64), leaf_count.astype(np.int64), self.inner_count
        )

    @classmethod
    def from_tokens(
        cls, tokens: Int32[np.ndarray, " tokens"], offsets: Int64[np.ndarray, " requests+1"]
    ) -> PrefixTree:
        """Build the tree of prompts given as token ids.

        Args:
            tokens: All prompts, one after another, shape (num_tokens,).
            offsets: Where each prompt starts, and the end of the last, shape (num_requests + 1,).

        Raises:
            ConfigError: There are no requests.
        """
        if len(offsets) < 2:  # noqa: PLR2004 - one request has a start and an end
            raise ConfigError("a prefix tree needs at least one request")
        parent, edges, leaf_parent, inner_count = _build(
            np.ascontiguousarray(tokens, dtype=np.int32),
            np.ascontiguousarray(offsets, dtype=np.int64),
        )
        depth = _path_sums(parent[:inner_count], edges[:inner_count])
        leaf_edges = np.diff(offsets) - depth[leaf_parent]
        return cls(
            np.concatenate([parent[:inner_count], leaf_parent]),
            np.concatenate([edges[:inner_count], leaf_edges.astype(np.int64)]),
            inner_count,
        )

    @classmethod
    def from_segments(
        cls,
        parent: Int64[np.ndarray, " segments"],
        tokens: Int64[np.ndarray, " segments"],
        end: Int64[np.ndarray, " requests"],
    ) -> PrefixTree:
        """Build the tree of prompts that are already known as paths of segments.

        Args:
            parent: Parent of each segment, -1 or a lower index, shape (num_segments,).
            tokens: Tokens of each segment, shape (num_segments,).
            end: Segment at which each request's prompt ends, shape (num_requests,).

        A segment at which a single request ends and which no other continues becomes that
        request's leaf. Segments of no prompt are left out.

        Raises:
            ConfigError: A parent's index is not below its child's.
        """
        if np.any(parent >= np.arange(len(parent))):
            raise ConfigError("a segment's parent must be a segment of lower index")
        parent = np.concatenate([[-1], parent + 1]).astype(np.int32)  # All hang on a root.
        tokens, end = np.concatenate([[0], tokens]), end + 1
        ends = np.bincount(end, minlength=len(parent)).astype(np.float64)
        users = ends.copy()
        _sum_up(parent, users)
        inner = (users > ends) | (ends > 1)
        number = np.cumsum(inner) - 1
        above = number[parent]
        above[ROOT] = -1
        own = ~inner[end]
        leaf_parent = np.where(own, above[end], number[end])
        leaf_edges = np.where(own, tokens[end], 0)
        return cls(
            np.concatenate([above[inner], leaf_parent]).astype(np.int32),
            np.concatenate([tokens[inner], leaf_edges]).astype(np.int64),
            int(inner.sum()),
        )


@compiled
def _sum_up(parent: Int32[np.ndarray, " nodes"], values: Float64[np.ndarray, " nodes"]) -> None:
    for node in range(len(values) - 1, 0, -1):
        values[parent[node]] += values[node]


@compiled
def _path_sums(parent: Int32[np.ndarray, " nodes"], values: _Summed) -> _Summed:
    sums = values.copy()
    for node in range(1, len(sums)):
        sums[node] += sums[parent[node]]
    return sums


@compiled
def _emit(
    parent: Int32[np.ndarray, " nodes"],
    order: Int64[np.ndarray, " nodes"],
    leaf_count: Int64[np.ndarray, " nodes"],
    inner_count: int,
) -> Int32[np.ndarray, " requests"]:
    """Place the leaves of each subtree in one run, siblings in the sequence of `order`.

    `order` names all nodes; only the relative order of siblings matters. Two sweeps: by sibling
    order, each node learns how many leaves come before it among its siblings; by number (parents
    first), each node learns where its run starts.
    """
    before = np.zeros(len(parent), np.int64)
    taken = np.zeros(inner_count, np.int64)
    for node in order:
        above = parent[node]
        if above >= 0:
            before[node] = taken[above]
            taken[above] += leaf_count[node]
    out = np.empty(len(parent) - inner_count, np.int32)
    for node in range(1, len(parent)):
        before[node] += before[parent[node]]
        if node >= inner_count:
            out[before[node]] = node - inner_count
    return out


@compiled
def _match(tokens: Int32[np.ndarray, " tokens"], one: int, other: int, limit: int) -> int:
    """Equal tokens from positions `one` and `other` on, at most `limit`."""
    same = 0
    while same < limit and tokens[one + same] == tokens[other + same]:
        same += 1
    return same


@compiled
def _build(
    tokens: Int32[np.ndarray, " tokens"], offsets: Int64[np.ndarray, " requests+1"]
) -> tuple[
    Int32[np.ndarray, " nodes"], Int64[np.ndarray, " nodes"], Int32[np.ndarray, " nodes"], int
]:
    """Inner nodes (parents first), and the inner node above each request."""
    request_count = len(offsets) - 1
    # A group splits into at least two parts, so there are fewer inner nodes than requests.
    parent = np.empty(request_count + 1, np.int32)
    edges = np.empty(request_count + 1, np.int64)
    leaf_parent = np.zeros(request_count, np.int32)
    members = np.arange(request_count).astype(np.int32)
    parent[0], edges[0] = -1, 0
    inner_count = 1
    # Groups still to split: first and last member, tokens known to be shared, node above.
    low = [0]
    high = [request_count]
    shared = [0]
    above = [0]
    while len(low) > 0:
        first, last, depth, node = low.pop(), high.pop(), shared.pop(), above.pop()
        # Extend the shared prefix as far as all members go. The root stays empty, so that pools
        # with one common system prompt look like all others.
        head = offsets[members[first]]
        length = offsets[members[first] + 1] - head
        common = length - depth
        for index in range(first + 1, last):
            start = offsets[members[index]]
            limit = min(common, offsets[members[index] + 1] - start - depth)
            common = _match(tokens, head + depth, start + depth, limit)
        if common > 0:
            parent[inner_count], edges[inner_count] = node, common
            node = inner_count
            inner_count += 1
            depth += common
        # Those that end here are leaves; the others split by their next token.
        keys = np.empty(last - first, np.int64)
        for index in range(first, last):
            start = offsets[members[index]]
            ends = offsets[members[index] + 1] - start == depth
            keys[index - first] = -1 if ends else tokens[start + depth]
        # Mergesort: stable, so that equal prompts keep the order of the file.
        sequence = np.argsort(keys, kind="mergesort")
        group = members[first:last].copy()
        for index in range(last - first):
            members[first + index] = group[sequence[index]]
        index = 0
        while index < last - first:
            key = keys[sequence[index]]
            end = index + 1
            while end < last - first and keys[sequence[end]] == key:
                end += 1
            if key == -1 or end == index + 1:
                for leaf in range(index, end):
                    leaf_parent[members[first + leaf]] = node
            else:
                low.append(first + index)
                high.append(first + end)
                shared.append(depth)
                above.append(node)
            index = end
    return parent, edges, leaf_parent, inner_count
