"""The slab: one physical piece of a producer's memory, as its owner sees it.

The producer process owns its slabs; no other can hand them out. There is no way to take a
mapping away from another process (a CUDA import pins the memory until the importer unmaps or
dies), hence three rules, of which the table encodes the first two:

1. Only `RETURN`, the holder's own answer for the right generation, makes a slab `FREE` again.
2. A slab whose holder fell silent or overran its deadline is `QUARANTINED` and never lent again:
   even when the holder answers late or is proven dead, the physical slab is `RETIRED` and a new
   one is made in its place, so that the driver's reference count is the fence.
3. `RETURN` is the holder's word. A `FREE` slab goes as it is only to the tenant that had it; for
   any other it is withdrawn, and a new one is made.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from aqua_protocol.machine import StateMachine


class SlabState(StrEnum):
    """Where a physical slab stands with its owner."""

    FREE = "free"
    LEASED = "leased"
    RECLAIMING = "reclaiming"
    QUARANTINED = "quarantined"
    RETIRED = "retired"


class SlabEvent(StrEnum):
    """What can happen to a physical slab."""

    LEASE = "lease"
    RECLAIM = "reclaim"
    RETURN = "return"
    DEADLINE = "deadline"
    HOLDER_SILENT = "holder_silent"
    HOLDER_DEAD = "holder_dead"
    WITHDRAW = "withdraw"


_S, _E = SlabState, SlabEvent

SLAB: Final[StateMachine[SlabState, SlabEvent]] = StateMachine(
    noun="slab",
    initial=_S.FREE,
    terminal=frozenset({_S.RETIRED}),
    transitions={
        (_S.FREE, _E.LEASE): _S.LEASED,
        (_S.FREE, _E.WITHDRAW): _S.RETIRED,
        (_S.LEASED, _E.RETURN): _S.FREE,
        (_S.LEASED, _E.RECLAIM): _S.RECLAIMING,
        (_S.LEASED, _E.HOLDER_SILENT): _S.QUARANTINED,
        (_S.LEASED, _E.HOLDER_DEAD): _S.RETIRED,
        (_S.RECLAIMING, _E.RECLAIM): _S.RECLAIMING,
        (_S.RECLAIMING, _E.RETURN): _S.FREE,
        (_S.RECLAIMING, _E.DEADLINE): _S.QUARANTINED,
        (_S.RECLAIMING, _E.HOLDER_SILENT): _S.QUARANTINED,
        (_S.RECLAIMING, _E.HOLDER_DEAD): _S.RETIRED,
        (_S.QUARANTINED, _E.RETURN): _S.RETIRED,
        (_S.QUARANTINED, _E.DEADLINE): _S.QUARANTINED,
        (_S.QUARANTINED, _E.HOLDER_SILENT): _S.QUARANTINED,
        (_S.QUARANTINED, _E.HOLDER_DEAD): _S.RETIRED,
    },
    meanings={
        _S.FREE: "Exists, offered, mapped by its owner alone; may be lent or withdrawn.",
        _S.LEASED: "Handed out under a lease; the holder may have it mapped.",
        _S.RECLAIMING: "Asked back; the holder is moving its bytes away.",
        _S.QUARANTINED: "The holder did not answer in time or vanished; never lent again.",
        _S.RETIRED: "Let go: the physical memory goes back once the last mapping is gone.",
        _E.LEASE: "Handed to a consumer; the generation goes up by one.",
        _E.RECLAIM: "The owner asks for it back, with a deadline.",
        _E.RETURN: "The holder has unmapped it and says so, naming this generation.",
        _E.DEADLINE: "The reclaim deadline passed without an answer.",
        _E.HOLDER_SILENT: "The lease channel closed while the holder's process may still live.",
        _E.HOLDER_DEAD: "The kernel reports the holder's process gone.",
        _E.WITHDRAW: "The owner takes the memory, for itself or to make it anew for a new tenant.",
    },
)

HELD_STATES: Final = frozenset({_S.LEASED, _S.RECLAIMING, _S.QUARANTINED})
"""States in which a consumer may still have the slab mapped."""
