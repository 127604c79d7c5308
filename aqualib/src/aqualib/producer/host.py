"""What a lease server asks of the producer whose channels it serves.

The server knows connections and stages, the producer slabs and leases; this is all that one tells
the other, so neither imports more of the other than these names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aqua_protocol.channel import Hello, Released
    from aqualib.producer.server import Peer


@dataclass(frozen=True, slots=True)
class Host:
    """What the server tells the producer. Called on the server's thread, under the lock.

    Attributes:
        attach: Admit the peer and start its handout; an `AquaError` refuses it.
        released: The peer has unmapped a slab.
        silent: The peer's channel is closed; its process may live.
        dead: The peer's process is gone.
        tick: Time passed (monotonic, seconds); returns when to call again, infinity for never.
    """

    attach: Callable[[Peer, Hello], None]
    released: Callable[[Peer, Released], None]
    silent: Callable[[Peer], None]
    dead: Callable[[Peer], None]
    tick: Callable[[float], float]
