"""CoServingScheduler: what vLLM's scheduler does in a step that both classes share.

The part of `AquaScheduler` that touches vLLM for `CoServing`. Before vLLM's own loop it has the
fair policy choose among online requests and the co-serving policy plan the step, preempts, admits,
and puts `running` in the order in which requests give way, the first last. During the loop it says
how many tokens each request takes.

For that it uses the one question that vLLM, in every version that Aqua knows, asks of each request
in both halves of its loop: how a chunk is aligned to the blocks of Mamba layers. Without such
layers the answer may be any number up to the one in the question, and 0 of a running request means
that it does not take part in the step but stays in memory.

A plan costs a look at each request that holds memory, and a view of those that have computed. While
online requests decode, offline ones are parked and nothing happens to these, one plan serves some
steps; when online requests come and go, it goes on for those that there are. Where steps follow
each other, these are vLLM's own steps: nothing is asked, timed or looked at.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final

from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from aqua_schedulers.cfs import Decision, FairPolicy, Preemption, PreemptionMode
from aqua_schedulers.conserve import (
    CoServedRequest,
    CoServingPlan,
    CoServingView,
    MeasuredStep,
    ServiceClass,
)
from aqualib.engines.vllm.co_serving.arrivals import hear_arrivals
from aqualib.engines.vllm.co_serving.scheduler import CoServing
from aqualib.engines.vllm.lending.scheduler import LendingScheduler
from aqualib.engines.vllm.operations.step_log import engine_key
from aqualib.engines.vllm.options import AquaOptions
from aqualib.engines.vllm.paging.engine_checks import require_co_servable
from aqualib.engines.vllm.paging.scheduler import KvPagingScheduler
from aqualib.engines.vllm.requests.queue import PolicyRequestQueue
from aqualib.engines.vllm.scheduling.abort_checks import abortable_layers

READING_STEPS: Final = 2
"""Steps in which memory of preempted requests is read before it is free, as a rule: one, and one
that is under way when it is told. Doubled, more of the memory is left to those that stay meanwhile;
at 0 they may find none and miss a step."""

UNMEASURED_LINK_BYTES_PER_S: Final = 1e9
"""What the store's link is taken for until something has been paged: a fraction of any link between
a GPU and its host. Doubled, the first checkpoints go twice as fast, and may take longer than their
step."""


class CoServingScheduler(LendingScheduler):
    """Plans and orders the steps that two classes share; `AquaScheduler` says when.

    Attributes:
        co_serving: None where all requests are online.
    """

    co_serving: CoServing | None
    paging: KvPagingScheduler | None
    _policy: FairPolicy
    _queue: PolicyRequestQueue
    _holding: dict[str, CoServedRequest | None]
    _max_running: int
    max_num_scheduled_tokens: int

    def _open_co_serving(self, options: AquaOptions, block_tokens: int) -> None:
        self.co_serving = None
        self._plan: CoServingPlan | None = None
        self._is_settled = False
        # The step under way, if it is vLLM's own, and its tokens.
        self._plain_output: Any = None
        self._plain_tokens = 0
        # Online requests that the fair policy admits until it decides again.
        self._listed: Sequence[str] = ()
        if options.co_serving is None:
            return
        require_co_servable(self.vllm_config, self.kv_cache_config)
        is_load_async = self.paging is not None and self.paging.is_load_async
        key = engine_key(self.vllm_config)
        self.co_serving = CoServing(
            options,
            key,
            block_tokens=block_tokens,
            is_load_async=is_load_async,
            abortable_layers=abortable_layers(self.vllm_config, options),
            overlaps_steps=self.vllm_config.max_concurrent_batches > 1,
        )
        if self.co_serving.aborts is not None:
            hear_arrivals()
        # vLLM's own victim is the last in `running`, whatever its number.
        self.policy = SchedulingPolicy.FCFS
        self.need_mamba_block_aligned_split = True

    def _mamba_block_aligned_split(
        self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> int:
        """Tokens that a request takes in this step, of so many that it could."""
        co_serving = self.co_serving
        if co_serving is None:
            return int(super()._mamba_block_aligned_split(request, num_new_tokens, *args, **kwargs))
        if co_serving.tokens is None:
            return num_new_tokens
        return co_serving.tokens.take(
            request.request_id,
            num_new_tokens,
            is_offline=co_serving.is_offline(request.request_id),
            is_inside=request.status == RequestStatus.RUNNING,
        )

    # --- A step ------------------------------------------------------------------------------

    def _co_serve(self, co_serving: CoServing) -> None:
        """Do what comes before vLLM's own loop."""
        is_turn = self._policy.begin_step()
        if not is_turn and (plan := self._settled_plan(co_serving)) is not None:
            self._plan, self._is_settled = plan, True
            return
        self.step_timer.called(time.monotonic())
        if self.paging is not None:
            co_serving.settle_copies(self.paging, self.requests)
        if is_turn:
            self._follow_fair_policy(co_serving)
        plan = self._plan = co_serving.plan(self._co_serving_view(co_serving))
        self._preempt(plan.preempt)
        self._queue.admit([*self._listed, *plan.admit, *plan.copy_in])
        self._order_running(co_serving, plan.offline_tokens)
        if self.paging is not None:
            self._copy_out(co_serving, self.paging, plan)

    def _settled_plan(self, co_serving: CoServing) -> CoServingPlan | None:
        """The last plan, if it serves this step as well and no memory is on its way."""
        paging = self.paging
        if paging is not None and (paging.freeing_blocks or paging.loading_ids()):
            return None
        now_s = time.monotonic()
        if co_serving.wants_online and not any(self._arriving(co_serving)):
            self._order_running(co_serving)
            is_offline = co_serving.is_offline
            online = [r for r in self.running if not is_offline(r.request_id)]
            views = [self._in_memory(co_serving, request) for request in online]
            co_serving.regroup(views, len(self.running))
        free_blocks = int(self.kv_cache_manager.block_pool.get_num_free_blocks())
        return co_serving.settled_plan(free_blocks, len(self.running), now_s)

    def _order_running(self, co_serving: CoServing, planned: Iterable[str] = ()) -> None:
        """Have decodes, then prompts, offline requests as planned, and the other offline ones."""
        places = {name: at for at, name in enumerate(planned)}

        def place(request: Any) -> tuple[bool, int]:
            name = request.request_id
            if co_serving.is_offline(name):
                return True, places.get(name, len(places))
            return False, request.num_computed_tokens < request.num_prompt_tokens

        self.running.sort(key=place)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule as planned; in a settled step vLLM need not ask those that are parked."""
        plan, co_serving = self._plan, self.co_serving
        if not self._is_settled or plan is None or co_serving is None:
            return super().schedule(*args, **kwargs)
        if not self._is_watched and not co_serving.overlaps_steps:
            if not self._policy.has_waiting:
                co_serving.grant(int(self.kv_cache_manager.block_pool.get_num_free_blocks()))
            self._plain_tokens = plan.online_tokens
            return self._schedule_plainly(*args, **kwargs)
        # It stops asking once all tokens are given out, and online requests are asked first.
        budget = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = plan.online_tokens
        try:
            return super().schedule(*args, **kwargs)
        finally:
            self.max_num_scheduled_tokens = budget

    def _goes_on(self) -> bool:
        """Whether the step that begins is as the one before it, which was vLLM's own."""
        co_serving = self.co_serving
        if co_serving is None or self._is_watched or self._policy.has_waiting:
            return False
        if not co_serving.goes_on():
            return False
        self._policy.begin_step()  # There is no turn, as no request waits.
        return True

    def _schedule_plainly(self, *args: Any, **kwargs: Any) -> Any:
        """Have vLLM schedule online decodes alone, asking nothing.

        Each of them has one token to compute, and there is one for each; once these are given out,
        vLLM looks at no further request.
        """
        budget, asks = self.max_num_scheduled_tokens, self.need_mamba_block_aligned_split
        self.max_num_scheduled_tokens = self._plain_tokens
        self.need_mamba_block_aligned_split = False
        try:
            self._plain_output = Scheduler.schedule(self, *args, **kwargs)
            return self._plain_output
        finally:
            self.max_num_scheduled_tokens = budget
            self.need_mamba_block_aligned_split = asks

    def _step_begun(self, output: Any) -> None:
        """VLLM has scheduled a step; it may have been planned.

        One that is settled says nothing that the planned one before it has not said, unless vLLM
        refused it.
        """
        plan, self._plan = self._plan, None
        is_settled, self._is_settled = self._is_settled, False
        if is_settled and output.num_scheduled_tokens:
            return
        if self.co_serving is not None and plan is not None:
            is_memory_coming = self.paging is not None and self.paging.freeing_blocks > 0
            block_tokens = self.co_serving.block_tokens
            self.co_serving.begun(
                output,
                plan,
                is_memory_coming=is_memory_coming,
                written_blocks=lambda: self._written_blocks(output, block_tokens),
            )

    def _written_blocks(self, output: Any, block_tokens: int) -> frozenset[int]:
        """Blocks that a step writes to, once it is scheduled."""
        written: set[int] = set()
        for name, tokens in output.num_scheduled_tokens.items():
            (table,) = self.kv_cache_manager.get_block_ids(name)
            before = self.requests[name].num_computed_tokens - tokens
            written.update(table[before // block_tokens :])
        return frozenset(written)

    @property
    def _looks_at_step(self) -> bool:
        return (self._plan is not None and not self._is_settled) or super()._looks_at_step

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Go on as vLLM does, and note who has a first token."""
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        if self.co_serving is not None:
            self.co_serving.got_tokens(scheduler_output, self.requests, time.monotonic())
        return outputs

    def _step_ended(self, output: Any, step: MeasuredStep, now_s: float) -> None:
        super()._step_ended(output, step, now_s)
        if self.co_serving is not None:
            self.co_serving.ended(output, step, now_s)

    def _follow_fair_policy(self, co_serving: CoServing) -> None:
        """Have online requests take turns in all memory; offline ones give theirs for it."""
        offline = [each for each in self.running if co_serving.is_offline(each.request_id)]
        held = sum(map(self._held_blocks, offline))
        online = [name for name in self._holding if not co_serving.is_offline(name)]
        decision = self._decision(online, self._blocks_to_give() + held)
        self._listed = decision.admit
        if decision.preempt:
            self._preempt([Preemption(r.request_id, PreemptionMode.SWAP) for r in offline])
            self._preempt(decision.preempt)

    def _copy_out(
        self, co_serving: CoServing, paging: KvPagingScheduler, plan: CoServingPlan
    ) -> None:
        """Begin the checkpoints of the plan: blocks that the steps until now have filled."""
        for name, count in plan.copy_out.items():
            request = self.requests[name]
            one = co_serving.policy.checkpoints.of(name)
            first = one.saved + one.copying
            known = min(request.num_computed_tokens, request.num_tokens - 1)
            stop = min(first + count, known // co_serving.block_tokens)
            if first < stop:
                (table,) = self.kv_cache_manager.get_block_ids(name)
                co_serving.copy_begun(name, paging.copy_out(request, table, range(first, stop)))

    # --- Views -------------------------------------------------------------------------------

    def _co_serving_view(self, co_serving: CoServing) -> CoServingView:
        """The engine before a step.

        Requests that are being loaded can neither compute nor be preempted: they are not shown, and
        neither are their memory and their slots.
        """
        pool = self.kv_cache_manager.block_pool
        paging = self.paging
        running = [
            self._in_memory(co_serving, request)
            for request in map(self.requests.__getitem__, self._holding)
            if request.status == RequestStatus.RUNNING
        ]
        free_blocks = int(pool.get_num_free_blocks())
        if paging is not None and paging.freeing_blocks:
            # While these are read, online requests must find what they grow by.
            online = sum(each.service_class is ServiceClass.ONLINE for each in running)
            growth = -(-online * READING_STEPS // co_serving.block_tokens)
            free_blocks += paging.freeing_blocks - growth
        return CoServingView(
            now_s=time.monotonic(),
            free_blocks=free_blocks,
            block_count=len(pool.blocks),
            max_tokens=self.max_num_scheduled_tokens,
            max_running=self._max_running - (len(self._holding) - len(running)),
            running=running,
            arriving=list(self._arriving(co_serving)),
            link_bytes_per_s=(paging and paging.link_bytes_per_s) or UNMEASURED_LINK_BYTES_PER_S,
            block_bytes=max(1, paging.block_bytes) if paging is not None else 1,
            store_room_blocks=0 if paging is None else paging.table.room,
        )

    def _in_memory(self, co_serving: CoServing, request: Any) -> CoServedRequest:
        """A running request as the policy sees it: the same view until it has computed more.

        Its blocks change only with its tokens, or with its place in memory, which the view shares.
        """
        name = request.request_id
        computed_tokens = request.num_computed_tokens
        known_tokens = request.num_tokens + request.num_output_placeholders
        seen = self._holding[name]
        if seen is None or (seen.computed_tokens, seen.known_tokens) != (
            computed_tokens,
            known_tokens,
        ):
            seen = self._holding[name] = co_serving.view(
                request,
                computed_tokens=computed_tokens,
                held_blocks=self._held_blocks(request),
            )
        return seen

    def _arriving(self, co_serving: CoServing) -> list[CoServedRequest]:
        """Online requests that come in now if there is room."""
        paging = self.paging
        waiting = [self.requests[name] for name in self._listed if name in self.requests]
        return [
            co_serving.view(
                request,
                computed_tokens=0 if paging is None else paging.saved_tokens(request.request_id),
            )
            for request in waiting
            if request.status in {RequestStatus.WAITING, RequestStatus.PREEMPTED}
            and request.request_id not in self._holding
        ]

    def _held_blocks(self, request: Any) -> int:
        """Blocks of a request; those that it shares with others are counted, too."""
        return sum(map(len, self.kv_cache_manager.get_blocks(request.request_id).blocks))

    # --- Of AquaScheduler --------------------------------------------------------------------

    @abstractmethod
    def _decision(self, names: Collection[str], free_blocks: int) -> Decision: ...

    @abstractmethod
    def _preempt(self, preemptions: Collection[Preemption]) -> None: ...

    @abstractmethod
    def _blocks_to_give(self) -> int: ...
