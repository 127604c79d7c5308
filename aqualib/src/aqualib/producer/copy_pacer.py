"""The copy pacer: hears of an engine's steps, and tells consumers how fast they may copy.

Between the pure `copy_limit` and the lease channel. Consumers are told on the engine's thread, at
the end of a step: a packet to each, without waiting. While nothing is lent a step costs one look.

Where several producers lend for one engine, its steps are measured once for all of them
(`rank_producers`), and each is told the rate (`tell`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from aqua_protocol.channel import Pace
from aqualib.producer.copy_limit import CopyLimit

if TYPE_CHECKING:
    import threading
    from collections.abc import Mapping

    from aqua_protocol.ids import LeaseId
    from aqualib.producer.copy_limit import CopyRate
    from aqualib.producer.server import Peer


class CopyPacer:
    """The pacer of one producer.

    Args:
        lock: The producer's.
        peers: Its consumers, guarded by the lock.
        harm_share: Of the engine's time, how much background copies may cost; above 0.
    """

    def __init__(
        self, lock: threading.Lock, peers: Mapping[LeaseId, Peer], harm_share: float
    ) -> None:
        self._lock = lock
        self._peers = peers
        self._limit = CopyLimit(harm_share)

    def step_ended(self, seconds: float, kind: str = "") -> None:
        """Tell how long a step of the engine took, so that copies by consumers do not slow it.

        For the engine's thread, at each step.

        Args:
            seconds: Of this step.
            kind: Steps of one kind take about as long without copies: a class of token counts.
        """
        if not self._peers:
            return
        with self._lock:
            rate = self._limit.stepped(seconds, time.monotonic(), kind)
        if rate is not None:
            self.tell(rate)

    def tell(self, rate: CopyRate) -> None:
        """Tell consumers, who share the rate; for the engine's thread, as `step_ended`."""
        with self._lock:
            share = rate.bytes_per_s / max(1, len(self._peers))
            for peer in self._peers.values():
                peer.pace(Pace(bytes_per_s=share, lasts_s=rate.lasts_s))
