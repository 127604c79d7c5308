"""What there is in the lease protocol on paper, in one moment, and what must hold in all of them.

Books with their leases, one producer's slabs and the memory behind them, consumers, reports on
their way, and what the search itself has to remember. `lease_protocol` has the steps.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final, NamedTuple

SLABS: Final = 2
CONSUMERS: Final = (0, 1)
UNNAMED: Final = -1


class Right(Enum):
    """Where the books hold a lease to be; `LeaseState`, with `reclaiming` as part of `active`."""

    GRANTED = auto()
    ACTIVE = auto()
    FENCED = auto()
    ENDED = auto()


class Entry(NamedTuple):
    """A lease in the books; `consumer` is `UNNAMED` if it is booked without a name."""

    right: Right
    consumer: int
    slabs: int


class Slab(NamedTuple):
    """A slab of the producer: whom it is lent to, and the memory that is behind it now.

    Attributes:
        lease: Id of the lease, or None when it is free.
        mapped: Consumers that can read and write the memory behind it.
        written: Consumers whose bytes are in it.
    """

    lease: int | None = None
    mapped: frozenset[int] = frozenset()
    written: frozenset[int] = frozenset()


class Phase(Enum):
    """Where a consumer stands."""

    IDLE = auto()
    GRANTED = auto()
    ATTACHED = auto()
    DEAD = auto()


class Consumer(NamedTuple):
    """A consumer: its phase, its lease, and the life of the producer its capability is for."""

    phase: Phase = Phase.IDLE
    lease: int | None = None
    life: int = 0


class Report(NamedTuple):
    """A producer's full state, on its way: its life, and slabs held by lease."""

    life: int
    held: tuple[tuple[int, int], ...]
    stale: bool = False


class State(NamedTuple):
    """Everything, in one moment.

    Attributes:
        books: Leases by id; None where the books know nothing.
        unproven: Slabs booked for the producer itself, because it could not prove a lease.
        confirmed: The producer has reported to these books, so grants may come from it.
        booked_life: The life of the producer that the books know; -1 for none.
        schema: What version the books are written in.
        wedged: A step has failed half-way and will fail for ever.
        life: The producer's.
        slabs: The producer's.
        consumers: By number.
        late: A report still on its way.
        versions: The coordinators'.
        flooded: Strangers are flooding the coordinators.
        renewed: Consumers whose use of their lease has reached the books in this period.
        excused: Consumers whose report of this period was lost.
        granted: Whom each id was truly granted to, with how many slabs: never forgotten, seen by
            proofs alone.
        unjust: A live consumer that could be heard has lost its right.
        faults: How many more may happen.
    """

    books: tuple[Entry | None, ...]
    unproven: int
    confirmed: bool
    booked_life: int
    schema: int
    wedged: bool
    life: int
    slabs: tuple[Slab, ...]
    consumers: tuple[Consumer, ...]
    late: Report | None
    versions: tuple[int, int]
    flooded: bool
    renewed: frozenset[int]
    excused: frozenset[int]
    granted: tuple[tuple[int, int] | None, ...]
    unjust: bool
    faults: int


# --- What always holds -----------------------------------------------------------------


def no_slab_has_two_owners(now: State) -> bool:
    """The memory behind a slab is mapped by those alone whom it is lent to."""
    return all(
        len(slab.mapped) <= 1 and (slab.lease is None or slab.mapped <= {owner(now, slab.lease)})
        for slab in now.slabs
    )


def no_tenant_reads_another(now: State) -> bool:
    """The memory that a consumer maps holds its own bytes only."""
    return all(slab.written <= slab.mapped or not slab.mapped for slab in now.slabs)


def no_reuse_before_acknowledgement(now: State) -> bool:
    """A live consumer that has not given back still has every slab it attached."""
    for me in now.consumers:
        if me.phase is Phase.ATTACHED and me.life == now.life and me.lease is not None:
            granted = now.granted[me.lease]
            assert granted is not None
            if sum(slab.lease == me.lease for slab in now.slabs) != granted[1]:
                return False
    return True


def books_never_grant_what_is_not_there(now: State) -> bool:
    """Booked slabs fit the offer, unless reality is ahead of a grant that is about to go."""
    return booked_slabs(list(now.books)) + now.unproven <= SLABS


def only_true_grants_name_a_consumer(now: State) -> bool:
    """A lease in the books names a consumer only if that consumer was granted it."""
    return all(
        entry is None or entry.consumer == UNNAMED or granted == (entry.consumer, entry.slabs)
        for entry, granted in zip(now.books, now.granted, strict=True)
    )


def no_step_fails_for_ever(now: State) -> bool:
    """No record makes a step of the coordinator fail."""
    return not now.wedged


def who_is_heard_keeps_its_right(now: State) -> bool:
    """Strangers cannot cost a live consumer its lease."""
    return not now.unjust


def books_are_reality(now: State) -> bool:
    """The books hold what is lent, and nothing else, for consumers that live."""
    lent = {slab.lease: 0 for slab in now.slabs if slab.lease is not None}
    for slab in now.slabs:
        if slab.lease is not None:
            lent[slab.lease] += 1
    booked = {
        i: entry.slabs
        for i, entry in enumerate(now.books)
        if entry is not None and entry.right in (Right.ACTIVE, Right.FENCED)
    }
    held = all(
        entry is None
        or entry.right in (Right.FENCED, Right.ENDED)
        or (now.consumers[entry.consumer].lease == lease)
        for lease, entry in enumerate(now.books)
    )
    return booked == lent and now.booked_life == now.life and now.confirmed and held


INVARIANTS: Final = {
    invariant.__name__: invariant
    for invariant in (
        no_slab_has_two_owners,
        no_tenant_reads_another,
        no_reuse_before_acknowledgement,
        books_never_grant_what_is_not_there,
        only_true_grants_name_a_consumer,
        no_step_fails_for_ever,
        who_is_heard_keeps_its_right,
    )
}
"""What holds in every state. `books_are_reality` is the goal that every state can still reach."""


# --- Questions that the steps ask, too ---------------------------------------------------


def owner(now: State, lease: int) -> int:
    """Whom a lease was granted to."""
    granted = now.granted[lease]
    return granted[0] if granted else UNNAMED


def booked_slabs(books: list[Entry | None]) -> int:
    """Slabs that are not free by the books."""
    return sum(entry.slabs for entry in books if entry and entry.right is not Right.ENDED)


def free_slabs(now: State) -> int:
    """Slabs that may be granted."""
    return SLABS - booked_slabs(list(now.books)) - now.unproven


def report_of(now: State) -> Report:
    """What the producer would report now."""
    held: dict[int, int] = {}
    for slab in now.slabs:
        if slab.lease is not None:
            held[slab.lease] = held.get(slab.lease, 0) + 1
    return Report(now.life, tuple(sorted(held.items())))
