"""The lease protocol as a state machine small enough to be searched to its end.

One producer with two slabs, two consumers of different tenants, two coordinators over one set of
books, and everything that may go wrong between them, at any moment: a process dies, a message is
lost, late or doubled, the books are lost whole or in part, a clock jumps, strangers flood the
coordinators, coordinators of two versions share the books, a producer lies, a consumer keeps what
it has given back. What a run may contain of this is bounded by a budget of faults; within it the
search sees every order of every step.

The model states the protocol as the code has it: adoption needs a proof, ids are drawn, slabs are
made anew between tenants, versions agree on a schema. `Bug` names ways in which an implementation
could fall short. A search with one of them planted must end in a violated invariant, or the
invariants would be worth nothing.

What it leaves out: bytes on their way (the migrator's own tests have them), more than one producer
(leases of two producers never meet), and fairness between consumers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeVar

from harness.lease_state import (
    CONSUMERS,
    SLABS,
    UNNAMED,
    Consumer,
    Entry,
    Phase,
    Report,
    Right,
    Slab,
    State,
    booked_slabs,
    free_slabs,
    report_of,
)

Item = TypeVar("Item")
Step = tuple[str, State]


class Bug(Enum):
    """A way in which an implementation could fall short of the protocol."""

    NONE = auto()
    PREDICTABLE_LEASE_IDS = auto()
    """Grants take the next id unchecked, and what a producer invents is booked under its id."""
    FLOOD_SHUTS_MEMBERS_OUT = auto()
    """Strangers fill the room that members' reports need."""
    FLOOD_STOPS_THE_CLOCK = auto()
    """The books' clock stands still while strangers are refused."""
    MEMORY_PASSES_BETWEEN_TENANTS = auto()
    """A slab that was given back is handed to another tenant as it is."""
    ADOPTION_WITHOUT_PROOF = auto()
    """A lease that the books do not know is booked for whom the producer names."""
    NEWER_VERSION_WRITES_AHEAD = auto()
    """A coordinator writes its own schema while an older one still reads the books."""
    REUSE_AT_THE_DEADLINE = auto()
    """A producer takes slabs back when the right has ended, acknowledged or not."""
    GRANTS_OUTLIVE_THEIR_ROOM = auto()
    """A grant stays although what is lent by now leaves no room for it."""
    STALE_REPORTS_ARE_BOOKED = auto()
    """A report that arrives late overwrites a newer one."""


@dataclass(frozen=True)
class LeaseProtocol:
    """The steps of the protocol.

    Args:
        bug: Planted in it.
        leases: How many ids there are to draw: how many grants a run may see.
        faults: How many faults a run may see.
    """

    bug: Bug = Bug.NONE
    leases: int = 2
    faults: int = 2

    def initial(self) -> State:
        """A producer that has reported, and consumers that hold nothing."""
        return State(
            books=(None,) * self.leases,
            unproven=0,
            confirmed=True,
            booked_life=0,
            schema=0,
            wedged=False,
            life=0,
            slabs=(Slab(),) * SLABS,
            consumers=tuple(Consumer() for _ in CONSUMERS),
            late=None,
            versions=(0, 0),
            flooded=False,
            renewed=frozenset(),
            excused=frozenset(),
            granted=(None,) * self.leases,
            unjust=False,
            faults=self.faults,
        )

    def steps(self, now: State) -> Iterator[Step]:
        """All that may happen next, with what then is."""
        yield from self.good_steps(now)
        if now.faults:
            yield from self._faults(now._replace(faults=now.faults - 1))

    def good_steps(self, now: State) -> Iterator[Step]:
        """What the parts themselves do: a run without further faults consists of these."""
        for consumer in CONSUMERS:
            yield from self._of_consumer(now, consumer)
        yield from self._of_producer(now)
        yield from self._of_books(now)

    # --- Consumers ---------------------------------------------------------------------

    def _of_consumer(self, now: State, c: int) -> Iterator[Step]:
        me = now.consumers[c]
        if me.phase is Phase.IDLE:
            for slabs in range(1, SLABS + 1):
                after = self._grant(now, c, slabs)
                if after is not None:
                    yield f"consumer {c} is granted {slabs}", after
        elif me.phase is Phase.GRANTED:
            yield f"consumer {c} attaches", self._attach(now, c)
        elif me.phase is Phase.ATTACHED:
            yield f"consumer {c} gives back", self._give_back(now, c, keeps=False)
            if self._heard(now):
                yield f"consumer {c} renews", now._replace(renewed=now.renewed | {c})
        if me.phase is not Phase.DEAD and me.lease is not None and me.life != now.life:
            yield f"consumer {c} sees its producer gone", self._consumer(now, c, Consumer())

    def _heard(self, now: State) -> bool:
        """Whether a member that has a token gets through."""
        return not (now.flooded and self.bug is Bug.FLOOD_SHUTS_MEMBERS_OUT)

    def _grant(self, now: State, c: int, slabs: int) -> State | None:
        if not now.confirmed or now.wedged or free_slabs(now) < slabs:
            return None
        if any(
            entry and entry.consumer == c and entry.right is not Right.ENDED for entry in now.books
        ):
            return None
        unused = [i for i, granted in enumerate(now.granted) if granted is None]
        if not unused:
            return None
        lease = unused[0]
        if now.books[lease] is not None:
            if self.bug is Bug.PREDICTABLE_LEASE_IDS:
                return now._replace(wedged=True)
            free = [i for i in unused if now.books[i] is None]
            if not free:
                return None
            lease = free[0]
        return self._consumer(
            now._replace(
                books=_put(now.books, lease, Entry(Right.GRANTED, c, slabs)),
                granted=_put(now.granted, lease, (c, slabs)),
            ),
            c,
            Consumer(Phase.GRANTED, lease, now.booked_life),
        )

    def _attach(self, now: State, c: int) -> State:
        me = now.consumers[c]
        assert me.lease is not None
        granted = now.granted[me.lease]
        assert granted is not None
        wanted = granted[1]
        free = [i for i, slab in enumerate(now.slabs) if slab.lease is None][:wanted]
        if me.life != now.life or len(free) < wanted:
            return self._consumer(now, c, Consumer())
        slabs = list(now.slabs)
        for i in free:
            old = slabs[i]
            strangers = (old.mapped | old.written) - {c}
            anew = strangers and self.bug is not Bug.MEMORY_PASSES_BETWEEN_TENANTS
            memory = Slab() if anew else old
            slabs[i] = Slab(me.lease, memory.mapped | {c}, memory.written | {c})
        after = self._consumer(now, c, me._replace(phase=Phase.ATTACHED))
        return after._replace(slabs=tuple(slabs), renewed=now.renewed | {c})

    def _give_back(self, now: State, c: int, *, keeps: bool) -> State:
        me = now.consumers[c]
        slabs = tuple(
            Slab(None, slab.mapped if keeps else slab.mapped - {c}, slab.written)
            if slab.lease == me.lease and me.life == now.life
            else slab
            for slab in now.slabs
        )
        return self._consumer(now, c, Consumer())._replace(slabs=slabs)

    @staticmethod
    def _consumer(now: State, c: int, me: Consumer) -> State:
        after = now._replace(consumers=_put(now.consumers, c, me))
        if me.phase is not Phase.ATTACHED:
            after = after._replace(renewed=after.renewed - {c}, excused=after.excused - {c})
        return after

    # --- The producer ------------------------------------------------------------------

    def _of_producer(self, now: State) -> Iterator[Step]:
        if self._heard(now):
            yield "the producer reports", self._book(now, report_of(now))
        if now.late is not None:
            yield "the late report arrives", self._book(now, now.late)._replace(late=None)
        for c in CONSUMERS:
            if now.consumers[c].phase is Phase.DEAD:
                yield (
                    f"the producer sees consumer {c} dead",
                    now._replace(slabs=tuple(self._unless_of(slab, now, c) for slab in now.slabs)),
                )
        if self.bug is Bug.REUSE_AT_THE_DEADLINE:
            for lease, entry in enumerate(now.books):
                if entry is not None and entry.right is Right.FENCED:
                    yield (
                        f"the producer takes the slabs of lease {lease}",
                        now._replace(
                            slabs=tuple(
                                slab._replace(lease=None, written=frozenset())
                                if slab.lease == lease
                                else slab
                                for slab in now.slabs
                            )
                        ),
                    )

    @staticmethod
    def _unless_of(slab: Slab, now: State, c: int) -> Slab:
        """The slab, made anew if it was lent to a consumer whose process is gone."""
        lent = slab.lease is not None and now.granted[slab.lease]
        return Slab() if lent and lent[0] == c else slab

    # --- The books ---------------------------------------------------------------------

    def _book(self, now: State, report: Report) -> State:
        """A report arrives at coordinator 0."""
        is_stale = report.life < now.booked_life or report.stale
        if now.wedged or (is_stale and self.bug is not Bug.STALE_REPORTS_ARE_BOOKED):
            return now
        if now.schema > now.versions[0]:
            return now._replace(wedged=True)
        held = dict(report.held)
        books = [
            self._booked_entry(now, report, lease, held.get(lease, 0))
            for lease in range(len(now.books))
        ]
        # Grants that no longer fit go, newest first; nothing is lent under them.
        for lease in reversed(range(len(books))):
            entry = books[lease]
            if entry and entry.right is Right.GRANTED and self._lacks_room(books):
                books[lease] = entry._replace(right=Right.ENDED)
        unjust = any(
            was and was.right is Right.ACTIVE and lease not in held and self._is_used(now, lease)
            for lease, was in enumerate(now.books)
        )
        # By the time that new books are confirmed their producer refuses what lost ones granted.
        consumers = now.consumers
        if now.booked_life < 0:
            consumers = tuple(
                me._replace(life=-1) if me.phase is Phase.GRANTED else me for me in consumers
            )
        return now._replace(
            books=tuple(books),
            consumers=consumers,
            unproven=0,
            confirmed=True,
            booked_life=report.life,
            late=now.late._replace(stale=True) if now.late not in (None, report) else now.late,
            unjust=now.unjust or unjust,
        )

    def _lacks_room(self, books: list[Entry | None]) -> bool:
        return booked_slabs(books) > SLABS and self.bug is not Bug.GRANTS_OUTLIVE_THEIR_ROOM

    @staticmethod
    def _booked_entry(now: State, report: Report, lease: int, slabs: int) -> Entry | None:
        """What the books hold of a lease after a report with `slabs` held under it.

        A lease that they do not know comes with the proof of its grant: what a producer cannot
        prove is in `_lies`.
        """
        entry = now.books[lease]
        if entry and report.life > now.booked_life:
            entry = entry._replace(right=Right.ENDED)
        if slabs:
            granted = now.granted[lease]
            assert granted is not None
            if entry is None or entry.right is Right.GRANTED:
                return Entry(Right.ACTIVE, granted[0], slabs)
            if entry.right is Right.ENDED:
                return Entry(Right.FENCED, granted[0], slabs)
            return entry._replace(slabs=slabs)
        if entry and entry.right is not Right.GRANTED:
            return entry._replace(right=Right.ENDED)
        return entry

    @staticmethod
    def _is_used(now: State, lease: int) -> bool:
        return any(
            me.phase is Phase.ATTACHED and me.lease == lease and me.life == now.life
            for me in now.consumers
        )

    def _of_books(self, now: State) -> Iterator[Step]:
        if now.wedged:
            return
        stands_still = now.flooded and self.bug is Bug.FLOOD_STOPS_THE_CLOCK
        for lease, entry in enumerate(now.books):
            if entry is None:
                continue
            if entry.right is Right.GRANTED and not stands_still:
                yield f"grant {lease} is not taken up in time", self._expire(now, lease)
            elif entry.right is Right.ACTIVE and not stands_still and self._is_silent(now, lease):
                yield f"lease {lease} of a silent consumer expires", self._expire(now, lease)
            elif entry.right is Right.ENDED:
                yield (
                    f"lease {lease} is forgotten",
                    now._replace(books=_put(now.books, lease, None)),
                )
        after = self._period(now)
        if after is not None:
            yield "a period passes", after
        if min(now.versions) > now.schema:
            yield "the books' schema is raised", now._replace(schema=min(now.versions))

    @staticmethod
    def _is_silent(now: State, lease: int) -> bool:
        """Whether the consumer of a lease in the books is dead, or has done with it."""
        entry = now.books[lease]
        assert entry is not None
        holder = now.consumers[entry.consumer] if entry.consumer != UNNAMED else Consumer()
        return holder.lease != lease or holder.phase is Phase.DEAD

    def _expire(self, now: State, lease: int) -> State:
        entry = now.books[lease]
        assert entry is not None
        right = Right.ENDED if entry.right is Right.GRANTED else Right.FENCED
        return now._replace(books=_put(now.books, lease, entry._replace(right=right)))

    def _period(self, now: State) -> State | None:
        """A period passes once each live consumer has been heard or has failed to be.

        Whom strangers shut out has failed to be heard; but the fault was the coordinator's.
        """
        attached = {c for c in CONSUMERS if now.consumers[c].phase is Phase.ATTACHED}
        unheard = attached - now.renewed
        shut_out = frozenset() if self._heard(now) else unheard - now.excused
        if unheard - now.excused - shut_out or not attached:
            return None
        after = now._replace(renewed=frozenset(), excused=frozenset())
        for c in unheard:
            lease = now.consumers[c].lease
            entry = now.books[lease] if lease is not None else None
            if lease is not None and entry is not None and entry.right is Right.ACTIVE:
                after = self._expire(after, lease)
                after = after._replace(unjust=after.unjust or c in shut_out)
        return after

    # --- Faults, each of which costs one of the budget -----------------------------------

    def _faults(self, now: State) -> Iterator[Step]:
        for c in CONSUMERS:
            yield from self._consumer_faults(now, c)
        yield "the producer restarts", now._replace(life=now.life + 1, slabs=(Slab(),) * SLABS)
        yield from self._lies(now)
        if now.late is None:
            yield "a report sets out", now._replace(late=report_of(now))
        else:
            yield "the late report arrives, and will again", self._book(now, now.late)
        if not now.flooded:
            yield "strangers flood the coordinators", now._replace(flooded=True)
        yield from self._books_faults(now)

    def _consumer_faults(self, now: State, c: int) -> Iterator[Step]:
        me = now.consumers[c]
        if me.phase is Phase.ATTACHED:
            keeps = self._give_back(now, c, keeps=True)
            yield f"consumer {c} gives back and keeps its mapping", keeps
            yield f"consumer {c} is not heard", now._replace(excused=now.excused | {c})
        if me.phase is Phase.GRANTED:
            yield f"the grant's answer to consumer {c} is lost", self._consumer(now, c, Consumer())
        if me.phase is not Phase.DEAD:
            slabs = tuple(slab._replace(mapped=slab.mapped - {c}) for slab in now.slabs)
            dead = self._consumer(now, c, me._replace(phase=Phase.DEAD))
            yield f"consumer {c} dies", dead._replace(slabs=slabs)

    def _books_faults(self, now: State) -> Iterator[Step]:
        for lease, entry in enumerate(now.books):
            if entry is not None and not now.wedged:
                yield f"the clock jumps past lease {lease}", self._jump(now, lease)
                yield f"the books lose lease {lease}", self._lose(now, lease)
        yield "the books are lost", self._lose_all(now)
        first, second = now.versions
        schema = 1 if self.bug is Bug.NEWER_VERSION_WRITES_AHEAD else now.schema
        if not first:
            yield "coordinator 0 is upgraded", now._replace(versions=(1, second), schema=schema)
        if not second:
            yield "coordinator 1 is upgraded", now._replace(versions=(first, 1), schema=schema)

    def _jump(self, now: State, lease: int) -> State:
        entry = now.books[lease]
        if entry is None or entry.right not in (Right.GRANTED, Right.ACTIVE):
            return now
        return self._expire(now, lease)

    @staticmethod
    def _lose(now: State, lease: int) -> State:
        """One record is gone; the books notice, and grant nothing before the producer reports."""
        return now._replace(books=_put(now.books, lease, None), confirmed=False)

    @staticmethod
    def _lose_all(now: State) -> State:
        late = now.late._replace(stale=False) if now.late else None
        return now._replace(
            books=(None,) * len(now.books), unproven=0, confirmed=False, booked_life=-1, late=late
        )

    def _lies(self, now: State) -> Iterator[Step]:
        """A producer reports slabs held under a lease that was never granted."""
        free = sum(slab.lease is None for slab in now.slabs)
        unknown = [i for i, granted in enumerate(now.granted) if granted is None]
        if not free or not unknown or now.wedged or now.life < now.booked_life:
            return
        after = self._book(now, report_of(now))
        spare = SLABS - booked_slabs(list(after.books))
        if spare <= 0:
            return
        lease = unknown[0]
        if self.bug is Bug.ADOPTION_WITHOUT_PROOF:
            for c in CONSUMERS:
                invented = Entry(Right.ACTIVE, c, 1)
                yield (
                    f"the producer invents a lease of consumer {c}",
                    after._replace(books=_put(after.books, lease, invented)),
                )
        elif self.bug is Bug.PREDICTABLE_LEASE_IDS:
            invented = Entry(Right.ACTIVE, UNNAMED, 1)
            yield (
                "the producer invents a lease",
                after._replace(books=_put(after.books, lease, invented)),
            )
        else:
            yield "the producer invents a lease", after._replace(unproven=1)


def _put(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    return (*items[:index], item, *items[index + 1 :])
