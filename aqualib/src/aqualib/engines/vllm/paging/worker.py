"""A worker's half of paging, without vLLM: it carries out each step's `PagingPlan`.

Blocks go between the engine's KV cache and a `BlockStore`. A block of the cache lies in as many
pieces as the model has layers; they are gathered into one row of a staging buffer and the store
gets rows, so that what crosses the link is long and contiguous.

Within a step, blocks come back layer by layer where the model asks for its layers one by one: it
waits for those that it is about to run and no others (`await_layer`). A load of more than a staging
buffer is cut into columns of all its blocks, as many as it would take parts of whole blocks, so
that nothing is submitted for it that was not before. Blocks that the step itself writes to come
first and whole: vLLM writes a layer's new tokens before it asks for the layer.

It never fails an engine. A page-out that cannot be done leaves its place empty, a page-in of an
empty or unreadable place names its blocks as not loaded, and the engine computes them again. Each
kind of failure is logged once and counted for ever.

Source: Aqua section 7, "Efficient context switching".
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from aqua_protocol import MIB, AquaError, TransportError
from aqua_protocol.supervision import SerialExecutor
from aqua_schedulers.cfs import PagingTier
from aqualib.engines.vllm.paging.plan import (
    STAGING_BYTES,
    PagingPlan,
    WorkerReport,
    WorkerStore,
)
from aqualib.engines.vllm.paging.rows import BlockCopier
from aqualib.engines.vllm.paging.side_stream import SideStream
from aqualib.tensor import Location

if TYPE_CHECKING:
    from jaxtyping import UInt8

    from aqualib.blocks import BlockStore
    from aqualib.consumer import Aqua
    from aqualib.ranges import Range

logger: Final = logging.getLogger("aqualib")

RATE_MEMORY: Final = 0.8
"""Weight of the past in the measured rate, by judgement: five transfers decide. Nearer to 1, a link
that others use now is believed to be fast for longer. Doubled, it would diverge."""

RATE_LIFETIME_S: Final = 30.0
"""A rate that nothing has measured for so long is unknown again, by judgement: while a link is
thought too slow nothing is paged, so nothing would ever tell otherwise. Doubled, an engine whose
link was slow for a moment computes its victims again for a minute."""

MIN_RATE_BYTES: Final = MIB
"""Transfers below this measure their fixed cost and not the link. Doubled, engines with few small
contexts learn their rate later."""


class KvPagingWorker:
    """Moves blocks for one worker.

    Args:
        rows: The KV cache, from `by_layers`.
        aqua: Whose memory; closed by `close`.
        capacity_blocks: Places that plans may name.
        layer_ends: From `by_layers`; None if the model asks for no layer.

    Attributes:
        store: Where paged blocks are; None where it could not be opened.
        failures: Count of what went wrong, by error code.
        paged_bytes: Count of bytes moved, by direction.
        paging_s: Time spent moving them, likewise.
        step_wait_s: Of that, what steps waited for.
    """

    def __init__(
        self,
        rows: Sequence[UInt8[torch.Tensor, "blocks row_bytes"]],
        aqua: Aqua,
        capacity_blocks: int,
        layer_ends: Mapping[str, int] | None = None,
    ) -> None:
        self.aqua: Final = aqua
        self._blocks = BlockCopier(rows)
        self.block_bytes: Final = self._blocks.block_bytes
        self.failures: Final[Counter[str]] = Counter()
        self.paged_bytes: Final[Counter[str]] = Counter()
        self.paging_s: Final[defaultdict[str, float]] = defaultdict(float)
        self.step_wait_s = 0.0
        # Of each place; -1 where nothing is stored.
        self._slots = np.full(capacity_blocks, -1, dtype=np.int64)
        self._staged_blocks = max(1, min(capacity_blocks, STAGING_BYTES // self.block_bytes))
        self._staging = self._new_staging()
        self._lost: set[int] = set()
        self._failed_blocks: set[int] = set()
        self._rate = 0.0
        self._rated_s = 0.0
        self._drained_bytes = 0
        self._reclaim_s = 0.0
        self._reclaims: set[str] = set()
        # Looked up when frames have moved: a large store has thousands.
        self._location: PagingTier | None = None
        self._reported = (PagingTier.NOWHERE, 0.0)
        self._is_told = False
        self._lock = threading.Lock()
        # Goes up with whatever is counted or to be reported; `_lock` guards it. Most steps find it
        # as the step before left it.
        self._version = 0
        self._counted_version = self._reported_version = -1
        self._was_unreached = False
        self._loader = SerialExecutor("aqua-kv-load")
        self._loader_staging: torch.Tensor | None = None
        self._load_stream = SideStream(self._blocks.device, is_urgent=True)
        self._loads: dict[str, Future[None]] = {}
        self._layer_ends = layer_ends or {}
        # Of the step's load: what is there of each block once a column has ended.
        self._columns: list[tuple[int, Future[None]]] = []
        self._saver = SerialExecutor("aqua-kv-save")
        self._saver_staging: torch.Tensor | None = None
        self._save_stream = SideStream(self._blocks.device, is_urgent=False)
        # What is to be saved, and in which order; `_lock` guards them.
        self._unsaved: dict[int, tuple[Any, list[int], list[int]]] = {}
        self._save_order: tuple[deque[int], deque[int]] = (deque(), deque())
        self._acknowledged: Counter[int] = Counter()
        self._save_jobs: deque[Future[None]] = deque()
        self.store: BlockStore | None = None
        try:
            self.store = aqua.block_store(self.block_bytes, capacity_blocks)
        except AquaError as error:
            self._fail(error, "no store for KV blocks")

    def close(self) -> None:
        """Finish what is under way, drop every block and leave. Harmless when repeated."""
        self._loader.shutdown()
        self._saver.shutdown()
        if self.store is not None:
            self.store.close()
            self.store = None
        self.aqua.close()

    # --- Each step ------------------------------------------------------------------------

    def page_out(self, plan: PagingPlan) -> None:
        """Drop what is not needed and page out; done when it returns, but for what may wait.

        That is read once the steps under way have written it.
        """
        self._empty(plan.drops)
        if plan.out_places:
            started_s = time.perf_counter()
            for part in self._parts(len(plan.out_places)):
                self._out(plan.out_places[part], plan.out_blocks[part], self._staging)
            self._note("out", len(plan.out_places) * self.block_bytes, started_s)
            self.step_wait_s += time.perf_counter() - started_s
        if not plan.async_saves and not plan.urgent_saves:
            return
        mark = self._save_stream.mark()
        with self._lock:
            urgent, others = self._save_order
            urgent.extend(plan.urgent_saves)
            for number, (places, blocks) in plan.async_saves.items():
                self._unsaved[number] = (mark, places, blocks)
                others.append(number)
        for _ in plan.async_saves:
            self._save_jobs.append(self._saver.submit(self._save_next))

    def page_in(self, plan: PagingPlan, *, is_layer_wise: bool = False) -> None:
        """Page in; done when it returns, but for what goes beside the model.

        Args:
            is_layer_wise: The model calls `await_layer` before it reads blocks of a layer.
        """
        if not (plan.in_places or plan.async_loads):
            return
        whole = list(zip(plan.in_places, plan.in_blocks, strict=True))
        parted: list[tuple[int, int]] = []
        columns: list[Range] = []
        if whole and is_layer_wise:
            written = set(plan.written_blocks)
            unwritten = [pair for pair in whole if pair[1] not in written]
            if len(cut := self._cut(len(unwritten))) > 1:
                columns, parted = cut, unwritten
                whole = [pair for pair in whole if pair[1] in written]
        if whole:
            started_s = time.perf_counter()
            self._in(whole, self._staging, self._blocks.whole)
            self.step_wait_s += time.perf_counter() - started_s
        if not (columns or plan.async_loads):
            return
        mark = self._load_stream.mark()
        for column in columns:
            # The staging buffer is the steps', and this step's until it has ended.
            load = self._loader.submit(self._load, mark, parted, self._staging, column)
            self._columns.append((column.end, load))
        for request_id, (places, blocks) in plan.async_loads.items():
            pairs = list(zip(places, blocks, strict=True))
            self._loads[request_id] = self._loader.submit(self._load, mark, pairs)

    @property
    def is_loading_layers(self) -> bool:
        """Whether the step has to wait for its layers one by one."""
        return bool(self._columns)

    def await_layer(self, name: str) -> None:
        """A layer is about to be launched: wait until its blocks are there."""
        if self._columns:
            started_s = time.perf_counter()
            # One that has no cache of its own reads another's.
            end = self._layer_ends.get(name, self.block_bytes)
            next(load for there, load in self._columns if there >= end).result()
            self.step_wait_s += time.perf_counter() - started_s

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is under way, and nothing has happened that is not told yet."""
        return not (
            self._loads
            or self._columns
            or self._save_jobs
            or self._failed_blocks
            or self._version != self._reported_version
            or self._version != self._counted_version
            or self.aqua.has_changed
            or self._is_rate_old
            or (self.aqua.coordinator_error is not None) != self._was_unreached
        )

    def take_arrived(self) -> set[str]:
        """Requests whose asynchronous loads have ended, well or not, since the last call."""
        if not self._loads:
            return set()
        arrived = {name for name, load in self._loads.items() if load.done()}
        for name in arrived:
            self._loads.pop(name).result()
        return arrived

    def take_failed_blocks(self) -> set[int]:
        """Blocks of the KV cache that were not loaded, since the last call; a step has ended."""
        if not (self._columns or self._failed_blocks):
            return set()
        while self._columns:
            self._columns.pop()[1].result()
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """What changed since the last report; None if nothing did."""
        if self.aqua.step() is not None:
            self._note_leases()
        while self._save_jobs and self._save_jobs[0].done():
            self._save_jobs.popleft().result()
        if self._version == self._reported_version and not self._is_rate_old:
            return None
        self._reported_version = self._version
        # What is acknowledged has been counted and, where it failed, is among the lost.
        location = self._location = self._location or self.location()
        with self._lock:
            if time.monotonic() - self._rated_s > RATE_LIFETIME_S:
                self._rate = 0.0
            rate = self._rate
            lost, self._lost = self._lost, set()
            saved, self._acknowledged = self._acknowledged, Counter()
        told, before = self._reported
        # A rate is worth a report if it is the first, or twice or half of the last one.
        differs = max(rate, before) >= 2 * min(rate, before) and rate != before
        if not lost and not saved and location is told and not differs and self._is_told:
            return None
        self._reported = (location, rate)
        store = None if self._is_told else self._describe()
        self._is_told = True
        return WorkerReport(lost, location, rate, store, saved)

    @property
    def _is_rate_old(self) -> bool:
        return self._rate > 0 and time.monotonic() - self._rated_s > RATE_LIFETIME_S

    def _describe(self) -> WorkerStore:
        return WorkerStore(0 if self.store is None else len(self._slots), self.block_bytes)

    def take_totals(self) -> dict[str, float] | None:
        """What is counted here, by the names of `operations.metrics`; None if it is as before."""
        is_unreached = self.aqua.coordinator_error is not None
        if self._version == self._counted_version and is_unreached == self._was_unreached:
            return None
        with self._lock:
            self._counted_version, self._was_unreached = self._version, is_unreached
            return {
                "kv_paged_out_bytes": self.paged_bytes["out"],
                "kv_paged_in_bytes": self.paged_bytes["in"],
                "kv_paging_seconds": sum(self.paging_s.values()),
                "kv_step_wait_seconds": self.step_wait_s,
                "kv_failures": self.failures.total(),
                "kv_drained_bytes": self._drained_bytes,
                "kv_reclaim_seconds": self._reclaim_s,
                "workers_without_coordinator": float(is_unreached),
            }

    def location(self) -> PagingTier:
        """The tier that paged blocks are in now; partly on a peer counts as on a peer."""
        if self.store is None:
            return PagingTier.NOWHERE
        is_peer = self.store.location() in {Location.PEER, Location.MIXED}
        return PagingTier.PEER if is_peer else PagingTier.HOST

    # --- Copies ---------------------------------------------------------------------------

    def _new_staging(self) -> UInt8[torch.Tensor, "staged_blocks block_bytes"]:
        shape = (self._staged_blocks, self.block_bytes)
        return torch.empty(shape, dtype=torch.uint8, device=self._blocks.device)

    def _parts(self, count: int) -> Iterable[slice]:
        for start in range(0, count, self._staged_blocks):
            yield slice(start, min(start + self._staged_blocks, count))

    def _out(self, places: list[int], blocks: list[int], staging: torch.Tensor) -> None:
        """Gather a staging buffer's worth of blocks and store it."""
        self._empty(places)
        if self.store is None:
            self._lose(places)
            return
        rows = staging[: len(places)]
        self._blocks.gather(blocks, rows)
        try:
            slots, transfer = self.store.page_out(rows)
            try:
                transfer.wait()
            except AquaError:
                self.store.free(slots)
                raise
        except AquaError as error:
            self._fail(error, f"{len(places)} KV blocks were not paged out")
            self._lose(places)
            return
        self._slots[places] = slots.numpy()

    def _cut(self, count: int) -> list[Range]:
        """Columns in which so many blocks come back; one where they come whole."""
        if not count or self.store is None or self.store.is_checking:
            return [self._blocks.whole]
        return self._blocks.columns(count, self._staging.nbytes)

    def _in(self, pairs: list[tuple[int, int]], staging: torch.Tensor, columns: Range) -> None:
        """Page in any number of blocks; what cannot be is noted as failed."""
        started_s = time.perf_counter()
        count = staging.nbytes // columns.size
        for start in range(0, len(pairs), count):
            left = pairs[start : start + count]
            while left:
                left = self._in_some(left, staging, columns)
        self._note("in", len(pairs) * columns.size, started_s)

    def _in_some(
        self, pairs: list[tuple[int, int]], staging: torch.Tensor, columns: Range
    ) -> list[tuple[int, int]]:
        """Page in what is there; returns what to try again without those found to be lost."""
        self._give_up([pair for pair in pairs if self._slots[pair[0]] < 0])
        pairs = [pair for pair in pairs if self._slots[pair[0]] >= 0]
        if not pairs or self.store is None:
            return []
        slots = self._slots[[place for place, _ in pairs]]
        rows = staging.view(-1)[: len(pairs) * columns.size].view(-1, columns.size)
        part = None if columns == self._blocks.whole else columns
        try:
            self.store.page_in(torch.from_numpy(slots), rows, columns=part).wait()
        except AquaError as error:
            self._fail(error, f"{len(pairs)} KV blocks were not paged in and are computed again")
            named = set(error.details.get("slots", ()))
            bad = [pair for pair, slot in zip(pairs, slots.tolist(), strict=True) if slot in named]
            # An error that names nothing may concern all.
            self._give_up(bad or pairs)
            return [pair for pair in pairs if pair not in bad] if bad else []
        self._blocks.scatter(rows, [block for _, block in pairs], columns)
        return []

    def _load(
        self,
        mark: Any,
        pairs: list[tuple[int, int]],
        staging: torch.Tensor | None = None,
        columns: Range | None = None,
    ) -> None:
        """Page in beside the model: places under load are the scheduler's to keep in place."""
        try:
            with self._load_stream.after(mark):
                if staging is None:
                    staging = self._loader_staging
                if staging is None:
                    staging = self._loader_staging = self._new_staging()
                self._in(pairs, staging, columns or self._blocks.whole)
        except (RuntimeError, MemoryError) as error:  # An engine that is short of memory, often.
            self._give_up(pairs)
            failure = TransportError(f"the device or its memory failed: {type(error).__name__}")
            self._fail(failure, f"{len(pairs)} KV blocks were not paged in and are computed again")

    def _save_next(self) -> None:
        """Page out what is most urgent, in the order of the plans, and acknowledge it."""
        with self._lock:
            urgent, others = self._save_order
            # What has become urgent stands in both.
            job = None
            while job is None:
                number = (urgent or others).popleft()
                job = self._unsaved.pop(number, None)
        self._save(*job)
        with self._lock:
            self._acknowledged[number] += 1
            self._version += 1

    def _save(self, mark: Any, places: list[int], blocks: list[int]) -> None:
        """Page out beside the model: blocks and places are the scheduler's to keep in place."""
        try:
            started_s = time.perf_counter()
            with self._save_stream.after(mark):
                if self._saver_staging is None:
                    self._saver_staging = self._new_staging()
                for part in self._parts(len(places)):
                    self._out(places[part], blocks[part], self._saver_staging)
            self._note("out", len(places) * self.block_bytes, started_s)
        except (RuntimeError, MemoryError) as error:  # As for loads.
            self._empty(places)
            self._lose(places)
            failure = TransportError(f"the device or its memory failed: {type(error).__name__}")
            self._fail(failure, f"{len(places)} KV blocks were not paged out")

    def _give_up(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Blocks that cannot be loaded, from places that are empty from now on."""
        places = [place for place, _ in pairs]
        self._empty(places)
        self._lose(places)
        with self._lock:
            self._failed_blocks.update(block for _, block in pairs)

    def _lose(self, places: Iterable[int]) -> None:
        with self._lock:
            self._lost.update(places)
            self._version += 1

    def _empty(self, places: Sequence[int]) -> None:
        if not len(places) or self.store is None:
            return
        slots = self._slots[list(places)]
        self._slots[list(places)] = -1
        self.store.free(torch.from_numpy(slots[slots >= 0]))

    # --- Figures --------------------------------------------------------------------------

    def _note(self, direction: str, nbytes: int, started_s: float) -> None:
        if not nbytes:
            return
        took_s = max(time.perf_counter() - started_s, 1e-9)
        with self._lock:
            self.paged_bytes[direction] += nbytes
            self.paging_s[direction] += took_s
            self._version += 1
            if nbytes >= MIN_RATE_BYTES:
                past = self._rate or nbytes / took_s
                self._rate = RATE_MEMORY * past + (1 - RATE_MEMORY) * nbytes / took_s
                self._rated_s = time.monotonic()

    def _note_leases(self) -> None:
        """Peers lent or took back: read what that cost."""
        stats = self.aqua.stats()
        self._drained_bytes = stats.drained_bytes
        ended = {
            record.reclaim_id: record.total_ms / 1000
            for record in stats.reclaims
            if record.total_ms is not None
        }
        self._reclaim_s += sum(took for name, took in ended.items() if name not in self._reclaims)
        self._reclaims = set(ended)
        self._location = None
        with self._lock:
            self._version += 1

    def _fail(self, error: AquaError, what: str) -> None:
        with self._lock:
            self.failures[error.code] += 1
            self._version += 1
        if self.failures[error.code] == 1:
            logger.warning("%s: %s (further cases are only counted)", what, error)
