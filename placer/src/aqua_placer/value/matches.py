"""Within a server: which producer shards serve which consumer group.

All modes give a consumer group one distinct producer shard per shard, or nothing.

`stable` (default) and `exact` choose by the program over prefixes (`coverage`), which covers the
most. `exact` leaves it there. `stable` then lets single shards choose again among themselves:
consumers prefer the most spare, producers the largest need (of consumers that weigh no less), and
with preferences aligned like that Gale-Shapley is sort-and-zip; unequal weights start from the
program's choice and let blocking pairs have their way: no consumer and producer are left that
would both rather have each other, which `plan.verification` checks. Producers of a group of several
shards are bound to it, because the group runs in lockstep and loses on all shards when one leaves.

`best-fit` satisfies the most consumers in full: the smallest producer that suffices, smallest
needs first; what is left is zipped. `links` ranks pairs by min(need, spare) x bandwidth, for
servers whose GPUs are not all joined alike; ranked by one common value, it is stable as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from aqua_placer.problem.instance import GRAIN_GB, Instance
from aqua_placer.value.coverage import chosen_groups, group_tables
from aqua_protocol.plan import MatchingMode


class ProducerShard(NamedTuple):
    """A producer shard on a GPU."""

    group: int
    shard: int
    gpu: int
    gb: float


class ConsumerGroup(NamedTuple):
    """A consumer group on its GPUs; `gb` is the need per shard."""

    group: int
    gpus: tuple[int, ...]
    gb: float
    weight: float

    @property
    def shards(self) -> int:
        """Producers it needs at once."""
        return len(self.gpus)


class ServedGroup(NamedTuple):
    """A consumer group and its producers, shard by shard."""

    consumer: ConsumerGroup
    producers: tuple[ProducerShard, ...]

    @property
    def covered_gb(self) -> float:
        """Per shard: lockstep waits for the weakest."""
        return min(self.consumer.gb, *(producer.gb for producer in self.producers))


class ServerMatch(NamedTuple):
    """The matching of one server."""

    server: int
    served_groups: tuple[ServedGroup, ...]
    unserved: tuple[ConsumerGroup, ...]
    idle: tuple[ProducerShard, ...]

    @property
    def covered_gb(self) -> float:
        """Weighted demand that is covered."""
        return sum(
            served.consumer.weight * served.consumer.shards * served.covered_gb
            for served in self.served_groups
        )


def match_servers(
    instance: Instance,
    slots: Int64[np.ndarray, "servers width"],
    gpus: Sequence[Sequence[int]],
    mode: MatchingMode,
) -> list[ServerMatch]:
    """Match every server.

    Args:
        slots: Groups per server, -1 for none, (num_servers, width).
        gpus: GPU indices of each group's shards.
    """
    class_of = instance.servers.class_of
    chosen: list[list[int]] = [[] for _ in slots]
    for kind, table in enumerate(group_tables(instance)):
        here = np.nonzero(class_of == kind)[0]
        for server, groups in zip(here.tolist(), chosen_groups(table, slots[here]), strict=True):
            chosen[server] = groups
    result = []
    for server, (producers, consumers) in enumerate(_sides(instance, slots, gpus)):
        links = instance.servers.links[int(class_of[server])]
        if mode is MatchingMode.BEST_FIT:
            served_groups = _best_fit(consumers, producers)
        elif mode is MatchingMode.LINKS:
            served_groups = _by_links(consumers, producers, links)
        else:
            served_groups = _blocks(consumers, producers, chosen[server])
            if mode is MatchingMode.STABLE:
                served_groups = _settle_singles(consumers, producers, served_groups)
        served = {served.consumer.group for served in served_groups}
        used = {producer for served in served_groups for producer in served.producers}
        result.append(
            ServerMatch(
                server=server,
                served_groups=tuple(served_groups),
                unserved=tuple(b for b in consumers if b.group not in served),
                idle=tuple(x for x in producers if x not in used),
            )
        )
    return result


def _sides(
    instance: Instance, slots: Int64[np.ndarray, "servers width"], gpus: Sequence[Sequence[int]]
) -> Iterator[tuple[list[ProducerShard], list[ConsumerGroup]]]:
    """Per server its producer shards, those of most spare first, and its consumers.

    Made for all servers at once, from columns: 65,536 GPUs have as many of both.
    """
    server, slot = np.nonzero(slots >= 0)
    group = slots[server, slot]
    gb = instance.r_gb[group, instance.servers.class_of[server]]
    edges = np.arange(len(slots) + 1)
    giving = np.nonzero(gb > GRAIN_GB / 2)[0]
    giving = giving[np.lexsort((group[giving], -gb[giving], server[giving]))]
    count = instance.tp[group[giving]]
    own = group[giving].tolist()
    shard = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    producers = list(
        map(
            ProducerShard,
            np.repeat(group[giving], count).tolist(),
            shard.tolist(),
            chain.from_iterable(map(gpus.__getitem__, own)),
            np.repeat(gb[giving], count).tolist(),
        )
    )
    needing = np.nonzero(gb < -GRAIN_GB / 2)[0]
    needy = group[needing]
    consumers = list(
        map(
            ConsumerGroup,
            needy.tolist(),
            map(tuple, map(gpus.__getitem__, needy.tolist())),
            (-gb[needing]).tolist(),
            instance.weight[needy].tolist(),
        )
    )
    lent = np.searchsorted(np.repeat(server[giving], count), edges).tolist()
    borrowed = np.searchsorted(server[needing], edges).tolist()
    for own_lent, own_borrowed in zip(pairwise(lent), pairwise(borrowed), strict=True):
        yield producers[slice(*own_lent)], consumers[slice(*own_borrowed)]


def _blocks(
    consumers: Sequence[ConsumerGroup], producers: Sequence[ProducerShard], chosen: Sequence[int]
) -> list[ServedGroup]:
    by_group, left = {consumer.group: consumer for consumer in consumers}, iter(producers)
    taking = [by_group[group] for group in chosen]
    return [ServedGroup(consumer, tuple(islice(left, consumer.shards))) for consumer in taking]


def _settle_singles(
    consumers: Sequence[ConsumerGroup],
    producers: Sequence[ProducerShard],
    served_groups: Sequence[ServedGroup],
) -> list[ServedGroup]:
    """Bound groups keep their producers; single shards change places until no pair blocks.

    Consumers of one weight are simply zipped by need with what is left. Unequal weights start from
    the program's blocks, because zipping by need could cost a heavy consumer more than a light one
    gains. A pair that blocks then takes what it wants: its consumer needs more and weighs no less
    than the one it pushes out, so (min is supermodular) nothing is lost, and the sum of need x
    spare over matches grows with every step, so it ends.
    """
    bound = [served for served in served_groups if len(served.producers) > 1]
    admitted = [served.consumer for served in served_groups if len(served.producers) == 1]
    taken = {producer for served in bound for producer in served.producers}
    free = [producer for producer in producers if producer not in taken]
    chosen = {consumer.group for consumer in admitted}
    rest = [b for b in consumers if b.shards == 1 and b.group not in chosen]
    rest.sort(key=lambda b: (-b.weight, -b.gb, b.group))
    if len({consumer.weight for consumer in admitted + rest}) <= 1:
        # Of sets that cover as much the program takes any; the neediest would not stand for it.
        admitted = sorted(admitted + rest, key=lambda b: (-b.gb, b.group))
        return bound + [ServedGroup(b, (x,)) for b, x in zip(admitted, free, strict=False)]
    # Positions in `free` are by falling spare; a seat after its end has no producer.
    seated = {served.producers[0]: served.consumer for served in served_groups}
    seats: list[ConsumerGroup | None] = [seated.get(producer) for producer in free]
    seats += rest
    moved = True
    while moved:
        moved = False
        for late in range(len(seats)):
            for early in range(min(late, len(free))):
                wanting, rival = seats[late], seats[early]
                gains = late >= len(free) or free[early].gb > free[late].gb + GRAIN_GB
                if wanting is None or not gains:
                    continue
                if rival is None or (
                    rival.weight <= wanting.weight and rival.gb < wanting.gb - GRAIN_GB
                ):
                    seats[early], seats[late] = wanting, rival
                    moved = True
    return bound + [
        ServedGroup(b, (x,)) for b, x in zip(seats, free, strict=False) if b is not None
    ]


def _best_fit(
    consumers: Sequence[ConsumerGroup], producers: Sequence[ProducerShard]
) -> list[ServedGroup]:
    free = sorted(producers, key=lambda producer: (producer.gb, producer.group, producer.shard))
    served_groups: list[ServedGroup] = []
    waiting = []
    for consumer in sorted(consumers, key=lambda b: (b.gb * b.shards, b.gb, b.group)):
        enough = [producer for producer in free if producer.gb >= consumer.gb - GRAIN_GB]
        if len(enough) >= consumer.shards:
            taken = enough[: consumer.shards]
            free = [producer for producer in free if producer not in taken]
            served_groups.append(ServedGroup(consumer, tuple(taken)))
        else:
            waiting.append(consumer)
    free.sort(key=lambda producer: (-producer.gb, producer.group, producer.shard))
    for consumer in sorted(waiting, key=lambda b: (-b.gb, b.group)):
        if len(free) >= consumer.shards:
            served_groups.append(ServedGroup(consumer, tuple(free[: consumer.shards])))
            free = free[consumer.shards :]
    return served_groups


def _by_links(
    consumers: Sequence[ConsumerGroup],
    producers: Sequence[ProducerShard],
    links: Float64[np.ndarray, "gpus gpus"] | None,
) -> list[ServedGroup]:
    """Groups of several shards first (they need many at once), then pairs by common value."""

    def worth(consumer: ConsumerGroup, gpu: int, producer: ProducerShard) -> float:
        speed = 1.0 if links is None else float(links[gpu, producer.gpu])
        return consumer.weight * min(consumer.gb, producer.gb) * speed

    free = list(producers)
    served_groups: list[ServedGroup] = []
    groups = [b for b in consumers if b.shards > 1]
    for consumer in sorted(groups, key=lambda b: (-b.weight * b.gb * b.shards, b.group)):
        if len(free) < consumer.shards:
            continue
        taken = []
        for gpu in consumer.gpus:
            best = max(free, key=lambda x: (worth(consumer, gpu, x), -x.group, -x.shard))
            if worth(consumer, gpu, best) <= 0:
                break
            taken.append(best)
            free.remove(best)
        if len(taken) == consumer.shards:
            served_groups.append(ServedGroup(consumer, tuple(taken)))
        else:
            free += taken
    single = [consumer for consumer in consumers if consumer.shards == 1]
    pairs = [(worth(b, b.gpus[0], x), b, x) for b in single for x in free]
    pairs.sort(key=lambda pair: (-pair[0], pair[1].group, pair[2].group, pair[2].shard))
    idle, waiting = set(free), set(single)
    for value, consumer, producer in pairs:
        if value > 0 and consumer in waiting and producer in idle:
            served_groups.append(ServedGroup(consumer, (producer,)))
            waiting.remove(consumer)
            idle.remove(producer)
    return served_groups
