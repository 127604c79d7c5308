"""The lending service of an engine: its blocks, producer and informer, opened and closed as one.

Lives in the engine's process, beside its scheduler. The informer's thread looks at the load several
times a second, and at once when a step has left requests waiting; the producer's own threads talk
to consumers and to the coordinator. The engine's thread does none of this.

The load is the scheduler's own figures. vLLM has an entry point for plug-ins that are told the
load, `vllm.stat_logger_plugins`, and it is not used: loggers live in the front end's process, hear
of a step when its output has come there, and hear nothing while no step is made. Here a request
that has to wait is known before the step that leaves it waiting is computed, and an engine that is
idle and has most to lend is seen to be.

For watching there are a producer's metrics as the engine sees them, on a registry and, if asked
for, a port of their own: the scheduler's process is not the one that serves vLLM's `/metrics`, and
vLLM carries figures from here to there for connectors only. Beside a producer's they say

    aqua_lender_absent_blocks           KV blocks that the engine does without
    aqua_lender_reclaim_seconds_total   from the decision until the engine had its blocks again
    aqua_lender_step_duration_seconds   steps with loans and without, by their number of tokens
    aqua_lender_lending_on              whether lending is switched on
    aqua_lender_borrowing_on            whether it may borrow: while it lends nothing, if at all
    aqua_lender_coordinator_up          whether a coordinator answers

A coordinator that is down, a consumer that dies, memory that cannot be had: all of it is the
informer's and the producer's affair, and the engine goes on with the blocks that it has.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import start_http_server
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from aqua_protocol import ConfigError, format_bytes
from aqualib.engines.vllm.lending.block_limit import BlockLimit
from aqualib.engines.vllm.lending.kv_lending import KvLending
from aqualib.engines.vllm.lending.step_meter import LentState, StepMeter, step_kind
from aqualib.producer.informer import Informer
from aqualib.producer.metrics import ProducerMetrics
from aqualib.producer.reclaims import ReclaimTotals

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from contextlib import AbstractContextManager

    from aqualib.engines.vllm.lending.engine_ranks import EngineRanks
    from aqualib.engines.vllm.lending.kv_lending import EngineLoad
    from aqualib.engines.vllm.options import LendingOptions
    from aqualib.producer.lender import Borrower, MemoryLender
    from aqualib.producer.reclaims import ReclaimTicket

logger: Final = logging.getLogger("aqualib")


class LendingService:
    """An engine's lending, as one thing that opens and closes.

    Args:
        ranks: The engine's, to be opened.
        pool: vLLM's pool of the cache's blocks.
        keep_blocks: Blocks that the longest request needs, and the null block.
        lock: The scheduler's.
        still_read: Free blocks that the next step is going to read.
        metrics_port: Where to serve the metrics, if anywhere.

    Attributes:
        take_pace: See `EngineRanks`.

    Raises:
        ConfigError: A setting is wrong, or the cache is too small to lend a slab.
        TransportError: A producer's socket cannot be listened on.
    """

    def __init__(
        self,
        options: LendingOptions,
        ranks: AbstractContextManager[EngineRanks],
        *,
        pool: Any,
        keep_blocks: int,
        lock: threading.RLock,
        read_load: Callable[[], EngineLoad],
        still_read: Callable[[], Collection[int]],
        metrics_port: int | None = None,
    ) -> None:
        with ExitStack() as opened:
            engine = opened.enter_context(ranks)
            block_bytes = min(memory.block_bytes for memory in engine.memories)
            cache_bytes = len(pool.blocks) * block_bytes
            reserve_bytes = options.reserve_of(cache_bytes)
            self.memory_producer: Final = engine.lender
            self.take_pace: Final = engine.take_pace
            slab_bytes = self.memory_producer.slab_bytes
            self.lending: Final = KvLending(
                engine.memories,
                BlockLimit(pool, -(-reserve_bytes // block_bytes), still_read),
                slab_bytes=slab_bytes,
                keep_blocks=keep_blocks,
                lock=lock,
                read_load=read_load,
            )
            most_bytes = self.lending.most_bytes
            if not most_bytes:
                raise ConfigError(
                    f"a KV cache of {format_bytes(cache_bytes)} that keeps {keep_blocks} blocks "
                    f"of {format_bytes(block_bytes)} has no slab ({format_bytes(slab_bytes)}) "
                    "to lend",
                    remedy="Make the KV cache larger, AQUA_SLAB_BYTES smaller (that of the "
                    "consumers too), or --max-model-len shorter.",
                )
            rule = partial(
                options.informed,
                cache_bytes=cache_bytes,
                most_bytes=most_bytes,
                slab_bytes=slab_bytes,
            )
            self.metrics: Final = LenderMetrics(self.lending, self.memory_producer, engine.borrower)
            self.lending.on_grown = self.metrics.blocks_came_back
            if metrics_port is not None:
                server, _ = start_http_server(metrics_port, registry=self.metrics.registry)
                opened.callback(server.server_close)
                opened.callback(server.shutdown)
            self.informer: Final = Informer(
                self.memory_producer, self.lending, rule, borrower=engine.borrower
            )
            self.informer.on_reclaim = self.metrics.reclaim_began
            opened.enter_context(self.informer)
            self._opened = opened.pop_all()
        logger.info(
            "lends up to %s of its KV cache of %s%s while the load is low",
            format_bytes(min(most_bytes, (self.informer.profile.spare_bytes or 0) - reserve_bytes)),
            format_bytes(cache_bytes),
            f" on each of {len(engine.memories)} ranks" if len(engine.memories) > 1 else "",
        )

    def requests_wait(self) -> None:
        """A step has left requests waiting: look at the load now; never waits itself."""
        if self.lending.surrendered_bytes:
            self.informer.wake()

    def step_ended(self, token_count: int, now_s: float) -> None:
        """The output of the oldest step under way was taken in; on the engine's thread."""
        seconds = self.metrics.steps.ended(token_count, now_s)
        if seconds is not None and (tell := self.lending.on_step) is not None:
            tell(seconds, step_kind(token_count))

    def turn(self, on: bool) -> None:  # noqa: FBT001 - a switch, called by position
        """Lend from now on, or take everything back and lend no more."""
        self.informer.is_lending = self.metrics.is_lending = on
        self.informer.wake()

    def close(self) -> None:
        """Take everything back, as far as consumers let go in time, and leave."""
        self._opened.close()


class LenderMetrics(ProducerMetrics):
    """A producer's and the engine's figures, on a registry of their own.

    A reclaim has ended here when the engine has its blocks: later than for the producer.

    Attributes:
        is_lending: Whether lending is switched on.
    """

    def __init__(
        self, lending: KvLending, producer: MemoryLender, borrower: Borrower | None = None
    ) -> None:
        self._lending = lending
        self._borrower = borrower
        self.is_lending = True
        self._lock = threading.Lock()
        self._open: list[tuple[ReclaimTicket, float]] = []
        self._ended = ReclaimTotals()
        self.steps: Final = StepMeter()
        super().__init__(producer)

    @property
    def ended_reclaims(self) -> ReclaimTotals:
        """The informer's reclaims that brought their blocks back."""
        return self._ended

    @property
    def loans(self) -> LentState:
        """What is lent at this moment; a reclaim lasts until the engine has its blocks."""
        if self._open:
            return LentState.RECLAIMING
        return LentState.HELD if self._producer.leased_bytes else LentState.NONE

    def reclaim_began(self, reclaim: ReclaimTicket) -> None:
        """Memory was asked back."""
        with self._lock:
            self._open.append((reclaim, time.monotonic()))

    def blocks_came_back(self) -> None:
        """The engine has blocks again: count the reclaims that are complete with them."""
        now_s = time.monotonic()
        with self._lock:
            for reclaim, began_s in self._open:
                if reclaim.done:
                    self._ended = self._ended.plus(reclaim, now_s - began_s)
            self._open = [pair for pair in self._open if not pair[0].done]

    def collect(self) -> Iterator[Metric]:
        """Everything, as of now."""
        yield from super().collect()
        yield GaugeMetricFamily(
            "aqua_lender_absent_blocks",
            "KV blocks that the engine does without.",
            value=self._lending.out_blocks,
        )
        yield from self.steps.collect()
        yield GaugeMetricFamily(
            "aqua_lender_coordinator_up",
            "Whether a coordinator answers the reports of this engine.",
            value=self._producer.coordinator_error is None,
        )
        yield GaugeMetricFamily(
            "aqua_lender_lending_on", "Whether KV memory is lent.", value=self.is_lending
        )
        yield GaugeMetricFamily(
            "aqua_lender_borrowing_on",
            "Whether this engine may borrow, which it does while it lends nothing, if at all.",
            value=self._borrower is not None and self._borrower.may_borrow,
        )
