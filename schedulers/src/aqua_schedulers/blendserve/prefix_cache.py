"""The runtime prefix tree: which prefixes an engine still has.

Over the nodes of a pool's tree, with one number per node and nothing per token: what was computed
is present until it is evicted, least recently used first, leaves before the prefixes they hang
on. The simulator's engine has a `PrefixCache` for its memory.

A real engine does not say before admission how much of a prompt it has cached, yet a policy that
paces prompts must know what they will cost. `PrefixCacheModel` is a model of that engine's cache,
and never counts more than `capacity_tokens` as present, but for what is in use. It does not decide:
the engine's own cache is the truth; this only predicts it.

Source: BlendServe section 4, "Runtime prefix tree".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

from aqua_protocol.errors import ConfigError
from aqua_schedulers.blendserve.tree import PrefixTree
from aqua_schedulers.compiled import compiled, compiled_part, record
from aqua_schedulers.linked_list import Links, append, empty_lists, remove


@dataclass(slots=True)
class CacheTotals:
    """Tokens of nodes that are present, and of those among them that running requests use."""

    present_tokens: int = 0
    used_tokens: int = 0


class PrefixCache(NamedTuple):
    """Which nodes are in memory, and which of them are in use, as compiled code takes it.

    Attributes:
        parent, tokens: The tree; a root has the parent -1.
        is_present: Whether a node's tokens are in memory.
        users: Running requests that use each node.
        unused: Present nodes that nothing uses, least recently used first.
    """

    parent: Int32[np.ndarray, " nodes"]
    tokens: Int64[np.ndarray, " nodes"]
    is_present: Bool[np.ndarray, " nodes"]
    users: Int32[np.ndarray, " nodes"]
    unused: Links
    totals: Sequence[CacheTotals]


def empty_cache(
    parent: Int32[np.ndarray, " nodes"], tokens: Int64[np.ndarray, " nodes"]
) -> PrefixCache:
    """A cache of these nodes with none of them present."""
    count = len(parent)
    is_present, users = np.zeros(count, np.bool_), np.zeros(count, np.int32)
    return PrefixCache(parent, tokens, is_present, users, empty_lists(count), record(CacheTotals()))


class PrefixCacheModel:
    """Prefixes of a tree that an engine has, whose KV memory holds `capacity_tokens`."""

    def __init__(self, tree: PrefixTree, capacity_tokens: int) -> None:
        if capacity_tokens < 1:
            raise ConfigError(f"capacity_tokens must be positive, not {capacity_tokens}")
        self._first_leaf = tree.inner_count
        self._capacity = capacity_tokens
        self._cache = empty_cache(tree.parent, tree.edge_tokens)

    @property
    def present_tokens(self) -> int:
        """Tokens counted as present; never more than the capacity, but for what is in use."""
        return int(self._cache.totals[0].present_tokens)

    @property
    def used_tokens(self) -> int:
        """Tokens of prefixes that running requests use, a shared one counted once."""
        return int(self._cache.totals[0].used_tokens)

    def hold(self, request: int) -> int:
        """A request starts: its path is present and in use; returns the tokens it missed."""
        return _hold_within(self._cache, self._capacity, self._first_leaf + request)

    def release(self, request: int) -> None:
        """A request ended: its path stays until memory is needed."""
        release_path(self._cache, self._first_leaf + request)


@compiled_part
def hold_path(cache: PrefixCache, leaf: int) -> int:
    """Take the path to a leaf into use; returns the tokens that were not present."""
    totals = cache.totals[0]
    missing = 0
    node = leaf
    while node >= 0:
        if not cache.is_present[node]:
            missing += cache.tokens[node]
            cache.is_present[node] = True
        elif cache.users[node] == 0:
            remove(cache.unused, node)
        if cache.users[node] == 0:
            totals.used_tokens += cache.tokens[node]
        cache.users[node] += 1
        node = cache.parent[node]
    totals.present_tokens += missing
    return missing


@compiled
def release_path(cache: PrefixCache, leaf: int) -> None:
    """End one use of the path to a leaf; it stays present."""
    node = leaf
    while node >= 0:
        cache.users[node] -= 1
        if cache.users[node] == 0:
            cache.totals[0].used_tokens -= cache.tokens[node]
            append(cache.unused, len(cache.parent), node)
        node = cache.parent[node]


@compiled_part
def evict(cache: PrefixCache, node: int) -> None:
    """Drop a present node that nothing uses."""
    remove(cache.unused, node)
    cache.is_present[node] = False
    cache.totals[0].present_tokens -= cache.tokens[node]


@compiled_part
def evict_oldest(cache: PrefixCache) -> None:
    """Drop the node that has been unused for longest; the caller knows that there is one.

    A node in use has all its ancestors in use, and paths are released leaf first: the oldest unused
    node has no present child.
    """
    evict(cache, int(cache.unused[len(cache.parent)].after))


@compiled
def _hold_within(cache: PrefixCache, capacity: int, leaf: int) -> int:
    missing = hold_path(cache, leaf)
    sentinel = len(cache.parent)
    while cache.totals[0].present_tokens > capacity and cache.unused[sentinel].after != sentinel:
        evict_oldest(cache)
    return missing
