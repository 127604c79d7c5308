"""What the scheduler's half tells the workers each step, and what they tell back.

Plain lists of numbers: they cross a process boundary every step. A *place* is the scheduler's
number for one paged block; each worker keeps its own shard of that block under the same number, so
the table of what is where exists once, however many workers there are.

Within a step a worker drops, then pages out, then pages in. So a place that is freed, filled anew
and read back within one step holds what was meant.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

from aqua_protocol import MIB
from aqua_schedulers.cfs import PagingTier
from aqualib.engines.vllm.co_serving.safepoints import SafepointOrder

STAGING_BYTES: Final = 32 * MIB
"""Size of a staging buffer: at 300 GB/s so much takes 0.1 ms, many times what starting a transfer
costs. Doubled, a worker takes twice the memory beside the KV cache and pages no faster."""

_WORST_LAST: Final = [PagingTier.PEER, PagingTier.HOST, PagingTier.NOWHERE]


@dataclass(slots=True)
class PagingPlan:
    """One step's paging.

    Attributes:
        drops: Places whose contents are not needed any more.
        out_places: Places to fill, one for each of `out_blocks`.
        out_blocks: KV cache blocks to page out, before this step overwrites them.
        in_places: Places to read, one for each of `in_blocks`.
        in_blocks: KV cache blocks to fill, before this step's model reads them.
        written_blocks: Those of `in_blocks` that the step writes to, too: a request's last block,
            where it is not full.
        async_loads: By request: places and blocks to fill beside the model.
        async_saves: By number: places to fill and blocks to page out beside the model. The
            scheduler keeps the blocks as they are until every worker has acknowledged the number.
        urgent_saves: Numbers, of this plan or of earlier ones, that requests wait for: they go
            before others.
        safepoints: Where the step may be aborted, if it may.
    """

    drops: list[int] = field(default_factory=list)
    out_places: list[int] = field(default_factory=list)
    out_blocks: list[int] = field(default_factory=list)
    in_places: list[int] = field(default_factory=list)
    in_blocks: list[int] = field(default_factory=list)
    written_blocks: list[int] = field(default_factory=list)
    async_loads: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    async_saves: dict[int, tuple[list[int], list[int]]] = field(default_factory=dict)
    urgent_saves: list[int] = field(default_factory=list)
    safepoints: SafepointOrder | None = None

    @property
    def is_empty(self) -> bool:
        """Whether workers have nothing to do."""
        return not (
            self.drops
            or self.out_places
            or self.in_places
            or self.async_loads
            or self.async_saves
            or self.urgent_saves
            or self.safepoints
        )

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle what is not empty: most steps page nothing, and each plan is sent."""
        values = [getattr(self, name) for name in self.__match_args__]
        while values and not values[-1]:
            values.pop()
        return type(self), tuple(values)


@dataclass(frozen=True, slots=True)
class WorkerStore:
    """What a worker says of its store, once; or the stores of all of them.

    Attributes:
        capacity_blocks: Blocks that it holds; of several, the fewest.
        block_bytes: Size of a block there; of several, the largest: ranks of a pipeline may have
            more layers than others.
        worker_count: How many workers this is about.
    """

    capacity_blocks: int
    block_bytes: int
    worker_count: int = 1

    def __or__(self, other: WorkerStore | None) -> WorkerStore:
        """What holds for both: a block is there only if every worker has its shard."""
        if other is None:
            return self
        return WorkerStore(
            min(self.capacity_blocks, other.capacity_blocks),
            max(self.block_bytes, other.block_bytes),
            self.worker_count + other.worker_count,
        )


@dataclass(slots=True)
class WorkerReport:
    """What one worker, or all of them taken together, found out since the last report.

    Attributes:
        store: What the store is like; in each worker's first report.
        saved: By number, how many workers have acknowledged an asynchronous page-out: its blocks
            may change now, and are in the store unless they are among `lost_places`.
        lost_places: Places that turned out to hold nothing.
        location: The tier that paged blocks are in now; the worst of all workers. None: it and the
            rate are as they were.
        link_bytes_per_s: Rate of paging as measured, out and in; 0 while unknown.
        aborted: By number, how many workers have aborted a step.
        has_page: Whether all workers that were to open the engine's page have it; None if none was.
    """

    lost_places: set[int] = field(default_factory=set)
    location: PagingTier | None = None
    link_bytes_per_s: float = 0.0
    store: WorkerStore | None = None
    saved: Counter[int] = field(default_factory=Counter)
    aborted: Counter[int] = field(default_factory=Counter)
    has_page: bool | None = None

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Both, as one: a block is there only if every worker has its shard."""
        rates = [rate for rate in (self.link_bytes_per_s, other.link_bytes_per_s) if rate > 0]
        tiers = [tier for tier in (self.location, other.location) if tier is not None]
        pages = [page for page in (self.has_page, other.has_page) if page is not None]
        return WorkerReport(
            self.lost_places | other.lost_places,
            max(tiers, key=_WORST_LAST.index, default=None),
            min(rates, default=0.0),
            self.store if other.store is None else other.store | self.store,
            self.saved + other.saved,
            self.aborted + other.aborted,
            all(pages) if pages else None,
        )
