"""What a server can be made of, before anyone asks which models: blocks and groups left alone.

A *block* is a consumer group of t shards with t producer shards, 2t GPUs that leave the count as it
is. Beside blocks a server holds groups that nobody matches. Numbers of each make a composition, and
there are a few hundred of them whatever the sizes in GB are. They say what the sum of GPUs cannot:
blocks of 6 leave 2 GPUs of 8 over, servers of 4 take no group of 4 with its producers, and a count
of at most C needs a place for every group left alone.

Racks have too many compositions to list. There every item alone takes its share of a server, which
admits all that compositions do and somewhat more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from aqua_placer.problem.columns import Bools, Floats, Ints
from aqua_placer.problem.instance import Instance, sign_of
from aqua_placer.programs.contents import count_contents, enumerate_contents

MAX_COMPOSITIONS: Final = 2_500
"""Per server class; servers of 16 GPUs with groups of 1, 2 and 4 shards have 2,300."""


@dataclass(frozen=True, eq=False)
class Items:
    """What servers are composed of.

    Attributes:
        gpus: GPUs of each item.
        cnt: What it adds to producers minus consumers.
        block_of: Position of the block of t shards, by t.
        single: Position of a producer shard that is not lent.
        alone: Position of a consumer group of t shards that is not served, by t.
        available: How many there are when no block is made; 0 for blocks.
    """

    gpus: Ints
    cnt: Ints
    block_of: dict[int, int]
    single: int
    alone: dict[int, int]
    available: Ints


@dataclass(frozen=True, eq=False)
class Compositions:
    """Compositions of all server classes.

    Attributes:
        kind: Server class of each, shape (num_compositions,).
        share: Of a server; 1 where whole servers are listed.
        rows: Numbers of each item, (num_compositions, num_items).
    """

    kind: Ints
    share: Floats
    rows: Ints


def items_of(instance: Instance) -> Items:
    """The items of an instance, whose groups have the same sign on every class.

    Producer groups of several shards count as so many single ones: they may serve several blocks.
    """
    tp, sign = instance.tp, sign_of(instance.r_gb[:, 0])
    widest = int(instance.servers.gpus.max())
    gpus, cnt, available = [1], [1], [int(tp[sign > 0].sum())]
    block_of, alone = {}, {}
    for size in np.unique(tp[sign < 0]).tolist():
        alone[size] = len(gpus)
        gpus.append(size)
        cnt.append(-size)
        available.append(int((tp[sign < 0] == size).sum()))
        if 2 * size <= widest:
            block_of[size] = len(gpus)
            gpus.append(2 * size)
            cnt.append(0)
            available.append(0)
    for size in np.unique(tp[sign == 0]).tolist():
        gpus.append(size)
        cnt.append(0)
        available.append(int((tp[sign == 0] == size).sum()))
    return Items(np.array(gpus), np.array(cnt), block_of, 0, alone, np.array(available))


def compositions(instance: Instance, items: Items, most_cnt: int | None = None) -> Compositions:
    """All compositions, those with |cnt| up to `most_cnt` where whole servers are listed."""
    kinds, shares, rows = [], [], []
    eye = np.eye(len(items.gpus), dtype=np.int64)
    order = np.argsort(-items.gpus, kind="stable")
    for kind, gpus in enumerate(instance.servers.gpus.tolist()):
        plenty = np.full(len(items.gpus), gpus)
        full = instance.is_full
        if count_contents(items.gpus, plenty, gpus, full=full) <= MAX_COMPOSITIONS:
            found = enumerate_contents(items.gpus[order], plenty, gpus, full=full)
            assert found is not None, "counted above"
            listed = np.empty_like(found)
            listed[:, order] = found
            if most_cnt is not None:
                within: Bools = np.abs(listed @ items.cnt) <= most_cnt
                listed = listed[within]
            share = np.ones(len(listed))
        else:
            listed = eye[items.gpus <= gpus]
            share = items.gpus[items.gpus <= gpus] / gpus
        kinds.append(np.full(len(listed), kind))
        shares.append(share)
        rows.append(listed)
    return Compositions(np.concatenate(kinds), np.concatenate(shares), np.concatenate(rows))
