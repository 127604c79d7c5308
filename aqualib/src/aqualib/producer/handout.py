"""Handing slabs out: the slow part of an attach, on a thread of its own.

Zeroing a slab that another consumer had takes milliseconds, and so does a peer that reads slowly;
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
from typing import TYPE_CHECKING, Final

import torch

from aqua_protocol import MIB, AquaError, CapacityError, TransportError
from aqua_protocol.channel import MAX_SLABS_PER_PACKET, ConsumerMessage, SlabHandle, Slabs, Welcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aqualib.channel import Channel
    from aqualib.producer.pool import LentSlab
    from aqualib.producer.server import Peer
    from aqualib.transports.base import Copier, Handle, Transport

logger: Final = logging.getLogger("aqualib")

ZEROS_BYTES: Final = MIB
"""Bytes of zeros to copy from: small enough to stay in a cache, large enough to copy at full speed.
Doubled, a small cache may drop them."""


@dataclass(slots=True, eq=False)
class Handout:
    """The slabs of one lease on their way to its consumer.

    Attributes:
        welcome: What is sent first; the loans follow in order.
        sent_count: Loans whose handle may have reached the peer.
    """

    transport: Transport
    welcome: Welcome
    loans: Sequence[LentSlab]
    sent_count: int = 0

    def unsent(self) -> Sequence[LentSlab]:
        """Loans whose handle has never left this process."""
        return self.loans[self.sent_count :]

    def run(self, channel: Channel[ConsumerMessage]) -> None:
        """Send the welcome and every slab.

        Raises:
            ChannelClosedError: The peer is gone, or does not read.
            TransportError: A slab could not be zeroed or exported.
        """
        channel.send(self.welcome)
        scrubber: Scrubber | None = None
        for start in range(0, len(self.loans), MAX_SLABS_PER_PACKET):
            batch = self.loans[start : start + MAX_SLABS_PER_PACKET]
            for loan in batch:
                if loan.scrub:
                    scrubber = scrubber or Scrubber(self.transport)
                    scrubber.scrub(loan.slab.memory.tensor)
            last = start + len(batch) == len(self.loans)
            with ExitStack() as exports:
                handles = [exports.enter_context(loan.slab.memory.export()) for loan in batch]
                self.sent_count = start + len(batch)
                slabs = [_announced(*pair) for pair in zip(batch, handles, strict=True)]
                fds = [handle.fd for handle in handles if handle.fd is not None]
                channel.send(Slabs(slabs=slabs, last=last), fds)


class Handouts:
    """The handouts under way, each on a thread of its own.

    As many as there are peers, so their number is bounded where peers are.

    Args:
        lock: The producer's.
        broke_off: Called under the lock when a handout failed, with the reason.
    """

    def __init__(
        self, lock: threading.Lock, broke_off: Callable[[Peer, Handout, AquaError], None]
    ) -> None:
        self._lock = lock
        self._broke_off = broke_off
        self._threads: dict[Peer, threading.Thread] = {}

    def start(self, peer: Peer, handout: Handout) -> None:
        """Begin; under the lock."""
        name = f"aqua-handout-{handout.welcome.lease_id}"
        thread = threading.Thread(target=self._run, args=(peer, handout), name=name, daemon=True)
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
        except Exception as error:
            # An engine's CUDA context that went bad, for one: torch reports it by whatever type it
            # likes. This is the thread's last frame and the peer waits for an answer, so it gets
            # one; the traceback is for the log, since the fault is not the peer's.
            logger.exception("handing out lease %s hit a fault", handout.welcome.lease_id)
            failure = TransportError(
                f"the producer could not hand out its slabs: {type(error).__name__}",
                remedy="Read the producer's log; its engine may need a restart.",
            )
        with self._lock:
            self._end(peer, handout, failure)

    def _end(self, peer: Peer, handout: Handout, failure: AquaError | None) -> None:
        del self._threads[peer]
        peer.handed_out()
        if failure is not None:
            self._broke_off(peer, handout, failure)


class Scrubber:
    """Zeroes slabs, with a copier of the calling thread."""

    def __init__(self, transport: Transport) -> None:
        self._copier: Copier = transport.copier()
        self._zeros = torch.zeros(ZEROS_BYTES, dtype=torch.uint8, device=transport.device)

    def scrub(self, tensor: torch.Tensor) -> None:
        """Overwrite `tensor`, uint8 of shape (nbytes,), with zeros; done on return."""
        for start in range(0, len(tensor), ZEROS_BYTES):
            piece = tensor[start : start + ZEROS_BYTES]
            self._copier.copy(piece, self._zeros[: len(piece)])
        self._copier.fence()


def _announced(loan: LentSlab, handle: Handle) -> SlabHandle:
    return SlabHandle(
        slab_id=loan.slab.slab_id,
        generation=loan.generation,
        payload=base64.b64encode(handle.payload).decode(),
        fd_count=0 if handle.fd is None else 1,
    )
