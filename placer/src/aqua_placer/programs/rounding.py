"""From a fractional solution of most worth to whole servers of nearly the same worth.

The vertex of the program over contents uses a dozen contents, and their floor decides nearly all
servers, but what it leaves over can rarely be divided without loss. The duals tell which other
contents cost nothing: on typical mixes hundreds have a reduced cost of zero. So a dozen servers or
more are handed back, and an integer program divides their groups anew over the contents of least
reduced cost. With 300 such contents it takes some 50 ms; more contents and more servers are tried
only while the worth is not reached.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from aqua_placer.budget import Budget
from aqua_placer.problem.columns import Bools, Floats, Ints
from aqua_placer.programs.contents import ContentSpace
from aqua_placer.programs.linear import solve

ATTEMPTS: Final = ((300, 12), (300, 40), (1_500, 12), (1_500, 40), (1_500, 120))
"""Contents offered and servers handed back, in turn."""

MAX_NODES: Final = 300
LIMIT_S: Final = 5.0
"""Of one program; it ends by nodes long before, as a rule."""

RELATIVE_GAP: Final = 1e-4


@dataclass(frozen=True, eq=False)
class Fraction:
    """A fractional solution: servers per content within `allowed`, and the duals of its rows."""

    allowed: Bools
    servers_of: Floats
    duals: Floats


def round_servers(
    space: ContentSpace,
    fraction: Fraction,
    worth: Floats,
    enough: float,
    budget: Budget,
    seed: int,
) -> Ints | None:
    """Whole servers per content, worth `enough` or as much as was found; None when nothing was."""
    rng = np.random.default_rng(seed)
    reduced = np.maximum(-(worth + space.as_program_rows @ fraction.duals), 0.0)
    # Contents of one cost are alike in worth; which of them fit together is a matter of luck.
    spread = float(np.median(worth[fraction.servers_of > 0])) if worth.any() else 1.0
    score = reduced + rng.random(len(reduced)) * 0.01 * max(spread, 1.0)
    score[fraction.servers_of > 0] = -1.0
    best: Ints | None = None
    total = space.servers.count
    tried: set[tuple[int, int]] = set()
    for offered, handed_back in ATTEMPTS:
        floor = _keep(fraction.servers_of, total, handed_back)
        target = space.totals - floor @ space.as_program_rows
        fits = fraction.allowed & (space.as_program_rows <= target + 1e-9).all(axis=1)
        picked = np.nonzero(fits)[0]
        if (int(floor.sum()), min(offered, len(picked))) in tried:
            continue
        tried.add((int(floor.sum()), min(offered, len(picked))))
        picked = np.sort(picked[np.argsort(score[picked], kind="stable")[:offered]])
        model = space.whole_servers(picked, target, cost=-worth[picked], most=float(total))
        answer = solve(
            model, budget, limit_s=LIMIT_S, gap=RELATIVE_GAP, seed=seed, max_nodes=MAX_NODES
        )
        if answer.x is not None:
            chosen = floor
            chosen[picked] += np.rint(answer.x).astype(np.int64)
            if best is None or worth @ chosen > worth @ best:
                best = chosen
            if worth @ best >= enough:
                break
        if budget.expired():
            break
    return best


def _keep(servers_of: Floats, total: int, handed_back: int) -> Ints:
    """The floor, less servers of the most used contents: they recombine most freely."""
    floor = np.floor(servers_of + 1e-6).astype(np.int64)
    if handed_back >= total:
        return np.zeros_like(floor)
    decided = int(floor.sum())
    used = np.nonzero(floor)[0]
    for index in used[np.argsort(-floor[used], kind="stable")]:
        floor[index] -= min(int(floor[index]), -(-handed_back * int(floor[index]) // decided))
    return floor
