"""A rank in another process, as the scheduler's half knows it.

Orders go out one at a time, and the informer's thread waits for the answer, for a while. A rank
that has not answered by then is *behind*: it is told nothing more, and what it was told to give up
counts as gone, until it answers after all; every answer says how it stands. A rank whose channel
has ended is *lost* and stays so: what it lacked then, the engine does without until it restarts.

Neither holds the engine up: its thread waits for no rank here.
"""

from __future__ import annotations

import itertools
import logging
import threading
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aqua_protocol import ProtocolError, TransportError
from aqua_protocol.supervision import SupervisedThread, resting
from aqualib.channel import Channel, ChannelClosedError, connect
from aqualib.engines.vllm.lending.rank_messages import (
    ANSWERS,
    OrderKind,
    RankAnswer,
    RankFigures,
    RankLayout,
    RankOrder,
    packed,
    unpacked,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from aqualib.engines.vllm.lending.granules import GranuleMask
    from aqualib.engines.vllm.lending.rank_memory import Acknowledgement

logger: Final = logging.getLogger("aqualib")

ANSWER_WITHIN_S: Final = 5.0
"""Seconds that a rank gets for an answer, by judgement: to map and clear 10 GiB takes one. Doubled,
the informer stands still for ten seconds when a rank hangs, before the others go on."""

OPEN_WITHIN_S: Final = 60.0
"""Seconds that a rank gets to open its producer, at the engine's start: the first use of a driver's
interface takes a few. Doubled, a start that fails does so a minute later."""


class RemoteRank:
    """One rank's memory and producer; satisfies `RankMemory`. Orders are the informer's thread's.

    Args:
        rank: From 0 on.
        endpoint: Where it listens.
        producer_id: Its name in the books.
        model: What runs there, for people.

    Attributes:
        figures: How its producer stands, as last heard.
        absent: See `RankMemory.absent`.
        answer_within_s: How long an answer is waited for.
        on_returned: Called when lent memory is back, on a thread of ours.

    Raises:
        ChannelClosedError: No rank listens there.
        TransportError: It could not open its producer.
    """

    def __init__(
        self,
        rank: int,
        endpoint: Path,
        *,
        producer_id: str,
        model: str | None,
    ) -> None:
        self.rank: Final = rank
        self.producer_id: Final = producer_id
        self.answer_within_s = ANSWER_WITHIN_S
        self.on_returned: Callable[[], None] | None = None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._under_way: tuple[int, Future[RankAnswer]] | None = None
        self._lost: TransportError | None = None
        self._is_closing = False
        self.figures = RankFigures()
        self._channel: Channel[RankAnswer] = Channel(connect(endpoint), ANSWERS)
        self._thread = SupervisedThread(self._listen, "aqua-lending-ranks", str(rank))
        self._thread.start()
        try:
            opened = self._tell(OrderKind.OPEN, producer_id=producer_id, model=model)
            layout = self._answer_to(opened, OPEN_WITHIN_S).layout
        except BaseException:
            self.close()
            raise
        assert layout is not None, "the answer to an order to open"
        self.layout: Final[RankLayout] = layout
        self.granules: Final = layout.granule_map()
        self.block_bytes: Final = sum(size for _, size in layout.rows) // layout.block_count
        self.absent: GranuleMask = np.zeros(self.granules.count, np.bool_)

    def __repr__(self) -> str:
        state = "lost" if self._lost else "behind" if self._under_way else "in step"
        return f"RemoteRank({self.rank}, {state})"

    # --- Memory ---------------------------------------------------------------------------

    def release(self, granules: GranuleMask, after_step: int) -> Acknowledgement:
        """See `RankMemory.release`."""
        details = {"granules": packed(granules), "after_step": after_step}
        return partial(self._answer_to, self._tell(OrderKind.RELEASE, granules, **details))

    def restore(self, granules: GranuleMask) -> Acknowledgement:
        """See `RankMemory.restore`."""
        if not granules.any():
            return self._require_in_step
        return partial(self._answer_to, self._tell(OrderKind.RESTORE, granules=packed(granules)))

    # --- The producer ---------------------------------------------------------------------

    def tell(self, kind: OrderKind, **details: Any) -> Callable[[], RankAnswer]:
        """Give an order; what is returned waits for the answer, as an `Acknowledgement` does."""
        return partial(self._answer_to, self._tell(kind, **details))

    @property
    def is_lost(self) -> bool:
        """Whether the rank will never answer again."""
        return self._lost is not None

    def close(self) -> None:
        """Hang up, at which the rank ends its loans; harmless when repeated."""
        self._is_closing = True
        self._channel.shutdown()
        self._thread.join()
        self._channel.close()

    # --- Inside ---------------------------------------------------------------------------

    def _tell(
        self, kind: OrderKind, leaving: GranuleMask | None = None, **details: Any
    ) -> Future[RankAnswer]:
        """Send an order, unless the last one is unanswered.

        What is `leaving` is gone from now on, until the rank has said what became of it.
        """
        answer: Future[RankAnswer] = Future()
        with self._lock:
            if (fault := self._fault()) is not None:
                answer.set_exception(fault)
                return answer
            order = RankOrder(number=next(self._numbers), kind=kind, **details)
            self._under_way = order.number, answer
            if leaving is not None:
                self.absent = self.absent | leaving
        try:
            self._channel.send(order)
        except ChannelClosedError as error:
            self._lose(error)
        return answer

    def _answer_to(self, told: Future[RankAnswer], within_s: float | None = None) -> RankAnswer:
        """Wait for an answer.

        Raises:
            TransportError: The rank could not, has not answered yet, or is lost.
        """
        try:
            answer = told.result(self.answer_within_s if within_s is None else within_s)
        except TimeoutError:
            raise self._is_behind() from None
        if answer.error:
            raise TransportError(f"rank {self.rank} of this engine refuses: {answer.error}")
        return answer

    def _require_in_step(self) -> None:
        """Raise `TransportError` unless the rank has answered everything."""
        if (fault := self._fault()) is not None:
            raise fault

    def _fault(self) -> TransportError | None:
        """Why the rank can be told nothing now, if so."""
        return self._lost or (None if self._under_way is None else self._is_behind())

    def _is_behind(self) -> TransportError:
        return TransportError(
            f"rank {self.rank} of this engine has not acknowledged yet",
            remedy="Nothing is lent or used again before it does; look at that worker's log.",
        )

    def _listen(self) -> None:
        while True:
            try:
                with resting():
                    answer, _ = self._channel.receive()
            except (ChannelClosedError, ProtocolError) as error:
                self._lose(error)
                return
            self._take(answer)

    def _take(self, answer: RankAnswer) -> None:
        """Go by what the rank says, late or in time."""
        self.figures = answer.figures
        self._is_closing |= answer.is_leaving
        if not answer.number:
            if self.on_returned is not None:
                self.on_returned()
            return
        with self._lock:
            if self._under_way is None or self._under_way[0] != answer.number:
                return
            _, told = self._under_way
            if answer.layout is None:  # The first answer comes before anything can be gone.
                self.absent = unpacked(answer.absent, self.granules.count)
            self._under_way = None
        told.set_result(answer)

    def _lose(self, cause: Exception) -> None:
        """The rank is gone, for good."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = TransportError(
                f"rank {self.rank} of this engine lends no more: {cause}",
                remedy="Restart the engine; until then it serves with the blocks that it has.",
            )
            under_way, self._under_way = self._under_way, None
        if not self._is_closing:
            logger.error("%s", self._lost)
        if under_way is not None:
            under_way[1].set_exception(self._lost)
