"""The lease: a consumer's time-bounded right to slabs of one producer, as the books see it.

Three parties move it. The consumer renews and releases, the producer attaches, reclaims and
returns, the coordinator grants, expires and revokes. The rule that everything rests on: bytes
leave the books only when the *producer* says that the slabs are back (or when the producer itself
is gone). A right that has merely ended, by the clock, by an operator or by a dead consumer, is
`FENCED`: its holder may not use it, and no other may have its bytes yet.

A lease that was granted but never attached holds no slab, so it ends at once. Should its consumer
attach in that very moment, the producer's next report names a lease that the books hold ended, and
`ADOPT` books the bytes again as `FENCED`: the books follow reality, never the other way round.

Source: Aqua section 6 knows allocate, free and reclaim only; expiry, fencing and adoption are ours,
because the paper's coordinator neither fails nor restarts.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from aqua_protocol.machine import StateMachine


class LeaseState(StrEnum):
    """Where a lease stands in the books."""

    GRANTED = "granted"
    ACTIVE = "active"
    RECLAIMING = "reclaiming"
    FENCED = "fenced"
    RELEASED = "released"
    LOST = "lost"


class LeaseEvent(StrEnum):
    """What can happen to a lease."""

    ATTACH = "attach"
    RENEW = "renew"
    RECLAIM = "reclaim"
    RECLAIM_DONE = "reclaim_done"
    RETURN_SOME = "return_some"
    RETURN_ALL = "return_all"
    RELEASE = "release"
    EXPIRE = "expire"
    REVOKE = "revoke"
    CONSUMER_LOST = "consumer_lost"
    PRODUCER_LOST = "producer_lost"
    ADOPT = "adopt"


_S, _E = LeaseState, LeaseEvent

LEASE: Final[StateMachine[LeaseState, LeaseEvent]] = StateMachine(
    noun="lease",
    initial=_S.GRANTED,
    terminal=frozenset({_S.RELEASED, _S.LOST}),
    transitions={
        (_S.GRANTED, _E.ATTACH): _S.ACTIVE,
        (_S.GRANTED, _E.RENEW): _S.GRANTED,
        (_S.GRANTED, _E.RECLAIM): _S.RELEASED,
        (_S.GRANTED, _E.RELEASE): _S.RELEASED,
        (_S.GRANTED, _E.EXPIRE): _S.RELEASED,
        (_S.GRANTED, _E.REVOKE): _S.RELEASED,
        (_S.GRANTED, _E.CONSUMER_LOST): _S.RELEASED,
        (_S.GRANTED, _E.PRODUCER_LOST): _S.LOST,
        (_S.ACTIVE, _E.ATTACH): _S.ACTIVE,
        (_S.ACTIVE, _E.RENEW): _S.ACTIVE,
        (_S.ACTIVE, _E.RECLAIM): _S.RECLAIMING,
        (_S.ACTIVE, _E.RETURN_SOME): _S.ACTIVE,
        (_S.ACTIVE, _E.RETURN_ALL): _S.RELEASED,
        (_S.ACTIVE, _E.RELEASE): _S.FENCED,
        (_S.ACTIVE, _E.EXPIRE): _S.FENCED,
        (_S.ACTIVE, _E.REVOKE): _S.FENCED,
        (_S.ACTIVE, _E.CONSUMER_LOST): _S.FENCED,
        (_S.ACTIVE, _E.PRODUCER_LOST): _S.LOST,
        (_S.RECLAIMING, _E.ATTACH): _S.RECLAIMING,
        (_S.RECLAIMING, _E.RENEW): _S.RECLAIMING,
        (_S.RECLAIMING, _E.RECLAIM): _S.RECLAIMING,
        (_S.RECLAIMING, _E.RECLAIM_DONE): _S.ACTIVE,
        (_S.RECLAIMING, _E.RETURN_SOME): _S.RECLAIMING,
        (_S.RECLAIMING, _E.RETURN_ALL): _S.RELEASED,
        (_S.RECLAIMING, _E.RELEASE): _S.FENCED,
        (_S.RECLAIMING, _E.EXPIRE): _S.FENCED,
        (_S.RECLAIMING, _E.REVOKE): _S.FENCED,
        (_S.RECLAIMING, _E.CONSUMER_LOST): _S.FENCED,
        (_S.RECLAIMING, _E.PRODUCER_LOST): _S.LOST,
        (_S.FENCED, _E.ATTACH): _S.FENCED,
        (_S.FENCED, _E.RECLAIM): _S.FENCED,
        (_S.FENCED, _E.RELEASE): _S.FENCED,
        (_S.FENCED, _E.REVOKE): _S.FENCED,
        (_S.FENCED, _E.CONSUMER_LOST): _S.FENCED,
        (_S.FENCED, _E.RETURN_SOME): _S.FENCED,
        (_S.FENCED, _E.RETURN_ALL): _S.RELEASED,
        (_S.FENCED, _E.PRODUCER_LOST): _S.LOST,
        (_S.RELEASED, _E.RELEASE): _S.RELEASED,
        (_S.RELEASED, _E.ADOPT): _S.FENCED,
        (_S.LOST, _E.RELEASE): _S.LOST,
        (_S.LOST, _E.ADOPT): _S.ACTIVE,
    },
    meanings={
        _S.GRANTED: "Bytes are booked and a capability token is out; no slab is handed out yet.",
        _S.ACTIVE: "The consumer holds slabs and may page into them.",
        _S.RECLAIMING: "The producer has asked for slabs back; the others stay usable.",
        _S.FENCED: "The right has ended, slabs may still be mapped; bytes stay booked.",
        _S.RELEASED: "Every slab is back with the producer; nothing is booked.",
        _S.LOST: "The producer has gone silent and was declared lost; nothing is booked.",
        _E.ATTACH: "The producer reports slabs handed out under the lease.",
        _E.RENEW: "The consumer reports the lease in use; its time to live starts anew.",
        _E.RECLAIM: "The producer has asked the consumer for slabs.",
        _E.RECLAIM_DONE: "Every slab asked for is back, others remain.",
        _E.RETURN_SOME: "The producer reports fewer slabs held.",
        _E.RETURN_ALL: "The producer reports that no slab is held any more.",
        _E.RELEASE: "The consumer gives up its right.",
        _E.EXPIRE: "The time to live, or the time allowed for attaching, ran out.",
        _E.REVOKE: "An operator ended the right.",
        _E.CONSUMER_LOST: "The producer saw the consumer's channel close or its process die.",
        _E.PRODUCER_LOST: "The producer missed its heartbeats for too long.",
        _E.ADOPT: "A producer reports slabs held under a lease that the books hold ended.",
    },
)

BOOKED_STATES: Final = frozenset(LeaseState) - LEASE.terminal
"""States whose bytes count as leased: free + leased == offered."""
