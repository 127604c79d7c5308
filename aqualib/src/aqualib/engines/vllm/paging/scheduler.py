"""The scheduler's half of paging, without vLLM: it writes each step's `PagingPlan`.

It is told what happens to requests and block ids. Requests are vLLM's objects, of which it reads
`request_id`, `num_tokens`, `block_hashes` and `skip_reading_prefix_cache`; nothing is kept of them
but names.

Page-outs go beside the model (`async_page_out`) where the engine's scheduler gives a way to keep
blocks from being reused (`save_beside`), with one exception: a request that vLLM itself preempts,
because another finds no block in this very step, gives its blocks at once. Order within a step
makes that correct: they are paged out at the very start of that step's execution, before anything
is written. Places that a load of this step reads are held until the plan is taken, so that no
page-out of the same step can reuse them; asynchronous loads hold theirs until they are done.

A model may keep several groups of blocks (`kv_groups`). Block ids come as one table for each group;
what was freed behind a window is neither paged out nor loaded. A request comes back where every
group has what the next token reads: with full attention alone anywhere up to what is there, with a
window only where its blocks still were, with a state only after the very token that left it.

Not promised: that a block which is in the table can be read. Then the load fails, vLLM computes
the block again, and the worker's report removes it here. Without full attention alone there is no
going back to a good block, and the request begins again (`KvGroups.loses_all`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from aqua_schedulers.cfs import PagingTier
from aqualib.engines.vllm.options import AquaOptions, LoadMode, PagingMode
from aqualib.engines.vllm.paging.async_page_out import AsyncPageOut
from aqualib.engines.vllm.paging.block_table import BlockTable
from aqualib.engines.vllm.paging.counts import PagingCounts
from aqualib.engines.vllm.paging.kv_groups import NULL_BLOCK, BlockKeys, BlockRun, KvGroups
from aqualib.engines.vllm.paging.plan import STAGING_BYTES, PagingPlan, WorkerReport


@dataclass(slots=True)
class _Saved:
    """Held places of a preempted request's blocks, by group, and the tokens in them.

    Filled once these parts are acknowledged.
    """

    runs: list[BlockRun]
    tokens: int
    parts: Collection[int] = ()

    @property
    def places(self) -> Iterator[int]:
        return chain.from_iterable(run.places for run in self.runs)


class KvPagingScheduler:
    """Writes each step's plan.

    Nothing is paged before the workers have reported what their stores hold.

    Args:
        options: The adapter's; how loads are done is decided.
        groups: How each group of layers keeps its blocks. With a state among them no request uses
            another's blocks.
        hash_tokens: Tokens of one of `block_hashes`; divides those of each group's blocks.
        is_sharing: Whether requests may use each other's blocks.
        plan_type: What a step's plan is made as, for an engine that passes on only its own.
    """

    def __init__(
        self,
        options: AquaOptions,
        *,
        groups: KvGroups,
        hash_tokens: int,
        is_sharing: bool,
        plan_type: type[PagingPlan] = PagingPlan,
    ) -> None:
        self.is_paging: Final = options.is_paging
        self.table: Final = BlockTable()
        self.block_bytes = 0
        self.groups: Final = groups
        self.counts: Final = PagingCounts()
        self.location = PagingTier.HOST if self.is_paging else PagingTier.NOWHERE
        self.link_bytes_per_s = 0.0
        self.is_checkpointing: Final = options.mode is PagingMode.CHECKPOINT
        self.has_tier: Final = is_sharing and self.is_paging and not groups.has_state
        self._is_on = True
        self.keys: Final = BlockKeys(groups, hash_tokens if self.has_tier else None)
        self.is_load_async: Final = options.load is LoadMode.ASYNC
        self._max_loading_blocks = options.max_loading_blocks
        self._plan_type = plan_type
        self._plan = plan_type()
        self._saved: dict[str, _Saved] = {}
        # What was last answered about a request: places, and the tokens that it has then.
        self._matches: dict[str, tuple[list[BlockRun], int]] = {}
        self._loading: dict[str, list[int]] = {}
        self._abandoned: dict[str, list[int]] = {}
        # Their last load beside the model lost a block; none is tried again before admission.
        self.failed_loads: set[str] = set()
        self._checkpointed: dict[str, list[int]] = {}  # Blocks of each group that are done with.
        self._until_taken: list[int] = []
        self._worker_count = 0
        self._saves: AsyncPageOut | None = None

    @property
    def swapped_bytes(self) -> int:
        """KV in the store of requests that were preempted and are to go on."""
        blocks = sum(len(run.places) for saved in self._saved.values() for run in saved.runs)
        return blocks * self.block_bytes

    def save_beside(self, pool: Any, max_blocks: int) -> None:
        """Page out beside the model what can wait, up to so many blocks of `pool` at once."""
        self._saves = AsyncPageOut(self.table, pool, max_blocks)

    def turn(self, on: bool) -> None:  # noqa: FBT001 - a switch, called by position
        """Page out and look up from now on, or not; what was saved for requests comes back."""
        self._is_on = on
        if not on:
            self._checkpointed.clear()
            self.table.keep_held()

    # --- What happens to requests ---------------------------------------------------------

    def preempting(
        self,
        request: Any,
        block_ids: Sequence[Sequence[int]],
        computed_tokens: int,
        *,
        frees_later: bool = False,
    ) -> int:
        """Have the blocks of a request that is about to lose them paged out.

        `block_ids` are its table of each group. `computed_tokens` have their KV in the blocks once
        the steps under way are done, but those beyond the request's last token may be drafts that
        will be rejected. With `frees_later`, blocks that have to be read first are free only after
        that, and the step does not wait for it. Returns how many tokens will come back by a load.
        """
        assert request.request_id not in self._saved, request.request_id
        if not self._is_on or request.skip_reading_prefix_cache or not self.table.capacity_blocks:
            return 0
        if not self.groups.has_state:
            computed_tokens = min(computed_tokens, request.num_tokens)
        wanted = self.groups.wanted(block_ids, computed_tokens)
        keys = [
            self.keys.upto(request, index, blocks, computed_tokens)
            for index, blocks in enumerate(wanted)
        ]
        clean: list[int] = []
        if self.groups.loses_all:
            clean = self.table.present(chain.from_iterable(keys))
            self.table.hold(clean)
            if sum(map(len, keys)) - len(clean) > self.table.room:
                keys = [[] for _ in keys]  # A part is of no use.
        parts: set[int] = set()
        runs: list[BlockRun] = []
        for group, blocks, names, ids in zip(self.groups, wanted, keys, block_ids, strict=True):
            first = blocks.start
            full = 0 if group.is_state else computed_tokens // group.block_tokens - first
            swapped = ids[first : first + len(names)]
            if frees_later and self._saves is not None:
                places, awaited, count = self._saves.swap(names, swapped, full, self._plan)
                parts |= awaited
            else:
                places, count = self._swap_now(names, swapped, full)
            self.counts.saved_blocks += count
            self.counts.clean_blocks += len(places) - count
            self.counts.unsaved_blocks += len(blocks) - len(places)
            runs.append(BlockRun(first, places))
        self.table.release(clean)
        self._saved[request.request_id] = _Saved(runs, computed_tokens, parts)
        return self.groups.reach(runs, computed_tokens, computed_tokens)

    def _swap_now(
        self, keys: Sequence[Hashable], block_ids: Sequence[int], full: int
    ) -> tuple[list[int], int]:
        """As `AsyncPageOut.swap`, at the start of the next step, which may overwrite them."""
        places: list[int] = []
        count = 0
        # Its own clean copies must not be what the others are given room by.
        clean = self.table.present(keys)
        self.table.hold(clean)
        for at, (key, block_id) in enumerate(zip(keys, block_ids, strict=True)):
            put = self.table.put(key, is_lasting=at < full)
            if put is None:
                break
            place, is_new = put
            places.append(place)
            if is_new:
                self._page_out(place, block_id)
                count += 1
        self.table.release(clean)
        return places, count

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `local_tokens` a load would bring, and whether beside the model.

        None as the number: ask again, it is still being paged out, or other loads hold too many
        blocks. The last token is always computed, for vLLM has to sample after it.
        """
        saved = self._saved.get(request.request_id)
        if saved is not None and saved.parts:
            if self._saves is not None and not self._saves.is_done(saved.parts):
                return None, False
            saved.parts = ()
        runs, tokens = self._match(request, local_tokens)
        if not tokens or request.request_id in self.failed_loads:
            self._matches.pop(request.request_id, None)
            return 0, False
        if self.is_load_async and self._loading:
            under_way = sum(map(len, self._loading.values()))
            coming = sum([len(run.places) for run in runs])
            if under_way + coming > self._max_loading_blocks:
                return None, False
        self._matches[request.request_id] = runs, local_tokens + tokens
        return tokens, self.is_load_async

    def allocated(
        self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """A request was admitted with these tables, and loads what `matched` answered."""
        request_id = request.request_id
        saved = self._saved.pop(request_id, None)
        match = self._matches.pop(request_id, None)
        self.failed_loads.discard(request_id)
        if saved is None and self.has_tier and not request.num_computed_tokens:
            self.counts.queried_tokens += request.num_tokens
        places: list[int] = []
        if external_tokens:
            assert match is not None, f"a load for {request_id} that was not matched"
            places = self._load(request_id, match, block_ids)
            if saved is not None:
                self.counts.restored_tokens += external_tokens
            else:
                self.counts.prefix_hit_tokens += external_tokens
        # A load holds what it reads, which mostly is what was held for the request.
        held = [] if saved is None else list(saved.places)
        if places != held:
            self.table.hold(places)
            self.table.release(held)

    def finished(
        self, request: Any, block_ids: Sequence[Sequence[int]], computed_tokens: int
    ) -> None:
        """Keep the blocks of a request that has ended for others; none if it was preempted."""
        request_id = request.request_id
        self._matches.pop(request_id, None)
        self._checkpointed.pop(request_id, None)
        self.failed_loads.discard(request_id)
        if request_id in self._loading:
            self._abandoned[request_id] = self._loading.pop(request_id)
        saved = self._saved.pop(request_id, None)
        if saved is not None:
            self.table.release(saved.places)
        for index, (group, ids) in enumerate(zip(self.groups, block_ids, strict=False)):
            blocks = range(request.num_tokens // group.block_tokens)
            if self.has_tier and self._is_on:
                stop = min(computed_tokens // group.block_tokens, len(ids))
                _, begun = self._cache(request, index, ids, range(stop))
                self.counts.kept_blocks += begun
            elif not self.has_tier:
                self.table.forget(self.keys.full(request, index, blocks))

    def is_behind(self, request_id: str, computed_tokens: int) -> bool:
        """Whether a running request may have filled blocks since its last checkpoint."""
        done = self._checkpointed.get(request_id) or [0] * len(self.groups)
        return any(
            computed_tokens // group.block_tokens > count and not group.is_state
            for group, count in zip(self.groups, done, strict=True)
        )

    def checkpoint(
        self, request: Any, computed_tokens: int, block_ids: Sequence[Sequence[int]]
    ) -> None:
        """Page out which of its blocks a running request has filled since the last call.

        `computed_tokens` have their KV in them before this step.
        """
        if request.skip_reading_prefix_cache or not self._is_on:
            return
        known = min(computed_tokens, request.num_tokens - 1)
        done = self._checkpointed.setdefault(request.request_id, [0] * len(self.groups))
        for index, (group, ids) in enumerate(zip(self.groups, block_ids, strict=True)):
            if group.is_state:
                continue  # It changes with each token.
            blocks = range(done[index], min(known // group.block_tokens, len(ids)))
            done[index], begun = self._cache(request, index, ids, blocks)
            self.counts.checkpointed_blocks += begun

    def copy_out(self, request: Any, block_ids: Sequence[int], blocks: range) -> int:
        """Page out these full blocks of a running request, whose only group has this table.

        Returns how many, from the first, are there or on their way now.
        """
        if request.skip_reading_prefix_cache or not self._is_on:
            return 0
        end, begun = self._cache(request, 0, block_ids, blocks)
        self.counts.checkpointed_blocks += begun
        return end - blocks.start

    def take_plan(self) -> PagingPlan | None:
        """The step's plan, None if there is nothing to do; the next one's begins empty."""
        self._plan.drops = self.table.take_dropped()
        if self._plan.is_empty:
            return None
        plan, self._plan = self._plan, self._plan_type()
        if self._saves is not None:
            self._saves.plan_taken()
        self.table.release(self._until_taken)
        self._until_taken = []
        return plan

    def totals(self) -> dict[str, float]:
        """What is counted here, by the names of `operations.metrics`."""
        return self.counts.totals()

    # --- What the workers say -------------------------------------------------------------

    def loads_ended(self, request_ids: Iterable[str]) -> None:
        """Asynchronous loads are done, well or not."""
        for request_id in request_ids:
            for held in (self._loading, self._abandoned):
                self.table.release(held.pop(request_id, []))

    def note(self, report: WorkerReport) -> None:
        """Take in what the workers found out."""
        if report.location is not None:
            self.location = report.location
            self.link_bytes_per_s = report.link_bytes_per_s
        if report.store is not None:
            self.block_bytes = report.store.block_bytes
            self._worker_count = report.store.worker_count
            self.table.grow(report.store.capacity_blocks)
            if self._saves is not None:
                self._saves.part_blocks = max(1, STAGING_BYTES // self.block_bytes)
        if report.lost_places:
            self._forget_lost(report)
        for number, count in report.saved.items():
            assert self._saves is not None, "saved what was not asked for"
            self._saves.acknowledged(number, count, self._worker_count)

    def _forget_lost(self, report: WorkerReport) -> None:
        lost = report.lost_places
        self.counts.lost_blocks += len(lost)
        self.failed_loads.update(
            name for name, places in self._loading.items() if not lost.isdisjoint(places)
        )
        for run in chain.from_iterable(saved.runs for saved in self._saved.values()):
            good = next(
                (at for at, place in enumerate(run.places) if place in lost), len(run.places)
            )
            self.table.release(run.places[good:])
            del run.places[good:]
        self.table.lose(lost)

    def reset(self) -> None:
        """Forget everything: no load from now on brings back what was paged out before."""
        self.let_go()
        for saved in self._saved.values():
            self.table.release(saved.places)
        self._saved.clear()
        self._matches.clear()
        self._checkpointed.clear()
        self.table.clear()

    @property
    def planned_page_out_blocks(self) -> Collection[int]:
        """Blocks that the next step pages out, whatever request owns them by now."""
        return self._plan.out_blocks

    def let_go(self) -> None:
        """Let blocks change that are being paged out beside the model: none is wanted any more."""
        if self._saves is not None:
            self._saves.let_go()

    @property
    def is_saving(self) -> bool:
        """Whether page-outs beside the model are not acknowledged yet."""
        return bool(self._saves)

    @property
    def freeing_blocks(self) -> int:
        """Blocks of preempted requests that come free once they are acknowledged."""
        return 0 if self._saves is None else self._saves.freeing_blocks

    # --- What policies ask ----------------------------------------------------------------

    def saved_tokens(self, request_id: str) -> int:
        """Tokens of a preempted request that a load would bring back."""
        saved = self._saved.get(request_id)
        return 0 if saved is None else self.groups.reach(saved.runs, saved.tokens, saved.tokens)

    def clean_blocks(self, request: Any) -> int:
        """Full blocks of a running request that are in the store already."""
        if not self.table.capacity_blocks:
            return 0
        # A view is made of each running request at every slice's end, and of most not even the
        # first block is there: keys of their own are made as far as they are looked for.
        tokens, count = request.num_tokens, 0
        for index, group in enumerate(self.groups):
            blocks = range(group.first(tokens), tokens // group.block_tokens)
            count += len(self.table.find(self.keys.full(request, index, blocks)))
        return count

    def copied_blocks(self, request: Any, blocks: range) -> tuple[int, bool]:
        """How many of these full blocks are there, from the first; whether the rest is coming."""
        keys = list(self.keys.full(request, 0, blocks))
        found = len(self.table.find(keys))
        return found, all(map(self.table.is_known, keys[found:]))

    def loading_ids(self) -> Collection[str]:
        """Requests whose blocks are being filled beside the model."""
        return self._loading.keys()

    # --- Inside ---------------------------------------------------------------------------

    def _match(self, request: Any, local_tokens: int) -> tuple[list[BlockRun], int]:
        """Places of the blocks that a load would fill, and how many more tokens it brings."""
        most = request.num_tokens - 1
        saved = self._saved.get(request.request_id)
        if saved is not None:
            runs = saved.runs
            total = self.groups.reach(runs, saved.tokens, most)
        elif self.has_tier and self._is_on and not request.skip_reading_prefix_cache:
            total, runs = self.groups.longest(
                lambda index, blocks: self.table.find(self.keys.full(request, index, blocks)),
                local_tokens,
                most,
            )
        else:
            return [], 0
        if total <= local_tokens:
            return [], 0
        return self.groups.cut(runs, local_tokens, total), total - local_tokens

    def _load(
        self, request_id: str, match: tuple[list[BlockRun], int], block_ids: Sequence[Sequence[int]]
    ) -> list[int]:
        """Have blocks filled from these places, which are to be held."""
        runs, tokens = match
        places: list[int] = []
        blocks: list[int] = []
        written: list[int] = []
        for group, run, ids in zip(self.groups, runs, block_ids, strict=True):
            places += run.places
            blocks += ids[run.first : run.end]
            if run.places and (group.is_state or run.end * group.block_tokens > tokens):
                written.append(ids[run.end - 1])
        assert len(blocks) == len(places), (request_id, runs, block_ids)
        assert NULL_BLOCK not in blocks, (request_id, runs, block_ids)
        if self.is_load_async:
            self._loading[request_id] = places
            self._plan.async_loads[request_id] = (places, blocks)
        else:
            self._until_taken += places
            self._plan.in_places += places
            self._plan.in_blocks += blocks
            self._plan.written_blocks += written
        return places

    def _cache(
        self, request: Any, index: int, block_ids: Sequence[int], blocks: range
    ) -> tuple[int, int]:
        """Have full blocks of a group paged out that no request holds.

        Returns the end of those that are there or on their way now or were freed before, and how
        many of them were not before.
        """
        keys = list(self.keys.full(request, index, blocks))
        there = [at for at in blocks[: len(keys)] if block_ids[at] != NULL_BLOCK]
        kept, begun = self._keep(
            [keys[at - blocks.start] for at in there], [block_ids[at] for at in there]
        )
        return there[kept] if kept < len(there) else blocks.start + len(keys), begun

    def _keep(self, keys: Sequence[Hashable], block_ids: Sequence[int]) -> tuple[int, int]:
        """Have blocks paged out that no request holds.

        Returns how many, from the first, are there or on their way now, and how many of them were
        not before.
        """
        if self._saves is not None:
            return self._saves.save(keys, block_ids, self._plan)
        pairs = list(zip(keys, block_ids, strict=False))
        count = 0
        for at, (key, block_id) in enumerate(pairs):
            put = self.table.put(key)
            if put is None:
                return at, count
            place, is_new = put
            self.table.release((place,))
            if is_new:
                self._page_out(place, block_id)
                count += 1
        return len(pairs), count

    def _page_out(self, place: int, block_id: int) -> None:
        self._plan.out_places.append(place)
        self._plan.out_blocks.append(block_id)
