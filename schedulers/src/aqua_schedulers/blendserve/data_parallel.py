"""Data parallelism: one blended order cut for several engines.

Each engine gets one stretch from the left end and one from the right end of the order, chosen so
that both resources are divided evenly: every part then has the density of the whole pool, and
only the prompts along the cuts are computed twice. The last engine gets what lies in the middle.

Source: BlendServe section 6.1, "Data parallelism".
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64, Int32

from aqua_protocol.errors import ConfigError
from aqua_schedulers.blendserve.preparation import PreparedPool


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
