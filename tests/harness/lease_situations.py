"""Situations that the lease protocol was made for: a search or a replay must have met each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from harness.lease_state import Phase, Right, State

SITUATIONS: Final[dict[str, Callable[[State], bool]]] = {
    "both consumers hold slabs": lambda now: all(
        me.phase is Phase.ATTACHED for me in now.consumers
    ),
    "a right ends while its slab is in use": lambda now: any(
        entry is not None
        and entry.right is Right.FENCED
        and any(me.phase is Phase.ATTACHED and me.lease == lease for me in now.consumers)
        for lease, entry in enumerate(now.books)
    ),
    "a slab is lent under a lease that the books hold ended": lambda now: any(
        entry is not None
        and entry.right is Right.ENDED
        and any(slab.lease == lease for slab in now.slabs)
        for lease, entry in enumerate(now.books)
    ),
    "a slab is lent under a lease that the books do not know": lambda now: any(
        slab.lease is not None and now.books[slab.lease] is None for slab in now.slabs
    ),
    "memory outlives its slab in the hands of a consumer": lambda now: any(
        slab.lease is None and slab.mapped for slab in now.slabs
    ),
    "a dead consumer's slabs wait for the proof": lambda now: any(
        me.phase is Phase.DEAD and any(slab.lease == me.lease for slab in now.slabs)
        for me in now.consumers
    ),
    "a producer holds bytes that it cannot prove": lambda now: now.unproven > 0,
    "a capability outlives the producer it was for": lambda now: any(
        me.phase is Phase.GRANTED and me.life != now.life for me in now.consumers
    ),
    "strangers flood while a lease is used": lambda now: (
        now.flooded and any(me.phase is Phase.ATTACHED for me in now.consumers)
    ),
    "a report arrives that is older than the books": lambda now: (
        now.late is not None and now.late.stale
    ),
    "two versions serve the same books": lambda now: len(set(now.versions)) > 1,
}
"""By what they are, in words."""
