"""Units: a consumer group and its producers as one block, so that covering survives balancing.

With producers sorted by spare and consumer groups by need, giving each group the next block of
producers covers, over all servers at once, nearly what the layer cake allows: neighbours in the
order differ little, so lockstep costs little. A unit then is placed as a whole: it counts no
producers and no consumers (they cancel) and its memory is what is left over. Placing units is an
ordinary min-max problem, so the min-max strategy does it, at any scale and in racks whose contents
cannot be listed.

What rigid units give away is balance: a unit of four shards and their producers fills a server of
eight. Exchanges towards coverage may break them up afterwards.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from jaxtyping import Int64

from aqua_placer.problem.instance import Instance


def form_units(
    instance: Instance, preferred: Int64[np.ndarray, " served"] | None = None
) -> Int64[np.ndarray, " groups"]:
    """Unit of each group, numbered from 0; a group that stays alone is its own unit.

    Blocks follow the order of producers, heaviest and neediest consumers first. A producer group
    whose shards are shared by two consumer groups joins both into one unit, as long as the unit
    fits the largest server.

    Args:
        preferred: Consumer groups that come first, in this order.
    """
    r_gb, tp = instance.r_gb[:, 0], instance.tp
    largest = int(instance.servers.gpus.max())
    producers = np.nonzero(r_gb > 0)[0]
    producers = producers[np.argsort(-r_gb[producers], kind="stable")].tolist()
    consumers = np.nonzero(r_gb < 0)[0]
    order = np.lexsort((r_gb[consumers], -instance.weight[consumers]))
    unit_of = np.arange(instance.num_groups)
    shards = tp.tolist()
    at, spare_shards, unit, unit_size = 0, 0, -1, 0
    ranked = consumers[order]
    if preferred is not None:
        ranked = np.concatenate([preferred, ranked[~np.isin(ranked, preferred)]])
    for group in ranked.tolist():
        wanted = shards[group]
        joined, upto = unit, _upto(shards, producers, at, wanted - spare_shards)
        size = unit_size + wanted + sum(shards[producer] for producer in producers[at:upto])
        if not spare_shards or size > largest:
            if 2 * wanted > largest:
                continue
            joined, spare_shards, unit_size = group, 0, 0
            upto = _upto(shards, producers, at, wanted)
        taken = producers[at:upto]
        lent = sum(shards[producer] for producer in taken)
        size, missing = unit_size + wanted + lent, wanted - spare_shards - lent
        if missing > 0 or size > largest:
            continue
        at = upto
        unit, unit_size, spare_shards = joined, size, -missing
        unit_of[group] = joined
        unit_of[taken] = joined
    _, numbered = np.unique(unit_of, return_inverse=True)
    return numbered.reshape(-1).astype(np.int64)


def _upto(shards: list[int], producers: list[int], at: int, missing: int) -> int:
    """Where the producer groups end that `missing` shards would take from position `at`."""
    while missing > 0 and at < len(producers):
        missing -= shards[producers[at]]
        at += 1
    return at


def of_units(instance: Instance, unit_of: Int64[np.ndarray, " groups"]) -> Instance:
    """The min-max problem of placing whole units."""
    count = int(unit_of.max()) + 1
    size = np.bincount(unit_of, weights=instance.tp, minlength=count).astype(np.int64)
    mem, cnt = (
        np.stack([np.bincount(unit_of, instance.tp * sizes, count) for sizes in column.T], axis=1)
        for column in (instance.r_gb, instance.sign)
    )
    return replace(
        instance,
        names=[],
        tp=size,
        r_gb=mem / size[:, None],
        weight=np.ones(count),
        current=np.full(count, -1, dtype=np.int64),
        cnt_per_shard=cnt / size[:, None],
    )
