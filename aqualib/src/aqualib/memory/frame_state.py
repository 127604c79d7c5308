"""The states of a frame: where its bytes live, and when they may not be touched.

A frame is a slab-sized piece of a consumer's store. Its bytes live in exactly one place, a slab of
a peer or the frame's own slab of host memory, and the table below is the whole protocol of moving
them. In the open states the place is settled and the frame may be pinned; in the moving states the
gate is closed: pins taken before are waited for, new ones wait until the frame has arrived.

A move ends in one of three ways. It arrives, and only then do the bytes live in the new place. It
is abandoned, and they never left the old one: pins were not given back in time, or a view of the
old place is still alive, so that it cannot be unmapped. Or the old place cannot be read any more
(a transport error after the death of its owner), and the frame is lost: it says so to everyone who
asks, until the last of them has let go.

Source: Aqua section 6, "Reclaiming Aqua Tensors", moves tensors at iteration boundaries; the gate
is ours, so that frames can move while the engine runs.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from aqua_protocol.machine import StateMachine


class FrameState(StrEnum):
    """Where a frame's bytes live."""

    HOST = "host"
    PROMOTING = "promoting"
    PEER = "peer"
    DRAINING = "draining"
    LOST = "lost"


class FrameEvent(StrEnum):
    """What can happen to a frame."""

    PROMOTE = "promote"
    DRAIN = "drain"
    ARRIVE_ON_PEER = "arrive_on_peer"
    ARRIVE_ON_HOST = "arrive_on_host"
    ABANDON = "abandon"
    LOSE = "lose"
    EMPTY = "empty"


_S, _E = FrameState, FrameEvent

FRAME: Final[StateMachine[FrameState, FrameEvent]] = StateMachine(
    noun="frame",
    initial=_S.HOST,
    terminal=frozenset(),
    transitions={
        (_S.HOST, _E.PROMOTE): _S.PROMOTING,
        (_S.PROMOTING, _E.ARRIVE_ON_PEER): _S.PEER,
        (_S.PROMOTING, _E.ABANDON): _S.HOST,
        (_S.PEER, _E.DRAIN): _S.DRAINING,
        (_S.DRAINING, _E.ARRIVE_ON_HOST): _S.HOST,
        (_S.DRAINING, _E.ARRIVE_ON_PEER): _S.PEER,
        (_S.DRAINING, _E.ABANDON): _S.PEER,
        (_S.DRAINING, _E.LOSE): _S.LOST,
        (_S.LOST, _E.EMPTY): _S.HOST,
    },
    meanings={
        _S.HOST: "The bytes are in the frame's own host slab.",
        _S.PROMOTING: "On the way from host memory to a peer; the gate is closed.",
        _S.PEER: "The bytes are in a slab of a peer.",
        _S.DRAINING: "On the way out of a peer's slab; the gate is closed.",
        _S.LOST: "The peer's slab could not be read; every access raises until all is released.",
        _E.PROMOTE: "A leased slab is free for the frame.",
        _E.DRAIN: "The slab under the frame is asked back, or its owner is gone.",
        _E.ARRIVE_ON_PEER: "The bytes are in the new slab, the old one is unmapped.",
        _E.ARRIVE_ON_HOST: "The bytes are in host memory, the peer's slab is unmapped.",
        _E.ABANDON: "Pins or views outlasted the patience of the move; nothing has changed.",
        _E.LOSE: "A transport error while reading the only copy.",
        _E.EMPTY: "Everything in the lost frame has been released.",
    },
)

OPEN_STATES: Final = frozenset({_S.HOST, _S.PEER})
"""States in which a frame may be pinned."""

MOVING_STATES: Final = frozenset({_S.PROMOTING, _S.DRAINING})
"""States in which the gate is closed."""
