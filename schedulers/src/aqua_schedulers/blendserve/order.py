"""The blended order: the list, made of the prefix tree, that the dual scanner reads from both ends.

Three steps of the paper, on flat arrays. *Layer sort*: siblings by falling compute density, so
that each subtree runs from compute-bound to memory-bound and depth-first order still shares every
prefix. *Conditional split*: subtrees that do not share enough to be worth keeping together are
cut into units, and the units are sorted across the whole tree. *Merge*: neighbouring units of
like density, or too small to matter, become one, so that the scanner's memory partition does not
jump with every request; the sequence stays as it is, so merging costs no sharing.

Readings of the paper. Algorithm 2 as printed never appends a leaf (its `0 > t` is false); we append
them. A node's density counts the path above it once, as if it were computed for this subtree
alone: for a leaf that is rho(r) of the whole request, as printed.

Source: BlendServe section 3.3 (Algorithms 1 and 2) and section 4, "Offline prefix tree".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64, Int32, Int64

from aqua_schedulers.blendserve.cost import ResourceCost
from aqua_schedulers.blendserve.lengths import LengthEstimate
from aqua_schedulers.blendserve.tree import PrefixTree
from aqua_schedulers.compiled import compiled

SPLIT_SHARE: Final = 0.01
"""Threshold t of Algorithm 2 as a share of all tokens; the paper leaves it open, and a percent
keeps nearly all sharing. Doubled, fewer subtrees stay whole."""

LIKE_DENSITY: Final = 1.1
"""A factor; neighbouring units merge when their densities differ by less, which moves a memory part
by a few percent. Doubled, parts move rarely and far."""

SMALL_UNIT_SHARE: Final = 1e-4
"""A share of all resources; smaller units merge with their neighbour, so that there are at most
10,000. Doubled, at most 5,000."""


@dataclass(frozen=True, eq=False)
class TreeResources:
    """Compute and memory seconds over the tree.

    Attributes:
        fresh_compute_s: Compute that each node adds, shape (num_nodes,): its own prompt tokens,
            and for a leaf its outputs.
        leaf_memory_s: Mem(r) of each request, shape (num_requests,).
        node_density: rho of each subtree, the path above counted once, shape (num_nodes,).
    """

    fresh_compute_s: Float64[np.ndarray, " nodes"]
    leaf_memory_s: Float64[np.ndarray, " requests"]
    node_density: Float64[np.ndarray, " nodes"]

    @property
    def compute_s(self) -> float:
        """(1 - s_o) T_comp: every shared prefix computed once."""
        return float(self.fresh_compute_s.sum())

    @property
    def memory_s(self) -> float:
        """T_mem: all decode attention."""
        return float(self.leaf_memory_s.sum())

    @property
    def root_density(self) -> float:
        """Rho of the whole pool."""
        return self.compute_s / self.memory_s


@dataclass(frozen=True, eq=False)
class BlendOrder:
    """Requests from most compute-bound to most memory-bound.

    Attributes:
        requests: Every request once, shape (num_requests,).
        unit_of: Unit of each place in `requests`, ascending, shape (num_requests,).
        unit_density: Compute density of each unit, falling, shape (num_units,).
        root_density: rho of the whole pool.
    """

    requests: Int32[np.ndarray, " requests"]
    unit_of: Int32[np.ndarray, " requests"]
    unit_density: Float64[np.ndarray, " units"]
    root_density: float


def weigh(tree: PrefixTree, lengths: LengthEstimate, cost: ResourceCost) -> TreeResources:
    """Compute densities over the tree (section 3.2)."""
    end = tree.end_tokens.astype(np.float64)
    edge = tree.edge_tokens.astype(np.float64)
    squares = edge * (2.0 * end - edge)  # end^2 - start^2: attention to the path above included
    fresh = cost.linear_s_per_token * edge + cost.prefill_s_per_square_token * squares
    fresh[tree.inner_count :] += cost.linear_s_per_token * lengths.mean
    prompt, mean = tree.prompt_tokens, lengths.mean
    # E[Mem(r)], with the second moment of the length.
    memory = cost.decode_s_per_kv_token * (prompt * mean + (lengths.square + mean) / 2)
    nodes = np.zeros(len(tree.parent))
    nodes[tree.inner_count :] = memory
    subtree_memory = tree.subtree_sums(nodes)
    above = tree.path_sums(fresh) - fresh
    density = (above + tree.subtree_sums(fresh)) / np.maximum(subtree_memory, 1e-300)
    return TreeResources(fresh, memory, density)


def blend_order(
    tree: PrefixTree, resources: TreeResources, *, split_share: float = SPLIT_SHARE
) -> BlendOrder:
    """Sort, split and merge.

    Args:
        split_share: Threshold of Algorithm 2 as a share of all prompt tokens: 0 keeps every
            subtree of the root's children together, 1 sorts single requests.
    """
    threshold = split_share * float(tree.prompt_tokens.sum())
    children = np.bincount(tree.parent[1:], minlength=len(tree.parent)).astype(np.int64)
    unit_node = _split(tree.parent, tree.end_tokens, children, threshold)
    # Units are named by their node; their densities and the layers are sorted alike.
    depth_first = tree.depth_first(-resources.node_density)
    unit = unit_node[tree.inner_count + depth_first]
    rank = np.argsort(-resources.node_density[unit], kind="stable")
    # Requests of one unit have one key, but two units may tie: keep each in one run.
    requests, unit = depth_first[rank], unit[rank]
    _, first_seen, label = np.unique(unit, return_index=True, return_inverse=True)
    runs = np.argsort(first_seen[label], kind="stable")
    requests, unit = requests[runs], unit[runs]
    fresh = charged(tree, resources.fresh_compute_s, requests)[requests]
    starts = np.flatnonzero(np.concatenate([[True], unit[1:] != unit[:-1]]))
    compute = np.add.reduceat(fresh, starts)
    memory = np.add.reduceat(resources.leaf_memory_s[requests], starts)
    merged, density = _merge(compute, memory, SMALL_UNIT_SHARE, LIKE_DENSITY)
    sizes = np.diff(np.concatenate([starts, [len(requests)]]))
    return BlendOrder(
        requests, np.repeat(merged, sizes).astype(np.int32), density, resources.root_density
    )


def charged(
    tree: PrefixTree,
    values: Float64[np.ndarray, " nodes"],
    requests: Int32[np.ndarray, " requests"],
) -> Float64[np.ndarray, " requests"]:
    """What each request adds in this order: its leaf's value and those of nodes not seen before it.

    With `edge_tokens` as values: the prompt tokens that a request computes anew when everything
    before it is cached. By request, not by place.
    """
    charge = np.array(values[tree.inner_count :], dtype=np.float64)
    _charge_first(
        tree.parent, np.asarray(values, dtype=np.float64), requests, tree.inner_count, charge
    )
    return charge


@compiled
def _charge_first(
    parent: Int32[np.ndarray, " nodes"],
    values: Float64[np.ndarray, " nodes"],
    requests: Int32[np.ndarray, " requests"],
    inner_count: int,
    charge: Float64[np.ndarray, " requests"],
) -> None:
    seen = np.zeros(inner_count, np.bool_)
    for request in requests:
        node = parent[inner_count + request]
        while node > 0 and not seen[node]:
            seen[node] = True
            charge[request] += values[node]
            node = parent[node]


@compiled
def _split(
    parent: Int32[np.ndarray, " nodes"],
    end: Int64[np.ndarray, " nodes"],
    children: Int64[np.ndarray, " nodes"],
    threshold: float,
) -> Int32[np.ndarray, " nodes"]:
    """Algorithm 2: the unit that each node belongs to, named by the unit's top node; -1 above."""
    allowed = np.empty(len(parent))
    unit = np.full(len(parent), -1, np.int32)
    allowed[0] = threshold
    for node in range(len(parent)):
        above = parent[node]
        if above >= 0:
            allowed[node] = allowed[above] / children[above]
            unit[node] = unit[above]
        if unit[node] < 0 and (children[node] == 0 or end[node] * children[node] > allowed[node]):
            unit[node] = node
    return unit


@compiled
def _merge(
    compute: Float64[np.ndarray, " units"],
    memory: Float64[np.ndarray, " units"],
    small_share: float,
    like: float,
) -> tuple[Int32[np.ndarray, " units"], Float64[np.ndarray, " units"]]:
    """Join neighbours; returns the merged unit of each unit, and densities made falling."""
    small = small_share * (compute.sum() + memory.sum())
    merged = np.empty(len(compute), np.int32)
    densities = np.empty(len(compute))
    count = 0
    held_compute, held_memory = compute[0], memory[0]
    merged[0] = 0
    for unit in range(1, len(compute)):
        held = held_compute / held_memory
        next_density = compute[unit] / memory[unit]
        alike = next_density < held * like and held < next_density * like
        if alike or held_compute + held_memory < small:
            held_compute += compute[unit]
            held_memory += memory[unit]
        else:
            densities[count] = held
            count += 1
            held_compute, held_memory = compute[unit], memory[unit]
        merged[unit] = count
    densities[count] = held_compute / held_memory
    count += 1
    # The units were sorted with the path above counted in; without it neighbours may swap by a
    # little, and the scanner relies on "left is denser than right".
    for unit in range(count - 2, -1, -1):
        densities[unit] = max(densities[unit], densities[unit + 1])
    return merged, densities[:count].copy()
