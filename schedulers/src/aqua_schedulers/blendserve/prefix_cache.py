"""Which prefixes an engine still has: the runtime prefix tree, bounded in memory.

A real engine does not say before admission how much of a prompt it has cached, yet a policy that
paces prompts must know what they will cost. This is a model of the engine's cache over the
nodes of the offline tree: what was computed is present until memory runs out, least recently used
first, leaves before the prefixes they hang on. It holds one number per node and nothing per token,
and never counts more than `capacity_tokens` as present.

What it does not do: decide. The engine's own cache is the truth; this only predicts it.

Source: BlendServe section 4, "Runtime prefix tree".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aqua_protocol.errors import ConfigError
from aqua_schedulers.blendserve.tree import ROOT, PrefixTree
from aqua_schedulers.compiled import compiled

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

# Slots of the counters.
PRESENT = 0
OLDEST = 1
NEWEST = 2
USED = 3
NONE = -1


class PrefixCacheModel:
    """Prefixes that the engine has, as far as its memory allows.

    Args:
        tree: The prompts.
        capacity_tokens: Tokens that the engine's KV memory holds.
    """

    def __init__(self, tree: PrefixTree, capacity_tokens: int) -> None:
        if capacity_tokens < 1:
            raise ConfigError(f"capacity_tokens must be positive, not {capacity_tokens}")
        nodes = len(tree.parent)
        self._tree = tree
        self._capacity = capacity_tokens
        self._older = np.full(nodes, NONE, np.int32)
        self._newer = np.full(nodes, NONE, np.int32)
        self._is_present = np.zeros(nodes, np.bool_)
        self._users = np.zeros(nodes, np.int32)
        self._count = np.array([0, NONE, NONE, 0], np.int64)

    @property
    def present_tokens(self) -> int:
        """Tokens counted as present; never more than the capacity, but for what is in use."""
        return int(self._count[PRESENT])

    @property
    def used_tokens(self) -> int:
        """Tokens of prefixes that running requests use, a shared one counted once."""
        return int(self._count[USED])

    def missing_tokens(self, request: int) -> int:
        """Prompt tokens that the engine would have to compute."""
        return _missing(
            self._tree.parent,
            self._tree.edge_tokens,
            self._is_present,
            self._tree.inner_count + request,
        )

    def hold(self, request: int) -> int:
        """A request starts: its path is present and in use; returns the tokens it missed."""
        return _hold(
            self._tree.parent,
            self._tree.edge_tokens,
            self._is_present,
            self._users,
            self._older,
            self._newer,
            self._count,
            self._capacity,
            self._tree.inner_count + request,
        )

    def release(self, request: int) -> None:
        """A request ended: its path stays until memory is needed."""
        _release(
            self._tree.parent,
            self._tree.edge_tokens,
            self._users,
            self._older,
            self._newer,
            self._count,
            self._tree.inner_count + request,
        )


@compiled
def _missing(parent: Int32s, edges: Int64s, present: NDArray[np.bool_], node: int) -> int:
    missing = 0
    while node > ROOT:
        if not present[node]:
            missing += edges[node]
        node = parent[node]
    return missing


@compiled
def _unlink(older: Int32s, newer: Int32s, count: Int64s, node: int) -> None:
    before, after = older[node], newer[node]
    if before == NONE:
        count[OLDEST] = after
    else:
        newer[before] = after
    if after == NONE:
        count[NEWEST] = before
    else:
        older[after] = before


@compiled
def _append(older: Int32s, newer: Int32s, count: Int64s, node: int) -> None:
    newest = count[NEWEST]
    older[node], newer[node] = newest, NONE
    if newest == NONE:
        count[OLDEST] = node
    else:
        newer[newest] = node
    count[NEWEST] = node


@compiled
def _hold(  # noqa: PLR0913, PLR0917 - the arrays of one tree
    parent: Int32s,
    edges: Int64s,
    present: NDArray[np.bool_],
    users: Int32s,
    older: Int32s,
    newer: Int32s,
    count: Int64s,
    capacity: int,
    leaf: int,
) -> int:
    missing = 0
    node = leaf
    while node > ROOT:
        if not present[node]:
            missing += edges[node]
            count[PRESENT] += edges[node]
            present[node] = True
        elif users[node] == 0:
            _unlink(older, newer, count, node)
        if users[node] == 0:
            count[USED] += edges[node]
        users[node] += 1
        node = parent[node]
    # A node in use has all its ancestors in use, and ends are released leaf first: the oldest
    # unused node has no present child.
    while count[PRESENT] > capacity and count[OLDEST] != NONE:
        victim = count[OLDEST]
        _unlink(older, newer, count, victim)
        present[victim] = False
        count[PRESENT] -= edges[victim]
    return missing


@compiled
def _release(
    parent: Int32s,
    edges: Int64s,
    users: Int32s,
    older: Int32s,
    newer: Int32s,
    count: Int64s,
    leaf: int,
) -> None:
    node = leaf
    while node > ROOT:
        users[node] -= 1
        if users[node] == 0:
            count[USED] -= edges[node]
            _append(older, newer, count, node)
        node = parent[node]
