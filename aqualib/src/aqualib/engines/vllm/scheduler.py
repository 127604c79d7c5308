"""AquaScheduler: vLLM's scheduler, with a fair policy to choose which requests hold memory.

vLLM admits in order of arrival and preempts only when a running request finds no block. Here the
policy of `aqua_schedulers.cfs` decides, at slice ends, which are preempted and which admitted;
vLLM's own loop then does everything else, unchanged. What is left of its order is the head of
`waiting`, which is a `PolicyRequestQueue`.

The paging scheduler hears of a preemption, the policy's or vLLM's own, before the blocks are freed,
so that the KV is paged out instead of lost. Requests are never admitted in the step that preempted
them: their blocks are read back one step later at the earliest.

Within a slice, and while no request waits, a step costs one call of the policy. Where offline
requests are served beside online ones, the same policy decides among online requests alone, and a
step is planned as a whole (`co_serving_scheduler`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Final

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from aqua_schedulers.cfs import (
    Decision,
    EngineView,
    PagingRates,
    PagingTier,
    Preemption,
    PreemptionMode,
    TenantAccounts,
    policy_named,
)
from aqua_schedulers.conserve import CoServedRequest
from aqualib.engines.vllm.connector import find_connector
from aqualib.engines.vllm.contract.check import warn_of_changes
from aqualib.engines.vllm.contract.versions import (
    holding_queue,
    max_running,
    require_schedulable,
    require_supported,
)
from aqualib.engines.vllm.operations.switches import Feature
from aqualib.engines.vllm.options import options_of
from aqualib.engines.vllm.paging.engine_checks import require_blocks
from aqualib.engines.vllm.paging.scheduler import KvPagingScheduler
from aqualib.engines.vllm.requests.queue import PolicyRequestQueue
from aqualib.engines.vllm.scheduling.co_serving_scheduler import READING_STEPS
from aqualib.engines.vllm.scheduling.eviction_scheduler import EvictionScheduler
from aqualib.engines.vllm.scheduling.request_views import RequestViews

SAVING_SHARE: Final = 1 / 8
"""Share of the KV cache that page-outs that no request waits for may hold, by judgement: a request
that ends gives most of its memory at once. Doubled, more prefixes are kept when many requests end
together, and those that wait find less memory for as long as that takes."""


ASKS_BEFORE_PREEMPTING: Final = hasattr(KVConnectorBase_V1, "has_pending_block_frees")
"""Whether vLLM itself preempts no request while memory comes free; it does not ask until 0.29."""


class AquaScheduler(EvictionScheduler):
    """vLLM's scheduler under a fair policy; vLLM makes it from `--scheduler-cls`."""

    has_requests_begin_again: ClassVar = True
    """Whether a load that fails is right though a request cannot go back to its last good block."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        require_supported(vllm.__version__)
        warn_of_changes(vllm.__version__)
        require_schedulable(self)
        require_blocks(self.kv_cache_config)
        options = options_of(vllm_config)
        self._managers = self.kv_cache_manager.coordinator.single_type_managers
        self._views = RequestViews(options, self._managers, self.max_model_len)
        self._growing_tokens = self._views.tokens_per_new_block
        self._policy = policy_named(options.policy, options, block_tokens=self._growing_tokens)
        self._options = options
        self._max_running = max_running(self)
        self.paging: KvPagingScheduler | None = None
        connector = find_connector(self.connector)
        if connector is not None and connector.paging_scheduler is not None:
            self.paging = connector.paging_scheduler
            pool = self.kv_cache_manager.block_pool
            self.paging.save_beside(pool, max(1, int(len(pool.blocks) * SAVING_SHARE)))
            # What cannot be loaded is computed again, though another connector is asked first.
            self.recompute_kv_load_failures = True
            self.switches.add(Feature.PAGING, self.paging.turn)
            connector.switches = self.switches
            self.pins = connector.pins
        self.switches.add(Feature.SLICING, self._policy.slice_turns)
        self._queue = PolicyRequestQueue()
        self.waiting = self._queue
        # Of running and loading requests, in the order of admission: what a decision does must not
        # depend on string hashes. With what the co-serving policy was last shown of each.
        self._holding: dict[str, CoServedRequest | None] = {}
        self._preemption_mode = PreemptionMode.SWAP
        self._is_turn = False
        # Of the model itself. Where vLLM preempts unasked, its loop is to put this question anyway.
        self._splits_at_blocks = self.need_mamba_block_aligned_split
        if self.paging is not None and not ASKS_BEFORE_PREEMPTING:
            self.need_mamba_block_aligned_split = True
        self._remaining_blocks = _RemainingBlocks(super()._request_remaining_blocks)
        # What vLLM calls; for an attribute of the instance, a look costs no call of ours.
        self._request_remaining_blocks = self._remaining_blocks.__getitem__
        self.forced_preemptions = 0
        self._open_evictions()
        self._open_co_serving(options, self._growing_tokens)
        if connector is not None:
            connector.co_serving = self.co_serving

    # --- What vLLM calls ------------------------------------------------------------------

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Let the policy decide, then vLLM schedule.

        A pause stops turns. One that waits for what has begun (`PAUSED_NEW`) lets requests that
        were preempted before it end, too: else they would go on after it, for example under other
        weights.
        """
        if self._may_be_aborted is not None:
            return self._schedule_nothing(*args, **kwargs)
        pause = self.pause_state
        if pause is PauseState.UNPAUSED and not self._evicted and self._goes_on():
            return self._schedule_plainly(*args, **kwargs)
        if self._evicted:
            self._end_evictions(ends_all=pause is PauseState.PAUSED_NEW)
        co_serving = self.co_serving
        if co_serving is not None:
            co_serving.begin()
            if pause is not PauseState.UNPAUSED:
                co_serving.paused()
                self._order_running(co_serving)
        if pause is PauseState.PAUSED_NEW:
            begun = (r.request_id for r in self._queue if _has_begun(r))
            self._queue.admit(name for name in begun if name not in self._evicted)
            # vLLM admits what is shown to it, which is nothing new.
            self._pause_state = PauseState.UNPAUSED
        elif pause is PauseState.UNPAUSED and co_serving is not None:
            with self._block_lock:
                self._co_serve(co_serving)
        elif pause is PauseState.UNPAUSED and self._policy.begin_step():
            with self._block_lock:
                decision = self._decision(self._holding, self._blocks_to_give())
                self._preempt(decision.preempt)
                self._queue.admit(decision.admit)
        try:
            output = self._schedule(*args, **kwargs)
            self._step_begun(output)
            return output
        finally:
            self._pause_state = pause

    def get_num_unfinished_requests(self) -> int:
        """Count what a pause waits for, or what vLLM counts."""
        if self.pause_state is not PauseState.PAUSED_NEW:
            return int(super().get_num_unfinished_requests())
        return sum(map(_has_begun, self.requests.values()))

    def _schedule(self, *args: Any, **kwargs: Any) -> Any:
        paging = self.paging
        if paging is not None and paging.is_checkpointing and self.co_serving is None:
            self._checkpoint(paging)
        self._remaining_blocks.clear()
        known_count = len(self.running)
        output = super().schedule(*args, **kwargs)
        if skipped := holding_queue(self):
            self._take_back_skipped(skipped)
        loading_count = 0 if paging is None else len(paging.loading_ids())
        if len(self.running) + loading_count != len(self._holding):
            self._note_admissions(known_count)
        return output

    def _mamba_block_aligned_split(
        self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """Tokens that a request takes in this step; none while its memory is coming free."""
        if not ASKS_BEFORE_PREEMPTING and self._is_memory_coming(request, num_new_tokens):
            return 0
        if self._splits_at_blocks or self.co_serving is not None:
            return super()._mamba_block_aligned_split(request, num_new_tokens, *args, **kwargs)
        return num_new_tokens

    def _is_memory_coming(self, request: Any, tokens: int) -> bool:
        """Whether a running request finds no block for so many tokens, and will in a moment."""
        if self.paging is None or not self.paging.is_saving:
            return False
        if request.status != RequestStatus.RUNNING:
            return False
        name = request.request_id
        end = request.num_computed_tokens + tokens + self.num_lookahead_tokens
        missing = sum(
            max(0, -(-end // each.block_size) - len(each.req_to_blocks.get(name, ())))
            for each in self._managers
        )
        if missing <= self.kv_cache_manager.block_pool.get_num_free_blocks():
            return False
        return self.paging.freeing_blocks > 0

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """A step has ended."""
        if scheduler_output is self._plain_output:  # In which nothing was loaded.
            return Scheduler.update_from_output(self, scheduler_output, model_runner_output)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.paging is not None and self.paging.groups.loses_all and self.paging.failed_loads:
            self._begin_again(self.paging.failed_loads)
        return outputs

    def _begin_again(self, failed: Collection[str]) -> None:
        """Have requests computed anew whose load lost a block, once it has ended.

        vLLM takes a request back to its last good block by that block's number, which says nothing
        where groups are several, and is too far where blocks behind a window were not loaded.
        """
        for name in failed:
            request = self.requests.get(name)
            if request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                request.num_computed_tokens = 0
                self.failed_recving_kv_req_ids.add(name)

    def add_request(self, request: Any) -> None:
        """A request arrived."""
        co_serving = self.co_serving
        is_new = request.request_id not in self.requests
        if co_serving is not None and not is_new:
            co_serving.attainment.forget(request.request_id)
        super().add_request(request)
        if not is_new:
            return
        waited_s = max(0.0, time.time() - request.arrival_time)
        if co_serving is None or not co_serving.arrived(
            request, time.monotonic(), waited_s=waited_s
        ):
            self._policy.added(self._views.waiting(request))

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Forget all KV, for example because the weights have changed: nothing of it may return."""
        self._preemption_mode = PreemptionMode.RECOMPUTE
        if self.paging is not None:
            self.paging.let_go()
        if kwargs.get("reset_running_requests") or args[:1] == (True,):
            self._forget_loaded()
        try:
            return super().reset_prefix_cache(*args, **kwargs)
        finally:
            self._preemption_mode = PreemptionMode.SWAP
            if self.paging is not None:
                self.paging.reset()
            if self.co_serving is not None:
                self.co_serving.forget_saved()

    def _forget_loaded(self) -> None:
        """Have requests whose load has ended, and that do not run yet, begin again.

        vLLM would find their blocks in use, and give up.
        """
        for request in self.requests.values():
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                if request.request_id not in self.finished_recving_kv_req_ids:
                    continue
                # As after a load that brought nothing.
                self.failed_recving_kv_req_ids.add(request.request_id)
            elif request.status not in {RequestStatus.WAITING, RequestStatus.PREEMPTED}:
                continue
            # Nothing for most; for one whose load brought nothing, blocks without a token in them.
            self.kv_cache_manager.free(request)
            request.num_computed_tokens = 0

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        name = request.request_id
        if not self._is_offline(name):
            self._policy.removed(name, request.num_output_tokens)
        if self.co_serving is not None:
            now_s = time.monotonic()
            self.co_serving.attainment.ended(
                name,
                request.num_output_tokens,
                now_s,
                is_left=request.status == RequestStatus.FINISHED_ABORTED,
            )
            self.co_serving.removed(name, now_s)
        self._holding.pop(name, None)
        return super()._free_request(request, *args, **kwargs)

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        paging, saved_tokens = self.paging, 0
        if paging is not None and paging.is_paging and self._preemption_mode is PreemptionMode.SWAP:
            saved_tokens = paging.preempting(
                request,
                self._block_ids(request.request_id),
                request.num_computed_tokens,
                # What vLLM itself preempts for another finds its memory in this very step.
                frees_later=self._is_turn,
            )
        super()._preempt_request(request, *args, **kwargs)
        self._note_preemption(request, saved_tokens)

    def _block_ids(self, name: str) -> list[list[int]]:
        """A request's table of each group."""
        return [
            [block.block_id for block in each.req_to_blocks.get(name, ())]
            for each in self._managers
        ]

    def _note_preemption(self, request: Any, saved_tokens: int = 0) -> None:
        """A request holds no memory any more; tell the policy of its class."""
        self._holding.pop(request.request_id, None)
        if self._hold_out(request, saved_tokens):
            return
        if self.co_serving is not None and self._is_offline(request.request_id):
            self.co_serving.preempted(request, self.paging, time.monotonic())
        else:
            if self.co_serving is not None:
                self.co_serving.online_preempted(self.running)
            self._policy.preempted(self._views.waiting(request, saved_tokens))

    def _is_offline(self, request_id: str) -> bool:
        return self.co_serving is not None and self.co_serving.is_offline(request_id)

    def _count_swapped_bytes(self) -> int:
        return 0 if self.paging is None else self.paging.swapped_bytes

    def _still_read(self) -> Collection[int]:
        return () if self.paging is None else self.paging.planned_page_out_blocks

    @property
    def accounts(self) -> TenantAccounts | None:
        """What tenants have been served; None where requests are all alike."""
        return self._policy.accounts

    # --- Time slices ----------------------------------------------------------------------

    def _decision(self, names: Collection[str], free_blocks: int) -> Decision:
        """Have the fair policy decide about requests that hold memory, and those that wait."""
        paging = self.paging
        requests = self.requests
        return self._policy.decide(
            EngineView(
                free_blocks=free_blocks,
                token_budget=self.max_num_scheduled_tokens,
                max_running=self._max_running,
                running_count=len(names),
                running=lambda: self._views.holding([requests[name] for name in names]),
                store_room_blocks=0 if paging is None else paging.table.room,
                location=PagingTier.NOWHERE if paging is None else paging.location,
                rates=self._rates(),
                output_tokens=lambda: [(name, requests[name].num_output_tokens) for name in names],
                saved_blocks=None if paging is None else self._saved_blocks,
            )
        )

    def _preempt(self, preemptions: Collection[Preemption]) -> None:
        """Take requests out of memory before vLLM schedules."""
        if not preemptions:
            return
        self._is_turn = True
        now_s = time.monotonic()
        leaving = {preemption.request_id for preemption in preemptions}
        self.running[:] = [r for r in self.running if r.request_id not in leaving]
        for preemption in preemptions:
            self._preemption_mode = preemption.mode
            self._preempt_request(
                self.requests[preemption.request_id],
                now_s,
                drop_stale_output=self.requires_kv_delivery,
            )
        self._preemption_mode = PreemptionMode.SWAP
        self._is_turn = False
        forced = len(leaving - self._evicted.keys())
        self.forced_preemptions += forced
        if self.paging is not None:
            self.paging.counts.forced_preemptions += forced

    def _blocks_to_give(self) -> int:
        """Blocks to give out: those that are free, and those that will be in a moment.

        While these are read, those that stay must find what they grow by.
        """
        free_blocks = int(self.kv_cache_manager.block_pool.get_num_free_blocks())
        if self.paging is None or not self.paging.is_paging:
            return free_blocks
        growth: int = -(-len(self._holding) * READING_STEPS // self._growing_tokens)
        return free_blocks + self.paging.freeing_blocks - growth

    def _note_admissions(self, known_count: int) -> None:
        """Tell the policy what was admitted, and keep decodes before prompts (section 7).

        vLLM puts those that it admits behind the `known_count` that ran before the step; where it
        preempts some of these itself, it admits none.
        """
        holding, running = self._holding, self.running
        entered = [r.request_id for r in running[known_count:] if r.request_id not in holding]
        if self.paging is not None:
            entered += [name for name in self.paging.loading_ids() if name not in holding]
        for name in entered:
            holding[name] = None
            if self.co_serving is not None and self._is_offline(name):
                self.co_serving.admitted(name)
            else:
                self._policy.admitted(name)
        # Where classes share the engine, each step is put in order before vLLM's loop.
        if entered and self.co_serving is None:
            # Of those that ran before, the prompts stand last.
            at = min(known_count, len(running))
            while at and _is_prompt(running[at - 1]):
                at -= 1
            running[at:] = sorted(running[at:], key=_is_prompt)

    def _take_back_skipped(self, queue: Any) -> None:
        """Leave with vLLM's queue of requests that may hold memory those alone that do.

        There it keeps those whose load has failed, with memory reserved for them, and until 0.30
        others that it passed over. One of these that does not fit would stop all that is behind it,
        for ever if nothing runs.
        """
        passed_over = []
        for request in list(queue):
            is_waiting = request.status in {RequestStatus.WAITING, RequestStatus.PREEMPTED}
            if not is_waiting or request.num_computed_tokens:
                continue
            queue.remove_request(request)
            if request.request_id in self._holding:
                self._inflight_prefills.discard(request)
                self._queue.add_request(request)
                self._note_preemption(request)
            else:
                passed_over.append(request)
        self._queue.prepend_requests(reversed(passed_over))

    def _checkpoint(self, paging: KvPagingScheduler) -> None:
        """Have blocks paged out that the steps until now have filled."""
        for request in self.running:
            computed_tokens = request.num_computed_tokens
            if paging.is_behind(request.request_id, computed_tokens):
                block_ids = self.kv_cache_manager.get_block_ids(request.request_id)
                paging.checkpoint(request, computed_tokens, block_ids)

    def _rates(self) -> PagingRates | None:
        """What a load and a prompt cost, once both have been measured."""
        paging, tokens_per_s = self.paging, self.prefill_rate.tokens_per_s
        if paging is None or not paging.link_bytes_per_s or not tokens_per_s:
            return None
        return PagingRates(
            link_bytes_per_s=paging.link_bytes_per_s,
            block_bytes=paging.block_bytes,
            prefill_tokens_per_s=tokens_per_s,
        )

    def _saved_blocks(self, name: str) -> int:
        assert self.paging is not None
        return self.paging.clean_blocks(self.requests[name])


class AsyncAquaScheduler(AquaScheduler, AsyncScheduler):
    """The same under asynchronous scheduling."""


AquaScheduler.asynchronous = AsyncAquaScheduler


class _RemainingBlocks(dict[Any, int]):
    """Blocks that each request under way will still take, counted once in a step.

    For each load that it admits, vLLM adds them up over all prefills and loads under way. Within a
    step they change for what it admits alone, and it admits what is loaded before further loads.
    """

    def __init__(self, count: Callable[[Any], int]) -> None:
        super().__init__()
        self._count = count

    def __missing__(self, request: Any) -> int:
        count = self[request] = self._count(request)
        return count


def _is_prompt(request: Any) -> bool:
    """Whether a running request has still to compute its prompt."""
    return bool(request.num_computed_tokens < request.num_prompt_tokens)


def _has_begun(request: Any) -> bool:
    """Whether a request has got anywhere and has not ended: running, preempted or loading."""
    if request.is_finished() or request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
        return False
    return request.num_computed_tokens > 0 or request.status in {
        RequestStatus.RUNNING,
        RequestStatus.PREEMPTED,
        RequestStatus.WAITING_FOR_REMOTE_KVS,
    }
