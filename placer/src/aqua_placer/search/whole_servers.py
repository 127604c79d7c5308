"""Whole servers from a fractional solution, of nearly the same worth where there are any.

The vertex of the program over contents uses a dozen contents, as many as there are rows, and their
floor decides nearly all servers; but what it leaves over can rarely be divided without loss. The
duals tell which other contents cost nothing: on typical mixes hundreds have a reduced cost of zero.
So a dozen servers or more are handed back, and an integer program divides their groups anew over
the contents of least reduced cost. With 300 such contents it takes some 50 ms; more contents and
more servers are tried only while the worth is not reached.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from aqua_placer.bounds.linear_program import LinearModel, solve
from aqua_placer.bounds.thresholds import Fraction
from aqua_placer.budget import Budget
from aqua_placer.problem.contents import ContentSpace

ATTEMPTS: Final = ((300, 12), (300, 40), (1_500, 40), (1_500, 120))
"""Contents offered and servers handed back, in turn. Small clusters are handed back whole."""

MAX_NODES: Final = 300
"""Of one program's search; most end at the first. Twice as many take twice as long
where the search is hard."""

RELATIVE_GAP: Final = 1e-4
"""Of the worth: a hundredth of the precision of profiles, so it may be doubled."""


def whole_servers(
    space: ContentSpace,
    fraction: Fraction,
    budget: Budget,
    *,
    worth: Float64[np.ndarray, " contents"] | None = None,
    enough: float = -np.inf,
    seed: int = 0,
) -> Int64[np.ndarray, " contents"] | None:
    """Servers of each allowed content, worth `enough` or as much as was found; None if nothing."""
    rng = np.random.default_rng(seed)
    if worth is None:
        worth = np.zeros(len(space.rows))
    reduced = np.maximum(-(worth + space.as_program_rows @ fraction.duals), 0.0)
    used = fraction.servers_of > 0
    # Contents of one cost are alike in worth; which of them fit together is a matter of chance.
    spread = float(np.median(np.abs(worth[used]))) if used.any() else 1.0
    score = reduced + rng.random(len(reduced)) * 0.01 * max(spread, 1.0)
    score[used] = -1.0
    best: Int64[np.ndarray, " contents"] | None = None
    total = space.servers.count
    tried: set[tuple[int, int]] = set()
    for offered, handed_back in ATTEMPTS:
        floor = _kept(fraction.servers_of, total, handed_back)
        rest = space.totals - floor @ space.as_program_rows
        fits = fraction.allowed & (space.as_program_rows <= rest + 1e-9).all(axis=1)
        picked = np.nonzero(fits)[0]
        is_all = len(picked) <= offered and not floor.any()
        key = int(floor.sum()), min(offered, len(picked))
        if key in tried or not len(picked):
            continue
        tried.add(key)
        picked = np.sort(picked[np.argsort(score[picked], kind="stable")[:offered]])
        model = LinearModel.of(
            space.as_program_rows[picked],
            -worth[picked],
            rest,
            rest,
            upper=float(total),
            integral=True,
        )
        answer = solve(model, budget, relative_gap=RELATIVE_GAP, seed=seed, max_nodes=MAX_NODES)
        if answer.x is not None:
            chosen = floor.copy()
            chosen[picked] += np.rint(answer.x).astype(np.int64)
            if best is None or worth @ chosen > worth @ best:
                best = chosen
            if worth @ best >= enough:
                break
        if is_all or budget.expired():
            break
    return best


def _kept(
    servers_of: Float64[np.ndarray, " contents"], total: int, handed_back: int
) -> Int64[np.ndarray, " contents"]:
    """The floor, less servers of the most used contents: they recombine most freely."""
    floor: Int64[np.ndarray, " contents"] = np.floor(servers_of + 1e-6).astype(np.int64)
    if total <= handed_back:
        return np.zeros_like(floor)
    decided = int(floor.sum())
    used = np.nonzero(floor)[0]
    for index in used[np.argsort(-floor[used], kind="stable")]:
        floor[index] -= min(int(floor[index]), -(-handed_back * int(floor[index]) // decided))
    return floor
