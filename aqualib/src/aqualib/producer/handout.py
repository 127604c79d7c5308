"""Handing slabs out: the slow part of an attach, on a thread of its own.

Making a slab anew that another tenant had takes milliseconds, and so does a peer that reads slowly;
neither may delay the answers of other consumers. Meanwhile what the new consumer sends is not
read: an answer for a slab could otherwise arrive before the slab has been sent, free it for
somebody else, and the handle would still go out. For the same reason whatever the kernel says
about the peer (end of file, death) waits until the handout is over.
"""

from __future__ import annotations

import base64
import logging
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from aqua_protocol import AquaError, CapacityError, TransportError
from aqua_protocol.channel import MAX_SLABS_PER_PACKET, ConsumerMessage, SlabHandle, Slabs, Welcome
from aqua_protocol.supervision import SupervisedThread, note_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aqualib.channel import Channel
    from aqualib.producer.pool import LentSlab
    from aqualib.producer.server import Peer
    from aqualib.producer.slab_memory import SlabMemory
    from aqualib.transports.base import Handle

logger: Final = logging.getLogger("aqualib")


@dataclass(slots=True, eq=False)
class Handout:
    """The slabs of one lease on their way to its consumer.

    Attributes:
        memory: Makes slabs anew.
        welcome: What is sent first, with the count of the loans that follow, in order.
        loans: Those that could not be made anew are last, once `run` has tried.
        sent_count: Loans whose handle may have reached the peer.
        is_begun: It cannot begin again, since what the peer has read is not known.
        is_complete: Everything has been sent.
    """

    memory: SlabMemory
    welcome: Welcome
    loans: Sequence[LentSlab]
    sent_count: int = 0
    is_begun: bool = False
    is_complete: bool = False

    def unsent(self) -> Sequence[LentSlab]:
        """Loans whose handle has never left this process."""
        return self.loans[self.sent_count :]

    def run(self, channel: Channel[ConsumerMessage]) -> None:
        """Send the welcome and every slab; fewer than were lent if memory is short.

        Harmless when repeated after it was complete.

        Raises:
            ChannelClosedError: The peer is gone, or does not read.
            CapacityError: Not even one slab could be made anew.
            TransportError: A slab could not be exported, or the handout has begun before.
        """
        if self.is_complete:
            return
        if self.is_begun:
            # An engine's CUDA context that went bad, for one: torch reports it by whatever type it
            # likes. The peer waits for an answer, and the fault is not its own.
            raise TransportError(
                "the producer could not hand out its slabs",
                remedy="Read the producer's log; its engine may need a restart.",
            )
        self.is_begun = True
        loans = self._make_foreign_anew()
        channel.send(self.welcome.model_copy(update={"slab_count": len(loans)}))
        for start in range(0, len(loans), MAX_SLABS_PER_PACKET):
            batch = loans[start : start + MAX_SLABS_PER_PACKET]
            last = start + len(batch) == len(loans)
            with ExitStack() as exports:
                handles = [exports.enter_context(loan.slab.memory.export()) for loan in batch]
                self.sent_count = start + len(batch)
                slabs = [_announced(*pair) for pair in zip(batch, handles, strict=True)]
                fds = [handle.fd for handle in handles if handle.fd is not None]
                channel.send(Slabs(slabs=slabs, last=last), fds)
            note_progress()  # The peer may take its time for each.
        self.is_complete = True

    def _make_foreign_anew(self) -> Sequence[LentSlab]:
        """Returns the loans that have memory now."""
        for loan in self.loans:
            if loan.is_foreign:
                try:
                    loan.slab.memory = self.memory.make_anew(loan.slab.memory)
                except TransportError as error:
                    # A holder that keeps its mapping keeps the memory behind it from everybody.
                    logger.warning("slab %d cannot be made anew: %s", loan.slab.slab_id, error)
        self.loans = sorted(self.loans, key=lambda loan: loan.slab.memory.is_closed)
        ready = [loan for loan in self.loans if not loan.slab.memory.is_closed]
        if not ready:
            raise CapacityError(
                "the device has no memory for slabs that another tenant had", retry_after_s=1.0
            )
        return ready


class Handouts:
    """The handouts under way, each on a thread of its own.

    As many as there are peers, so their number is bounded where peers are.

    Args:
        lock: The producer's.
        ended: Called under the lock when a handout is over or has failed, with the reason.
    """

    def __init__(
        self, lock: threading.Lock, ended: Callable[[Peer, Handout, AquaError | None], None]
    ) -> None:
        self._lock = lock
        self._ended = ended
        self._threads: dict[Peer, SupervisedThread] = {}

    def start(self, peer: Peer, handout: Handout) -> None:
        """Begin; under the lock."""
        hand_out = partial(self._run, peer, handout)
        thread = SupervisedThread(hand_out, "aqua-handout", handout.welcome.lease_id)
        self._threads[peer] = thread
        try:
            thread.start()
        except RuntimeError as error:  # The process may not have another thread.
            failure = CapacityError(f"the producer cannot hand out: {error}", retry_after_s=1.0)
            self._end(peer, handout, failure)

    def stop(self) -> None:
        """End what is under way: a channel must not be closed under a thread that sends on it."""
        with self._lock:
            threads = list(self._threads.values())
            for peer in self._threads:
                peer.drop()
        for thread in threads:
            thread.join()

    def _run(self, peer: Peer, handout: Handout) -> None:
        failure: AquaError | None = None
        try:
            handout.run(peer.channel)
        except AquaError as error:
            failure = error
        with self._lock:
            if peer in self._threads:
                self._end(peer, handout, failure)

    def _end(self, peer: Peer, handout: Handout, failure: AquaError | None) -> None:
        with ExitStack() as steps:  # Last one first, each whatever becomes of the others.
            steps.callback(self._ended, peer, handout, failure)
            steps.callback(peer.handed_out)
            del self._threads[peer]


def _announced(loan: LentSlab, handle: Handle) -> SlabHandle:
    return SlabHandle(
        slab_id=loan.slab.slab_id,
        generation=loan.generation,
        payload=base64.b64encode(handle.payload).decode(),
        fd_count=0 if handle.fd is None else 1,
    )
