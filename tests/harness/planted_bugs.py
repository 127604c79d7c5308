"""Bugs to plant in a simulated cluster: each must be found, or the invariants are worth nothing.

Some change the Lua text, some a method of the product's Python, some the network before it. What is
replaced must be there, so that a bug which no longer applies fails loudly.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

from aqua_coordinator.store import scripts
from aqua_coordinator.store.adoption import AdoptionKeys
from aqua_coordinator.store.keys import KEYS
from aqua_coordinator.store.scripts import Library
from aqua_protocol.members import HeldLease
from aqua_protocol.slab import SlabState
from aqualib.producer.pool import SlabPool
from aqualib.producer.slab_memory import SlabMemory
from harness.simulated_faults import Kind
from harness.simulated_store import Coordinator, Network


@dataclass(frozen=True)
class Plant:
    """A bug, and what it takes to meet it.

    Attributes:
        what: Words of the invariant that finds it.
        faults: Kinds that a run may have; the bug must need no others.
        lua: What to replace in the library, by what.
        patches: What to replace in Python: an owner, a name, and the new thing.
        is_mixed: Only one of the two coordinators has the changed library.
        seed: Of the run to begin with; it found the bug when it was last looked for.
    """

    what: str
    faults: tuple[Kind, ...]
    lua: tuple[tuple[str, str], ...] = ()
    patches: tuple[tuple[Any, str, Callable[..., Any]], ...] = ()
    is_mixed: bool = False
    seed: int = 0

    @contextlib.contextmanager
    def planted(self) -> Iterator[tuple[Library | None, ...]]:
        """The libraries of a cluster that has the bug; the rest is in place within the block."""
        with contextlib.ExitStack() as stack:
            for owner, name, thing in self.patches:
                stack.enter_context(mock.patch.object(owner, name, thing))
            changed = changed_library(*self.lua)
            yield (changed, None) if self.is_mixed else (changed,)


def changed_library(*changes: tuple[str, str]) -> Library:
    """The library with parts of its text replaced, under a name of its own.

    Raises:
        AssertionError: There is no such part.
    """
    library = scripts.load_library()
    source = library.source
    for old, new in changes:
        assert old in source, f"the library no longer says {old!r}"
        source = source.replace(old, new)
    name = f"{library.name[:-4]}{hashlib.sha256(source.encode()).hexdigest()[:4]}"
    return Library(name, source.replace(library.name, name))


def _refuse_all_in_a_flood(self: Network, member: str) -> bool:
    del member
    return self.is_flooded or self.machine.random.random() < self.refusals


def _stand_still_in_a_flood(sweep: Callable[[Coordinator], None]) -> Callable[[Coordinator], None]:
    def only_in_peace(self: Coordinator) -> None:
        if not self.network.is_flooded:
            sweep(self)

    return only_in_peace


def _take_back_late_slabs(self: SlabPool, slab: Any, event: object) -> None:  # noqa: ANN401 - the pool's
    del event
    is_held = slab.state in {SlabState.LEASED, SlabState.RECLAIMING}
    if (
        is_held and len(self.held_by(slab.lease_id)) > 1
    ):  # A lease without slabs would give it away.
        self.take_back(slab)


def _leave(self: SlabMemory, memory: Any) -> Any:  # noqa: ANN401 - the transport's
    del self
    return memory


def _believe_every_proof(self: AdoptionKeys, report: object, held: HeldLease) -> int:
    del self, report
    return held.held_bytes


PLANTS: Final = {
    "leases are adopted without a proof": Plant(
        "never granted",
        (Kind.LIES,),
        patches=((AdoptionKeys, "granted_bytes", _believe_every_proof),),
    ),
    "a flood shuts members out": Plant(
        "without a fault",
        (Kind.FLOOD,),
        patches=((Network, "refuses", _refuse_all_in_a_flood),),
        seed=4,
    ),
    "a flood stops the clock": Plant(
        "keys stay",
        (Kind.FLOOD, Kind.CRASH),
        patches=((Coordinator, "sweep", _stand_still_in_a_flood(Coordinator.sweep)),),
    ),
    "memory passes between tenants": Plant(
        "maps? it|has left", (), patches=((SlabMemory, "make_anew", _leave),)
    ),
    "slabs are taken back at the deadline": Plant(
        "lent anew|raised",
        (Kind.SLOW_RETURN,),
        patches=((SlabPool, "quarantine", _take_back_late_slabs),),
        seed=14,
    ),
    "a deadline outlives the right that it ends": Plant(
        "deadline", (Kind.CRASH,), lua=((f"strike('{KEYS['deadlines']}', lease.lease_id)", ""),)
    ),
    "late reports are booked": Plant(
        "without a fault: returned",
        (Kind.DOUBLING,),
        lua=(("if revision < known.revision", "if false and revision < known.revision"),),
    ),
    "a version writes records that the other cannot read": Plant(
        "no booked lease",
        (),
        lua=(
            (
                "lease.producer_id,\n    lease.consumer_id, integer(lease.bytes)",
                "lease.consumer_id,\n    lease.producer_id, integer(lease.bytes)",
            ),
        ),
        is_mixed=True,
    ),
}
"""Bugs by what they do."""
