"""How much demand is covered by servers, by contents that are yet to be chosen, and at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aqua_placer.value.prefixes import covered_gb
from aqua_placer.value.roster import roster, rosters

if TYPE_CHECKING:
    from jaxtyping import Float64, Int64

    from aqua_placer.problem.contents import ContentSpace
    from aqua_placer.problem.instance import Instance


def coverage_gb(
    instance: Instance,
    slots: Int64[np.ndarray, "servers width"],
    class_of: Int64[np.ndarray, " servers"],
) -> Float64[np.ndarray, " servers"]:
    """Covered demand per server of a layout's slots."""
    result = np.zeros(len(slots))
    for kind, table in enumerate(rosters(instance)):
        here = class_of == kind
        result[here] = covered_gb(table, slots[here])
    return result


def content_worth_gb(space: ContentSpace) -> tuple[Float64[np.ndarray, " contents"], bool]:
    """Coverage of each content, and whether no content could be covered better.

    Only exact worths bound a program over contents; others may guide it.
    """
    types = space.types
    is_exact = True
    result = np.zeros(len(space.rows))
    for kind, gpus in enumerate(space.servers.gpus.tolist()):
        here = np.nonzero(space.kind == kind)[0]
        rows = space.rows[here]
        counts = rows.sum(axis=1)
        slots = np.full((len(rows), max(gpus, 1)), -1, dtype=np.int64)
        flat = np.repeat(np.tile(np.arange(rows.shape[1]), len(rows)), rows.reshape(-1))
        first = np.repeat(np.cumsum(counts) - counts, counts)
        slots[np.repeat(np.arange(len(rows)), counts), np.arange(len(flat)) - first] = flat
        table = roster(types.tp, types.r_gb[:, kind], types.weight, gpus)
        result[here] = covered_gb(table, slots)
        is_exact &= table.is_exact
    return result, is_exact


def demand_gb(instance: Instance) -> float:
    """Demand of all consumer groups; on the class where each needs least, if classes differ."""
    need = np.maximum(-instance.r_gb.max(axis=1), 0.0)
    return float((instance.weight * instance.tp * need).sum())
