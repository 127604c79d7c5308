"""AbortingScheduler: what becomes of a step's requests when it is aborted.

VLLM books a step when it schedules it: tokens count as computed, and blocks that the step will fill
can be found by other requests. Of a step that was aborted none of that is so. Before vLLM takes its
output in, which has no tokens,

1. the blocks that it wrote to are taken out of the prefix cache, or others would read what was
   never computed there;
2. its requests are back at the tokens that they had before it, and stay in memory: the plan of the
   next step says which of them give way to the arrival;
3. one that found a block of another in the very same step has less: what lies before that block. It
   is preempted, as at the end of a slice, and so are all of them where steps overlap, or with
   drafts: there the runner has noted more of the step than how far each request is;
4. a request that is being loaded, and found such a block, begins again when its load has ended.

A request that ends while such a step is under way, because its client went, ends as it was before
it: what it leaves to others is what is certainly there.

Nothing is scheduled beside a step that may be aborted: where steps overlap, the next one is empty
(`AquaScheduler`). So no step under way has been built upon what is taken back.

Checkpoints and page-outs that the step's plan contained are good: they read blocks that earlier
steps had filled, before this one began.

Source: ConServe section 4.3; the paper's engine has no prefix cache.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from aqua_schedulers.cfs import Preemption, PreemptionMode
from aqua_schedulers.conserve import MeasuredStep
from aqualib.engines.vllm.co_serving.step_aborts import AbortableStep
from aqualib.engines.vllm.scheduling.co_serving_scheduler import CoServingScheduler


class AbortingScheduler(CoServingScheduler):
    """Takes aborted steps back; `AquaScheduler` schedules nothing beside them."""

    _aborted_output: Any = None

    # --- On the thread that takes requests in ------------------------------------------------

    def arrival_heard(self, request: Any) -> None:
        """A request has come in, and is not added yet."""
        if self.co_serving is not None:
            self.co_serving.heard(request, time.monotonic())

    def arrival_failed(self, request_id: str) -> None:
        """One that was heard of will not be added."""
        if self.co_serving is not None and self.co_serving.aborts is not None:
            self.co_serving.aborts.arrived(request_id)

    # --- On the scheduler's ------------------------------------------------------------------

    @property
    def _may_be_aborted(self) -> AbortableStep | None:
        """The step under way that may be aborted."""
        aborts = None if self.co_serving is None else self.co_serving.aborts
        return None if aborts is None else aborts.under_way

    def _schedule_nothing(self, *args: Any, **kwargs: Any) -> Any:
        """Have an empty step follow one that may be aborted: nothing may build upon that."""
        pause, self._pause_state = self.pause_state, PauseState.PAUSED_ALL
        try:
            return self._schedule(*args, **kwargs)
        finally:
            self._pause_state = pause

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Take back what was aborted, and go on as vLLM does."""
        step, co_serving = self._may_be_aborted, self.co_serving
        # Where steps overlap, one before it may end first.
        if step is None or step.tokens is not scheduler_output.num_scheduled_tokens:
            return super().update_from_output(scheduler_output, model_runner_output)
        assert co_serving is not None
        assert co_serving.aborts is not None
        is_aborted = self._is_aborted(model_runner_output)
        co_serving.aborts.ended(is_aborted=is_aborted)
        if not is_aborted:
            return super().update_from_output(scheduler_output, model_runner_output)
        co_serving.aborted(scheduler_output)
        with self._block_lock:
            unloaded = model_runner_output.kv_connector_output.invalid_block_ids
            stays = not (co_serving.overlaps_steps or scheduler_output.scheduled_spec_decode_tokens)
            self._take_back(step, frozenset(unloaded), co_serving.block_tokens, stays=stays)
        self._aborted_output = scheduler_output
        try:
            return super().update_from_output(scheduler_output, model_runner_output)
        finally:
            self._aborted_output = None

    def _is_aborted(self, output: Any) -> bool:
        """Whether this is the output of the step under way, and it was aborted."""
        step = self._may_be_aborted
        reported = output.kv_connector_output
        report = None if reported is None else reported.kv_connector_worker_meta
        if step is None or report is None:
            return False
        # Several connectors report otherwise, and have no steps that can be aborted.
        ranks, all_ranks = report.aborted[step.number], self.vllm_config.parallel_config.world_size
        assert ranks in {0, all_ranks}, f"{ranks} of {all_ranks} ranks aborted step {step.number}"
        return bool(ranks)

    def _take_back(
        self, step: AbortableStep, unloaded: frozenset[int], block_tokens: int, *, stays: bool
    ) -> None:
        """Have no request count what the step was to compute, or blocks that were not loaded."""
        self._evict_written(step)
        bad = step.written_blocks | unloaded
        victims: list[Preemption] = []
        for name in list(self._holding):
            request = self.requests[name]
            tokens = request.num_computed_tokens - step.tokens.get(name, 0)
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                if self._good_tokens(request, tokens, bad, unloaded, block_tokens) < tokens:
                    request.num_computed_tokens = 0
                    self.failed_recving_kv_req_ids.add(name)
            elif name in step.tokens and request.status == RequestStatus.RUNNING:
                good = self._good_tokens(request, tokens, bad, unloaded, block_tokens)
                request.num_computed_tokens = good
                if stays and good == tokens:
                    self._go_on_from_before(request)
                else:
                    victims.append(Preemption(name, PreemptionMode.SWAP))
        self._preempt(victims)

    def _go_on_from_before(self, request: Any) -> None:
        """Keep a request in memory that has fewer tokens than vLLM has booked blocks for."""
        # What was seen of it is of as many tokens, and of fewer blocks.
        self._holding[request.request_id] = None
        if request.num_computed_tokens < request.num_tokens - 1:
            # The step may have been the last of its prompt.
            self._inflight_prefills.add(request)

    def _good_tokens(
        self,
        request: Any,
        tokens: int,
        bad: frozenset[int],
        unloaded: frozenset[int],
        block_tokens: int,
    ) -> int:
        """Of a request's first tokens, those before the first block that does not hold them.

        Blocks that are shared are full. So in one that is begun a step writes behind its tokens,
        and these are good unless they were to be loaded, and were not.

        Args:
            request: Whose.
            tokens: So many.
            bad: Blocks that a step was to write to, or that were not loaded.
            unloaded: The latter alone.
            block_tokens: Of a block.
        """
        (table,) = self.kv_cache_manager.get_block_ids(request.request_id)
        full, begun = divmod(tokens, block_tokens)
        whole = next((at for at, block_id in enumerate(table[:full]) if block_id in bad), full)
        is_begun_good = whole == full and not (begun and table[full] in unloaded)
        return tokens if is_begun_good else whole * block_tokens

    def _evict_written(self, step: AbortableStep) -> None:
        """Take what a step writes out of the prefix cache."""
        self.kv_cache_manager.block_pool.evict_blocks(set(step.written_blocks))

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        step, co_serving = self._may_be_aborted, self.co_serving
        if step is not None and co_serving is not None and request.request_id in step.tokens:
            self._evict_written(step)
            # One that was preempted meanwhile has none any more.
            before = max(0, request.num_computed_tokens - step.tokens[request.request_id])
            request.num_computed_tokens = self._good_tokens(
                request, before, step.written_blocks, frozenset(), co_serving.block_tokens
            )
        return super()._free_request(request, *args, **kwargs)

    def _step_ended(self, output: Any, step: MeasuredStep, now_s: float) -> None:
        if output is not self._aborted_output:
            super()._step_ended(output, step, now_s)

    def shutdown(self) -> None:
        """Let go of the page, and leave."""
        if self.co_serving is not None and self.co_serving.aborts is not None:
            self.co_serving.aborts.close()
        super().shutdown()

    # --- Of AquaScheduler --------------------------------------------------------------------

    @abstractmethod
    def _schedule(self, *args: Any, **kwargs: Any) -> Any: ...
