"""Within a server: which producer shards serve which consumer group.

All modes give a consumer group one distinct producer shard per shard, or nothing.

`stable` (default) and `exact` choose by the program over prefixes (`covering`), which covers the
most. `exact` leaves it there. `stable` then lets single shards choose again among themselves:
consumers prefer the most spare, producers the largest need (of consumers that weigh no less), and
with preferences aligned like that Gale-Shapley is sort-and-zip; unequal weights start from the
program's choice and let blocking pairs have their way. `blocking_pairs` proves it: no
consumer and producer would both rather have each other. Producers of a group of several shards are
bound to it, because the group runs in lockstep and loses on all shards when one leaves.

`best-fit` satisfies the most consumers in full: the smallest producer that suffices, smallest
needs first; what is left is zipped. `links` ranks pairs by min(need, spare) x bandwidth, for
servers whose GPUs are not all joined alike; ranked by one common value, it is stable as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from aqua_placer.coverage.prefixes import chosen_groups
from aqua_placer.coverage.rosters import roster
from aqua_placer.problem.columns import Floats, Ints
from aqua_placer.problem.instance import GRAIN_GB, Instance
from aqua_protocol.plan import MatchingMode


class Lender(NamedTuple):
    """A producer shard on a GPU."""

    group: int
    shard: int
    gpu: int
    gb: float


class Borrower(NamedTuple):
    """A consumer group on its GPUs; `gb` is the need per shard."""

    group: int
    gpus: tuple[int, ...]
    gb: float
    weight: float

    @property
    def shards(self) -> int:
        """Producers it needs at once."""
        return len(self.gpus)


class Service(NamedTuple):
    """A consumer group and its producers, shard by shard."""

    borrower: Borrower
    lenders: tuple[Lender, ...]

    @property
    def covered_gb(self) -> float:
        """Per shard: lockstep waits for the weakest."""
        return min(self.borrower.gb, *(lender.gb for lender in self.lenders))


class ServerMatch(NamedTuple):
    """The matching of one server."""

    server: int
    services: tuple[Service, ...]
    unserved: tuple[Borrower, ...]
    idle: tuple[Lender, ...]

    @property
    def covered_gb(self) -> float:
        """Weighted demand that is covered."""
        return sum(
            service.borrower.weight * service.borrower.shards * service.covered_gb
            for service in self.services
        )


class BlockingPair(NamedTuple):
    """A consumer and a producer shard that would both rather have each other."""

    server: int
    borrower: Borrower
    lender: Lender


def match_servers(
    instance: Instance, slots: Ints, gpus: Sequence[Sequence[int]], mode: MatchingMode
) -> list[ServerMatch]:
    """Match every server.

    Args:
        slots: Groups per server, -1 for none, (num_servers, width).
        gpus: GPU indices of each group's shards.
    """
    class_of = instance.servers.class_of
    chosen = _chosen(instance, slots)
    result = []
    for server, (lenders, borrowers) in enumerate(_sides(instance, slots, gpus)):
        links = instance.servers.links[int(class_of[server])]
        if mode is MatchingMode.BEST_FIT:
            services = _best_fit(borrowers, lenders)
        elif mode is MatchingMode.LINKS:
            services = _by_links(borrowers, lenders, links)
        else:
            services = _blocks(borrowers, lenders, chosen[server])
            if mode is MatchingMode.STABLE:
                services = _settle_singles(borrowers, lenders, services)
        served = {service.borrower.group for service in services}
        used = {(lender.group, lender.shard) for s in services for lender in s.lenders}
        result.append(
            ServerMatch(
                server=server,
                services=tuple(services),
                unserved=tuple(b for b in borrowers if b.group not in served),
                idle=tuple(x for x in lenders if (x.group, x.shard) not in used),
            )
        )
    return result


def _sides(
    instance: Instance, slots: Ints, gpus: Sequence[Sequence[int]]
) -> Iterator[tuple[list[Lender], list[Borrower]]]:
    """Per server its producer shards, those of most spare first, and its consumers.

    Made for all servers at once, from columns: 65,536 GPUs have as many of both.
    """
    server, slot = np.nonzero(slots >= 0)
    group = slots[server, slot]
    gb = instance.r_gb[group, instance.servers.class_of[server]]
    edges = np.arange(len(slots) + 1)
    lending = np.nonzero(gb > GRAIN_GB / 2)[0]
    lending = lending[np.lexsort((group[lending], -gb[lending], server[lending]))]
    count = instance.tp[group[lending]]
    own = group[lending].tolist()
    shard = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
    lenders = list(
        map(
            Lender,
            np.repeat(group[lending], count).tolist(),
            shard.tolist(),
            chain.from_iterable(map(gpus.__getitem__, own)),
            np.repeat(gb[lending], count).tolist(),
        )
    )
    borrowing = np.nonzero(gb < -GRAIN_GB / 2)[0]
    needy = group[borrowing]
    borrowers = list(
        map(
            Borrower,
            needy.tolist(),
            map(tuple, map(gpus.__getitem__, needy.tolist())),
            (-gb[borrowing]).tolist(),
            instance.weight[needy].tolist(),
        )
    )
    lent = np.searchsorted(np.repeat(server[lending], count), edges).tolist()
    borrowed = np.searchsorted(server[borrowing], edges).tolist()
    for own_lent, own_borrowed in zip(pairwise(lent), pairwise(borrowed), strict=True):
        yield lenders[slice(*own_lent)], borrowers[slice(*own_borrowed)]


def _chosen(instance: Instance, slots: Ints) -> list[list[int]]:
    """Per server, the consumer groups of the best state, in the order of their blocks."""
    result: list[list[int]] = [[] for _ in range(len(slots))]
    for kind, gpus in enumerate(instance.servers.gpus.tolist()):
        here = np.nonzero(instance.servers.class_of == kind)[0]
        table = roster(instance.tp, instance.r_gb[:, kind], instance.weight, gpus)
        for server, groups in zip(here.tolist(), chosen_groups(table, slots[here]), strict=True):
            result[server] = groups
    return result


def _blocks(
    borrowers: Sequence[Borrower], lenders: Sequence[Lender], chosen: Sequence[int]
) -> list[Service]:
    by_group = {borrower.group: borrower for borrower in borrowers}
    services, at = [], 0
    for group in chosen:
        borrower = by_group[group]
        services.append(Service(borrower, tuple(lenders[at : at + borrower.shards])))
        at += borrower.shards
    return services


def _settle_singles(
    borrowers: Sequence[Borrower], lenders: Sequence[Lender], services: Sequence[Service]
) -> list[Service]:
    """Bound groups keep their producers; single shards change places until no pair blocks.

    Consumers of one weight are simply zipped by need with what is left. Unequal weights start from
    the program's blocks, because zipping by need could cost a heavy consumer more than a light one
    gains. A pair that blocks then takes what it wants: its consumer needs more and weighs no less
    than the one it pushes out, so (min is supermodular) nothing is lost, and the sum of need x
    spare over matches grows with every step, so it ends.
    """
    bound, admitted, free = [], [], []
    at = 0
    for service in services:
        if len(service.lenders) > 1:
            bound.append(service)
        else:
            admitted.append(service.borrower)
            free.append(lenders[at])
        at += len(service.lenders)
    free += lenders[at:]
    chosen = {borrower.group for borrower in admitted}
    rest = [b for b in borrowers if b.shards == 1 and b.group not in chosen]
    rest.sort(key=lambda b: (-b.weight, -b.gb, b.group))
    if len({borrower.weight for borrower in admitted + rest}) <= 1:
        # Of sets that cover as much the program takes any; the neediest would not stand for it.
        admitted = sorted(admitted + rest, key=lambda b: (-b.gb, b.group))
        return bound + [Service(b, (x,)) for b, x in zip(admitted, free, strict=False)]
    # Positions in `free` are by falling spare; whoever comes after its end has no producer.
    seated = {(s.lenders[0].group, s.lenders[0].shard): s.borrower for s in services}
    seats: list[Borrower | None] = [seated.get((x.group, x.shard)) for x in free]
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
    return bound + [Service(b, (x,)) for b, x in zip(seats, free, strict=False) if b is not None]


def _best_fit(borrowers: Sequence[Borrower], lenders: Sequence[Lender]) -> list[Service]:
    free = sorted(lenders, key=lambda lender: (lender.gb, lender.group, lender.shard))
    services: list[Service] = []
    waiting = []
    for borrower in sorted(borrowers, key=lambda b: (b.gb * b.shards, b.gb, b.group)):
        enough = [lender for lender in free if lender.gb >= borrower.gb - GRAIN_GB]
        if len(enough) >= borrower.shards:
            taken = enough[: borrower.shards]
            free = [lender for lender in free if lender not in taken]
            services.append(Service(borrower, tuple(taken)))
        else:
            waiting.append(borrower)
    free.sort(key=lambda lender: (-lender.gb, lender.group, lender.shard))
    for borrower in sorted(waiting, key=lambda b: (-b.gb, b.group)):
        if len(free) >= borrower.shards:
            services.append(Service(borrower, tuple(free[: borrower.shards])))
            free = free[borrower.shards :]
    return services


def _by_links(
    borrowers: Sequence[Borrower], lenders: Sequence[Lender], links: Floats | None
) -> list[Service]:
    """Groups of several shards first (they need many at once), then pairs by common value."""

    def worth(borrower: Borrower, gpu: int, lender: Lender) -> float:
        speed = 1.0 if links is None else float(links[gpu, lender.gpu])
        return borrower.weight * min(borrower.gb, lender.gb) * speed

    free = list(lenders)
    services: list[Service] = []
    groups = [b for b in borrowers if b.shards > 1]
    for borrower in sorted(groups, key=lambda b: (-b.weight * b.gb * b.shards, b.group)):
        if len(free) < borrower.shards:
            continue
        taken = []
        for gpu in borrower.gpus:
            best = max(free, key=lambda x: (worth(borrower, gpu, x), -x.group, -x.shard))
            if worth(borrower, gpu, best) <= 0:
                break
            taken.append(best)
            free.remove(best)
        if len(taken) == borrower.shards:
            services.append(Service(borrower, tuple(taken)))
        else:
            free += taken
    pairs = sorted(
        (
            (-worth(borrower, borrower.gpus[0], lender), borrower.group, lender.group, lender.shard)
            for borrower in borrowers
            if borrower.shards == 1
            for lender in free
        ),
    )
    by_group = {borrower.group: borrower for borrower in borrowers}
    open_lenders = {(lender.group, lender.shard): lender for lender in free}
    served: set[int] = set()
    for value, consumer, producer, shard in pairs:
        if value < 0 and consumer not in served and (producer, shard) in open_lenders:
            services.append(Service(by_group[consumer], (open_lenders.pop((producer, shard)),)))
            served.add(consumer)
    return services


def blocking_pairs(match: ServerMatch) -> list[BlockingPair]:
    """Every pair that would both rather have each other; empty for a stable matching.

    A single-shard consumer gains by a producer with more spare than its own, as far as it needs
    it. A producer gains by a consumer that needs more and weighs no less. Producers bound to a
    lockstep group do not leave it; a lockstep group gains by enough idle producers.
    """
    found = []
    serving: dict[tuple[int, int], Borrower] = {}
    has: dict[int, float] = {}
    for service in match.services:
        for lender in service.lenders:
            serving[lender.group, lender.shard] = service.borrower
        has[service.borrower.group] = min(lender.gb for lender in service.lenders)
    everyone = [service.borrower for service in match.services] + list(match.unserved)
    lenders = [lender for s in match.services for lender in s.lenders] + list(match.idle)
    for borrower in everyone:
        if borrower.shards > 1:
            if borrower.group not in has and len(match.idle) >= borrower.shards:
                found.append(BlockingPair(match.server, borrower, match.idle[0]))
            continue
        for lender in lenders:
            rival = serving.get((lender.group, lender.shard))
            wants = lender.gb > has.get(borrower.group, 0.0) + GRAIN_GB
            if rival is None:
                accepts = True
            else:
                accepts = (
                    rival.shards == 1
                    and rival.weight <= borrower.weight
                    and rival.gb < borrower.gb - GRAIN_GB
                )
            if wants and accepts:
                found.append(BlockingPair(match.server, borrower, lender))
    return found
