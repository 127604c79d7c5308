"""A rank's end of its engine's lending: in the worker's process, it does as the scheduler says.

It owns the rank's memory and its producer, a member of the books of its own, and decides nothing.
One thread carries out one order after the other, beside the worker's steps. Memory is given up when
the worker itself has ended the steps that may have used it, wherever the other ranks are.

The engine that goes away, by its end or its death, ends the loans as well: the rank closes its
producer, and consumers keep what they hold until they let go.
"""

from __future__ import annotations

import logging
import socket
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final

from aqua_protocol import AquaError, ProtocolError, TransportError
from aqua_protocol.supervision import SupervisedThread, resting
from aqualib.channel import Channel, ChannelClosedError, listen
from aqualib.connection import open_producer
from aqualib.engines.vllm.lending.rank_messages import (
    ORDERS,
    OrderKind,
    RankAnswer,
    RankFigures,
    RankLayout,
    RankOrder,
    packed,
    unpacked,
)
from aqualib.peers import require_trusted, trusted_uids
from aqualib.settings import load_settings
from aqualib.topology import place

if TYPE_CHECKING:
    from pathlib import Path

    from aqualib.engines.vllm.lending.memory import LendableCache
    from aqualib.engines.vllm.lending.step_count import StepCount
    from aqualib.producer.copy_limit import CopyRate
    from aqualib.producer.lender import Borrower
    from aqualib.producer.producer import Producer
    from aqualib.producer.reclaims import ReclaimTicket

logger: Final = logging.getLogger("aqualib")

STEP_PATIENCE_S: Final = 2.0
"""Seconds that a release waits for this rank's steps, by judgement: ten long ones. Doubled, a rank
that lags is reported as such two seconds later, and the engine's lending waits for it meanwhile."""

CLOSE_S: Final = 2.0
"""Seconds that consumers get when the engine ends: vLLM kills a worker that takes longer than four.
Doubled, none is left to take leave of the books."""


class RankService:
    """Serves one rank's part of lending; listens from the start, closes with the worker.

    Args:
        cache: The rank's part of the KV cache.
        rank: Of the worker in its engine, from 0 on.
        endpoint: Where the scheduler finds it.
        steps: The worker's.
        borrower: What the worker borrows with, if it does.

    Attributes:
        producer: The rank's, once the scheduler has asked for it.

    Raises:
        ConfigError: Others could replace the endpoint.
        TransportError: It cannot be listened on.
    """

    def __init__(
        self,
        cache: LendableCache,
        rank: int,
        endpoint: Path,
        steps: StepCount,
        borrower: Borrower | None = None,
    ) -> None:
        self._cache = cache
        self._rank = rank
        self._steps = steps
        self._borrower = borrower
        self._endpoint = endpoint
        self._listener = listen(endpoint, backlog=1)
        self._channel: Channel[RankOrder] | None = None
        self.producer: Producer | None = None
        self._opened = ExitStack()
        self._reclaims: dict[int, ReclaimTicket] = {}
        self._is_closing = False
        # What is said later is true later.
        self._saying = threading.Lock()
        self._thread = SupervisedThread(self._run, "aqua-lending-rank", str(rank))
        self._thread.start()

    def __repr__(self) -> str:
        return f"RankService({self._rank}, {self.producer or 'not asked yet'})"

    def close(self) -> None:
        """End the loans and leave the books; harmless when repeated."""
        self._is_closing = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._returned()  # Says that we leave, too.
        with self._saying:
            if self._channel is not None:
                self._channel.shutdown()
        self._thread.join(2 * CLOSE_S)
        self._end()

    def tell_pace(self, rate: CopyRate) -> None:
        """Tell this rank's consumers how fast they may copy; on the worker's thread."""
        if (producer := self.producer) is not None:
            producer.pacer.tell(rate)

    def _run(self) -> None:
        """Serve the one scheduler that there is, until it goes away."""
        channel = self._channel or self._accept()
        if channel is None:
            return
        try:
            while True:
                with resting():
                    order, _ = channel.receive()
                fault = self._carried_out(order)
                with self._saying:
                    channel.send(self._state(order, fault))
        except (ChannelClosedError, ProtocolError) as error:
            if not self._is_closing:
                logger.info("rank %d lends no more: %s", self._rank, error.message)
        self._end()

    def _accept(self) -> Channel[RankOrder] | None:
        """Wait for the scheduler; None when the worker ends first."""
        while not self._is_closing:
            try:
                with resting():
                    connected, _ = self._listener.accept()
            except OSError:  # Closed.
                return None
            channel = Channel(connected, ORDERS)
            try:
                require_trusted(channel.credentials.uid, trusted_uids(), "an engine's scheduler")
            except AquaError as error:
                logger.warning("refused: %s", error)
                channel.close()
                continue
            self._channel = channel
            self._stop_listening()
            return channel
        return None

    def _carried_out(self, order: RankOrder) -> str:
        """Carry an order out; says why it could not be, or nothing."""
        try:
            self._carry_out(order)
        except (AquaError, ValueError) as error:
            return str(error)
        except Exception as error:
            logger.exception("rank %d cannot %s", self._rank, order.kind)
            return f"{type(error).__name__}: {error}"
        return ""

    def _carry_out(self, order: RankOrder) -> None:
        memory = self._cache.memory
        match order.kind:
            case OrderKind.OPEN:
                self._open(order)
            case OrderKind.RELEASE:
                if not self._steps.wait_until_ended(order.after_step, STEP_PATIENCE_S):
                    raise TransportError(f"step {order.after_step} has not ended: {self._steps}")
                memory.release(unpacked(order.granules, self._cache.granules.count))
            case OrderKind.RESTORE:
                memory.restore(unpacked(order.granules, self._cache.granules.count))
            case OrderKind.OFFER:
                self._offer(order.nbytes)
            case OrderKind.RECLAIM:
                ticket = self._open_producer.reclaim(order.nbytes)
                with self._saying:
                    self._reclaims[order.number] = ticket
            case OrderKind.BORROW if self._borrower is not None:
                self._borrower.may_borrow = order.may_borrow
            case OrderKind.LOOK:
                self._open_producer.load = order.load
            case OrderKind.CLOSE:
                self._end_loans()

    def _offer(self, surrendered_bytes: int) -> None:
        producer = self._open_producer
        room = surrendered_bytes - producer.committed_bytes
        if room >= producer.slab_bytes:
            producer.offer(producer.offered_bytes + room)

    def _open(self, order: RankOrder) -> None:
        self.producer = self._opened.enter_context(
            open_producer(
                order.producer_id,
                device=str(self._cache.device),
                memory=self._cache.memory.account,
                model=order.model,
                profile_names=(),  # The scheduler's half goes by the profile.
                gpu_uuid=self._gpu_uuid(),
            )
        )
        self.producer.on_returned = self._returned

    def _gpu_uuid(self) -> str | None:
        """The name of this rank's GPU, where settings name one for all ranks."""
        if self._cache.device.type == "cuda":
            return place(self._cache.device).gpu_uuid
        named = load_settings().gpu_uuid
        return f"{named}.{self._rank}" if named and self._rank else named

    def _returned(self) -> None:
        """Say that memory is back; on the producer's thread."""
        with self._saying, suppress(TransportError):
            if self._channel is not None:
                self._channel.try_send(self._state())

    def _state(self, order: RankOrder | None = None, fault: str = "") -> RankAnswer:
        """How the rank stands, after an order or of its own accord; one at a time."""
        producer = self.producer
        self._reclaims = {n: each for n, each in self._reclaims.items() if not each.done}
        figures = RankFigures()
        if producer is not None:
            figures = RankFigures(
                committed_bytes=producer.committed_bytes,
                lasting_bytes=producer.lasting_bytes,
                returning_bytes=producer.open_reclaim_bytes,
                leased_bytes=producer.leased_bytes,
                quarantined_bytes=producer.quarantined_bytes,
                open_reclaims=[*self._reclaims],
                is_borrowing=self._borrower is not None and self._borrower.is_borrowing,
                is_coordinated=producer.coordinator_error is None,
            )
        layout = None
        if producer is not None and order is not None and order.kind is OrderKind.OPEN:
            layout = self._layout(producer)
        return RankAnswer(
            number=0 if order is None else order.number,
            error=fault,
            absent=packed(self._cache.memory.absent),
            figures=figures,
            layout=layout,
            is_leaving=self._is_closing,
        )

    def _layout(self, producer: Producer) -> RankLayout:
        granules = self._cache.granules
        return RankLayout(
            regions=[(each.start, each.size) for each in granules.regions],
            rows=[(each.start, each.size) for each in granules.rows],
            block_count=granules.block_count,
            granule_bytes=granules.granule_bytes,
            slab_bytes=producer.slab_bytes,
            device=str(self._cache.device),
            node=producer.identity.node,
            gpu_uuid=producer.identity.gpu_uuid,
        )

    @property
    def _open_producer(self) -> Producer:
        if self.producer is None:
            raise TransportError("this rank's producer is not open")
        return self.producer

    def _stop_listening(self) -> None:
        """There is one scheduler; what else asks finds nothing."""
        self._listener.close()
        self._endpoint.unlink(missing_ok=True)

    def _end_loans(self) -> None:
        """Take back what consumers return in time, and leave the books."""
        producer, self.producer = self.producer, None
        if producer is not None:
            producer.on_returned = None
            producer.close(CLOSE_S)
        self._opened.close()

    def _end(self) -> None:
        """End the loans, and hang up."""
        self._end_loans()
        self._stop_listening()
        with self._saying:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
