"""The courier: a worker's half of paging, without vLLM.

Carries blocks between the engine's KV cache and a `BlockStore`. A block of the cache lies in as
many pieces as the model has layers; the courier gathers them into one row of a staging buffer and
hands the store rows, so that what crosses the link is long and contiguous.

It never fails an engine. A page-out that cannot be done leaves its place empty, a page-in of an
empty or unreadable place names its blocks as not loaded, and the engine computes them again. Each
kind of failure is logged once and counted for ever.

Source: Aqua section 7, "Efficient context switching".
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from aqua_protocol import MIB, AquaError
from aqua_schedulers.cfs import PagingTier
from aqualib.engines.vllm.paging_plan import PagingPlan, WorkerReport
from aqualib.tensor import Location as StoreLocation

if TYPE_CHECKING:
    from aqualib.blocks import BlockStore
    from aqualib.consumer import Aqua

logger: Final = logging.getLogger("aqualib")

STAGING_BYTES: Final = 32 * MIB
"""Blocks are staged in stretches of about this size: enough to amortise what a transfer costs."""

RATE_MEMORY: Final = 0.8
"""Weight of the past in the measured rate."""

MIN_RATE_BYTES: Final = MIB
"""Transfers below this measure their fixed cost and not the link."""


class KvPagingWorker:
    """Moves blocks for one worker.

    Args:
        rows: The KV cache, from `block_rows`.
        aqua: Whose memory; closed by `close`.
        capacity_blocks: Places that orders may name.

    Attributes:
        failures: Count of what went wrong, by error code.
    """

    def __init__(self, rows: Sequence[torch.Tensor], aqua: Aqua, capacity_blocks: int) -> None:
        self.aqua = aqua
        self._word = _word_of(rows)
        self._rows = [row.view(self._word) for row in rows]
        self._bounds = np.cumsum([0, *(row.shape[1] for row in self._rows)]).tolist()
        self.block_bytes: Final[int] = sum(row.shape[1] for row in rows)
        self.failures: Final[Counter[str]] = Counter()
        self.paged_blocks: Final[Counter[str]] = Counter()
        self.paging_s: Final[defaultdict[str, float]] = defaultdict(float)
        self._store_slots = np.full(capacity_blocks, -1, dtype=np.int64)
        self._capacity_blocks = capacity_blocks
        self._staged_blocks = max(1, min(capacity_blocks, STAGING_BYTES // self.block_bytes))
        self._staging = self._new_staging()
        self.store: BlockStore | None = None
        self._lost: set[int] = set()
        self._failed_blocks: set[int] = set()
        self._rate = 0.0
        self._drained_bytes = 0
        self._reclaim_s = 0.0
        self._reclaims: set[str] = set()
        self._reported = (PagingTier.NOWHERE, 0.0)
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[tuple[str, list[int], list[int]] | None] = SimpleQueue()
        self._arrived: set[str] = set()
        self._thread: threading.Thread | None = None
        self._open_store()

    def _new_staging(self) -> torch.Tensor:
        return torch.empty(
            (self._staged_blocks, self.block_bytes), dtype=torch.uint8, device=self._rows[0].device
        )

    def _open_store(self) -> None:
        try:
            self.store = self.aqua.block_store(self.block_bytes, self._capacity_blocks)
        except AquaError as error:
            self._fail(error, "no store for KV blocks")

    def close(self) -> None:
        """Drop every block and leave. Harmless when repeated."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        if self.store is not None:
            self.store.close()
            self.store = None
        self.aqua.close()

    # --- Each step ------------------------------------------------------------------------

    def page_out(self, plan: PagingPlan) -> None:
        """Drop what is not needed and page out; done when it returns."""
        self._empty(plan.drops)
        started_s = time.perf_counter()
        for part in self._parts(len(plan.out_places)):
            self._out(plan.out_places[part], plan.out_blocks[part])
        self._note("out", len(plan.out_places), started_s)

    def page_in(self, plan: PagingPlan) -> None:
        """Page in; done when it returns, but for what goes beside the model."""
        if plan.in_places:
            self._in(plan.in_places, plan.in_blocks, self._staging)
        for request_id, (places, blocks) in plan.async_loads.items():
            self._in_background(request_id, places, blocks)

    def take_arrived(self) -> set[str]:
        """Requests whose asynchronous loads have ended since the last call."""
        with self._lock:
            arrived, self._arrived = self._arrived, set()
        return arrived

    def take_failed_blocks(self) -> set[int]:
        """Blocks of the KV cache that were not loaded, since the last call."""
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> WorkerReport | None:
        """What changed since the last report; None if nothing did."""
        if self.aqua.step() is not None:
            self._follow()
        location, rate = self.location(), self._rate
        with self._lock:
            lost, self._lost = self._lost, set()
        if not lost and location is self._reported[0] and not _differs(rate, self._reported[1]):
            return None
        self._reported = (location, rate)
        return WorkerReport(lost, location, rate)

    def _follow(self) -> None:
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

    def totals(self) -> dict[str, float]:
        """What is counted here, by the names of `engine_metrics`."""
        with self._lock:
            return {
                "kv_paged_out_bytes": self.paged_blocks["out"] * self.block_bytes,
                "kv_paged_in_bytes": self.paged_blocks["in"] * self.block_bytes,
                "kv_paging_seconds": sum(self.paging_s.values()),
                "kv_failures": self.failures.total(),
                "kv_drained_bytes": self._drained_bytes,
                "kv_reclaim_seconds": self._reclaim_s,
            }

    def location(self) -> PagingTier:
        """Where paged blocks are now; partly on a peer counts as on a peer."""
        if self.store is None:
            return PagingTier.NOWHERE
        where = self.store.location()
        is_peer = where in {StoreLocation.PEER, StoreLocation.MIXED}
        return PagingTier.PEER if is_peer else PagingTier.HOST

    # --- Inside: copies -------------------------------------------------------------------

    def _parts(self, count: int) -> Iterable[slice]:
        for start in range(0, count, self._staged_blocks):
            yield slice(start, min(start + self._staged_blocks, count))

    def _out(self, places: list[int], blocks: list[int]) -> None:
        """Gather a staging buffer's worth of blocks and store it."""
        self._empty(places)
        if self.store is None:
            self._lose(places)
            return
        rows = self._staging[: len(places)]
        index = torch.tensor(blocks, device=rows.device)
        words = rows.view(self._word)
        for layer, (start, end) in zip(self._rows, self._pieces(), strict=True):
            words[:, start:end] = layer.index_select(0, index)
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
        self._store_slots[places] = slots.numpy()

    def _in(self, places: list[int], blocks: list[int], staging: torch.Tensor) -> None:
        """Page in any number of blocks; what cannot be is noted as failed."""
        started_s = time.perf_counter()
        for part in self._parts(len(places)):
            pairs = list(zip(places[part], blocks[part], strict=True))
            while pairs:
                pairs = self._in_some(pairs, staging)
        self._note("in", len(places), started_s)

    def _in_some(
        self, pairs: list[tuple[int, int]], staging: torch.Tensor
    ) -> list[tuple[int, int]]:
        """Page in what is there; returns what to try again without those found to be lost."""
        empty = [pair for pair in pairs if self._store_slots[pair[0]] < 0]
        self._give_up(empty)
        pairs = [pair for pair in pairs if self._store_slots[pair[0]] >= 0]
        if not pairs or self.store is None:
            return []
        slots = self._store_slots[[place for place, _ in pairs]]
        rows = staging[: len(pairs)]
        try:
            self.store.page_in(torch.from_numpy(slots), rows).wait()
        except AquaError as error:
            self._fail(error, f"{len(pairs)} KV blocks were not paged in and are computed again")
            named = set(error.details.get("slots", ()))
            bad = [pair for pair, slot in zip(pairs, slots.tolist(), strict=True) if slot in named]
            # An error that names nothing may concern all.
            self._give_up(bad or pairs)
            return [pair for pair in pairs if pair not in bad] if bad else []
        index = torch.tensor([block for _, block in pairs], device=rows.device)
        words = rows.view(self._word)
        for layer, (start, end) in zip(self._rows, self._pieces(), strict=True):
            layer.index_copy_(0, index, words[:, start:end])
        return []

    def _give_up(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Blocks that cannot be loaded, from places that are empty from now on."""
        given_up = list(pairs)
        places = [place for place, _ in given_up]
        self._empty(places)
        self._lose(places)
        with self._lock:
            self._failed_blocks.update(block for _, block in given_up)

    def _lose(self, places: Iterable[int]) -> None:
        with self._lock:
            self._lost.update(places)

    def _empty(self, places: Sequence[int]) -> None:
        if not len(places) or self.store is None:
            return
        slots = self._store_slots[list(places)]
        self._store_slots[list(places)] = -1
        self.store.free(torch.from_numpy(slots[slots >= 0]))

    def _pieces(self) -> Iterable[tuple[int, int]]:
        return zip(self._bounds[:-1], self._bounds[1:], strict=True)

    # --- Inside: beside the model ---------------------------------------------------------

    def _in_background(self, request_id: str, places: list[int], blocks: list[int]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._carry, name="aqua-courier", daemon=True)
            self._thread.start()
        self._jobs.put((request_id, places, blocks))

    def _carry(self) -> None:
        """The background thread: places under load are the scheduler's to keep in place."""
        staging = self._new_staging()
        while (job := self._jobs.get()) is not None:
            request_id, places, blocks = job
            try:
                self._in(places, blocks, staging)
                if staging.is_cuda:
                    torch.cuda.current_stream(staging.device).synchronize()
            finally:
                with self._lock:
                    self._arrived.add(request_id)

    # --- Inside: books --------------------------------------------------------------------

    def _note(self, direction: str, count: int, started_s: float) -> None:
        if not count:
            return
        took_s = max(time.perf_counter() - started_s, 1e-9)
        nbytes = count * self.block_bytes
        with self._lock:
            self.paged_blocks[direction] += count
            self.paging_s[direction] += took_s
            if nbytes >= MIN_RATE_BYTES:
                past = self._rate or nbytes / took_s
                self._rate = RATE_MEMORY * past + (1 - RATE_MEMORY) * nbytes / took_s

    def _fail(self, error: AquaError, what: str) -> None:
        self.failures[error.code] += 1
        if self.failures[error.code] == 1:
            logger.warning("%s: %s (further cases are only counted)", what, error)


def _word_of(rows: Sequence[torch.Tensor]) -> torch.dtype:
    """What rows are gathered and scattered as: on a CPU torch moves them element by element."""
    size = torch.int64.itemsize
    fits = all(not (row.shape[1] % size or row.storage_offset() % size) for row in rows)
    return torch.int64 if fits else torch.uint8


def _differs(rate: float, before: float) -> bool:
    """Whether a rate is worth a report: twice or half of the last one, or the first."""
    return max(rate, before) >= 2 * min(rate, before) and rate != before
