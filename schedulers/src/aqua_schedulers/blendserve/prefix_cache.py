"""The runtime prefix tree: which prefixes an engine still has, bounded in memory.

A real engine does not say before admission how much of a prompt it has cached, yet a policy that
paces prompts must know what they will cost. This is a model of the engine's cache over the
nodes of the offline tree: what was computed is present until memory runs out, least recently used
first, leaves before the prefixes they hang on. It holds one number per node and nothing per token,
and never counts more than `capacity_tokens` as present.

What it does not do: decide. The engine's own cache is the truth; this only predicts it.

Source: BlendServe section 4, "Runtime prefix tree".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64

from aqua_protocol.errors import ConfigError
from aqua_schedulers.blendserve.tree import ROOT, PrefixTree
from aqua_schedulers.compiled import compiled, record
from aqua_schedulers.linked_list import Links, append, empty_lists, remove


@dataclass(slots=True)
class CacheTotals:
    """Tokens of nodes that are present, and of those among them that running requests use."""

    present_tokens: int = 0
    used_tokens: int = 0


class _Cache(NamedTuple):
    """The model as compiled code takes it.

    Attributes:
        parent, tokens: The offline tree.
        is_present: Whether the engine has a node.
        users: Running requests that use it.
        unused: Present nodes that nothing uses, least recently used first.
    """

    parent: Int32[np.ndarray, " nodes"]
    tokens: Int64[np.ndarray, " nodes"]
    is_present: Bool[np.ndarray, " nodes"]
    users: Int32[np.ndarray, " nodes"]
    unused: Links
    totals: Sequence[CacheTotals]


class PrefixCacheModel:
    """Prefixes of a tree that an engine has, whose KV memory holds `capacity_tokens`."""

    def __init__(self, tree: PrefixTree, capacity_tokens: int) -> None:
        if capacity_tokens < 1:
            raise ConfigError(f"capacity_tokens must be positive, not {capacity_tokens}")
        count = len(tree.parent)
        self._first_leaf = tree.inner_count
        self._capacity = capacity_tokens
        self._cache = _Cache(
            tree.parent,
            tree.edge_tokens,
            np.zeros(count, np.bool_),
            np.zeros(count, np.int32),
            empty_lists(count),
            record(CacheTotals()),
        )

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
        return _hold(self._cache, self._capacity, self._first_leaf + request)

    def release(self, request: int) -> None:
        """A request ended: its path stays until memory is needed."""
        _release(self._cache, self._first_leaf + request)


@compiled
def _hold(cache: _Cache, capacity: int, leaf: int) -> int:
    totals, sentinel = cache.totals[0], len(cache.parent)
    missing = 0
    node = leaf
    while node > ROOT:
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
    # A node in use has all its ancestors in use, and ends are released leaf first: the oldest
    # unused node has no present child.
    while totals.present_tokens > capacity and cache.unused[sentinel].after != sentinel:
        victim = cache.unused[sentinel].after
        remove(cache.unused, victim)
        cache.is_present[victim] = False
        totals.present_tokens -= cache.tokens[victim]
    return missing


@compiled
def _release(cache: _Cache, leaf: int) -> None:
    node = leaf
    while node > ROOT:
        cache.users[node] -= 1
        if cache.users[node] == 0:
            cache.totals[0].used_tokens -= cache.tokens[node]
            append(cache.unused, len(cache.parent), node)
        node = cache.parent[node]
