"""LendingScheduler: vLLM's scheduler, whose blocks may leave and come back between steps.

It decides nothing: it takes a lock around everything that moves blocks, numbers the steps, and
counts the requests that a step left waiting. `AquaScheduler` is one, too. Without `"lend"` among
the options every method is vLLM's behind a comparison, or behind the lock, which has no other user
then.

Why a lock and not the step boundary: an engine without requests makes no steps, and that is when it
has most to lend. Its thread then waits for work without holding the lock.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Final, Self

import vllm
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from aqua_schedulers.conserve import MeasuredStep
from aqualib.engines.vllm.contract.check import warn_of_changes
from aqualib.engines.vllm.contract.versions import max_running, require_lendable, require_supported
from aqualib.engines.vllm.coordinator_start import look_for_coordinator
from aqualib.engines.vllm.lending.engine_ranks import (
    EngineRanks,
    open_local,
    open_remote,
    rank_endpoint,
)
from aqualib.engines.vllm.lending.kv_lending import EngineLoad
from aqualib.engines.vllm.lending.lending_service import LendingService
from aqualib.engines.vllm.lending.rank_messages import PACE
from aqualib.engines.vllm.lending.step_count import STEP
from aqualib.engines.vllm.lending.worker import LENDABLE
from aqualib.engines.vllm.operations.admin_commands import answer
from aqualib.engines.vllm.operations.step_log import PrefillRate, StepLog, StepTimer, load_of
from aqualib.engines.vllm.operations.switches import Feature, Switches
from aqualib.engines.vllm.options import (
    is_borrowing,
    model_name,
    options_of,
    profile_names,
    rank_member,
)
from aqualib.engines.vllm.paging.pins import PrefixPinTable
from aqualib.settings import load_settings

RATE_WINDOW_S: Final = 10.0
"""Arrivals of so many seconds make the rate that the books are told, by judgement. Doubled, they
hear of a burst later. What the informer goes by are counts."""


class LendingScheduler(Scheduler):
    """vLLM's own scheduler, lending. Made by vLLM from `--scheduler-cls`.

    Under asynchronous scheduling vLLM wants another base class; making this one gives that.
    """

    asynchronous: ClassVar[type[LendingScheduler]]
    """What is made instead under asynchronous scheduling; of this class alone, not inherited."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Self:
        """Choose the class that fits the engine's way of scheduling."""
        del args, kwargs
        is_async = vllm_config.scheduler_config.async_scheduling
        # A subclass from elsewhere stays what it is, as do the asynchronous ones.
        kind: Any = vars(cls).get("asynchronous", cls) if is_async else cls
        made: Self = object.__new__(kind)
        return made

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.lending_service: LendingService | None = None
        self.switches: Final = Switches()
        self.step_log: Final = StepLog()
        self.step_timer: Final = StepTimer()
        self.prefill_rate: Final = PrefillRate()
        self.pins: PrefixPinTable | None = None
        self._block_lock = threading.RLock()
        self._left_waiting = 0
        self._is_starved = False
        self._arrived_count = 0
        self._arrivals_s: deque[float] = deque()
        options = options_of(vllm_config)
        if options.lend is None:
            return
        require_supported(vllm.__version__)
        warn_of_changes(vllm.__version__)
        require_lendable(self)
        # Kept, as co-serving lowers the engine's own in steps of online requests alone.
        self._step_tokens: Final[int] = self.max_num_scheduled_tokens
        look_for_coordinator(load_settings(), is_required=options.require_coordinator)
        self.lending_service = LendingService(
            options.lend,
            ranks_of(vllm_config, options.lend.profile),
            pool=self.kv_cache_manager.block_pool,
            keep_blocks=_keep_blocks(self, vllm_config),
            lock=self._block_lock,
            read_load=self._read_load,
            still_read=self._still_read,
            metrics_port=options.lend.metrics_port_of(
                vllm_config.parallel_config.data_parallel_index
            ),
        )
        self.switches.add(Feature.LENDING, self.lending_service.turn)

    def __call__(self, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Answer an operator's command; see `admin_commands`."""
        return answer(self, command, arguments)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule as vLLM does, with the blocks that are there."""
        self.step_timer.called(time.monotonic())
        output = self._schedule_lending(*args, **kwargs)
        if self._looks_at_step:
            self.step_timer.scheduled(output, load_of(output, self.requests))
        elif self.prefill_rate.is_told_by(output):
            self.step_timer.scheduled(output)
        else:
            self.step_timer.skipped()
        return output

    @property
    def _is_watched(self) -> bool:
        """Whether every step counts for something, whatever it computes."""
        return self.lending_service is not None or self.step_log.is_recording

    @property
    def _looks_at_step(self) -> bool:
        """Whether anything goes by what the step computes that is scheduled now, and how long."""
        return self.step_log.is_recording

    def _step_ended(self, output: Any, step: MeasuredStep, now_s: float) -> None:  # noqa: ARG002 - for subclasses
        """A step that was timed has ended."""
        self.step_log.note(step)
        self.prefill_rate.note(output, step.seconds)

    def _schedule_lending(self, *args: Any, **kwargs: Any) -> Any:
        service = self.lending_service
        if service is None:
            return super().schedule(*args, **kwargs)
        began_s = time.perf_counter()
        with self._block_lock:
            service.lending.before_step(has_waiting=self._left_waiting > 0)
            output = super().schedule(*args, **kwargs)
            # Ranks in other processes count by it.
            setattr(output, STEP, service.lending.step_begun())
            if (pace := service.take_pace()) is not None:
                setattr(output, PACE, pace)
            metrics = service.metrics
            metrics.steps.begun(output.total_num_scheduled_tokens, metrics.loans, began_s)
            was_waiting = self._left_waiting > 0
            self._left_waiting = self.get_request_counts()[1]
            self._is_starved = self._left_waiting > 0 and self._had_room(output)
        if self._left_waiting and not was_waiting:
            service.requests_wait()
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Note that a step has ended, and go on as vLLM does."""
        if self.step_timer.is_timing:
            now_s = time.monotonic()
            if (step := self.step_timer.ended(scheduler_output, now_s)) is not None:
                self._step_ended(scheduler_output, step, now_s)
        service = self.lending_service
        if service is None:
            return super().update_from_output(scheduler_output, model_runner_output)
        with self._block_lock:
            service.lending.step_ended()
            outputs = super().update_from_output(scheduler_output, model_runner_output)
        token_count = scheduler_output.total_num_scheduled_tokens
        service.step_ended(token_count, time.perf_counter())
        return outputs

    def add_request(self, request: Any) -> None:
        """Note an arrival, and go on as vLLM does."""
        if self.lending_service is None:
            super().add_request(request)
            return
        self._arrivals_s.append(time.monotonic())
        self._arrived_count += 1
        with self._block_lock:
            super().add_request(request)

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """Finish requests as vLLM does, under the lock."""
        with self._block_lock:
            return super().finish_requests(*args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        """Forget all prefixes as vLLM does, under the lock."""
        with self._block_lock:
            return super().reset_prefix_cache(*args, **kwargs)

    def shutdown(self) -> None:
        """Take everything back and leave."""
        service, self.lending_service = self.lending_service, None
        if service is not None:
            service.close()
        super().shutdown()

    def _still_read(self) -> Collection[int]:
        """Free blocks that the next step is going to read; under the lock."""
        return ()

    def _had_room(self, output: Any) -> bool:
        """Whether a step had tokens and a place left for another request."""
        has_tokens = output.total_num_scheduled_tokens < self._step_tokens
        return has_tokens and len(self.running) < max_running(self)

    def _count_swapped_bytes(self) -> int:
        """KV that is paged out of requests that wait; under the lock."""
        return 0

    def _read_load(self) -> EngineLoad:
        """Count the load; on the informer's thread."""
        since_s = time.monotonic() - RATE_WINDOW_S
        while self._arrivals_s and self._arrivals_s[0] < since_s:
            self._arrivals_s.popleft()
        # A request that was aborted while it waited waits no more, and no step says so.
        waiting_count = min(self._left_waiting, self.get_request_counts()[1])
        with self._block_lock:
            swapped_bytes = self._count_swapped_bytes() if waiting_count else 0
        return EngineLoad(
            waiting_count=waiting_count,
            requests_per_s=len(self._arrivals_s) / RATE_WINDOW_S,
            arrived_count=self._arrived_count,
            swapped_bytes=swapped_bytes,
            is_starved=self._is_starved and waiting_count > 0,
        )


class AsyncLendingScheduler(LendingScheduler, AsyncScheduler):
    """The same under asynchronous scheduling."""


LendingScheduler.asynchronous = AsyncLendingScheduler


def ranks_of(vllm_config: Any, profile: str | None) -> AbstractContextManager[EngineRanks]:
    """The engine's ranks: the worker beside this scheduler, or those of other processes."""
    parallel = vllm_config.parallel_config
    model = model_name(vllm_config)
    names = [profile] if profile else profile_names(vllm_config)
    if (worker := LENDABLE.pop(vllm_config.instance_id, None)) is not None:
        worker.service.close()  # It is called, not told.
        return open_local(worker.cache, model, names, rank_member(parallel, 0), worker.borrower)
    count = parallel.world_size
    endpoints = [rank_endpoint(vllm_config, rank) for rank in range(count)]
    members = [rank_member(parallel, rank) for rank in range(count)]
    return open_remote(endpoints, model, names, members, is_borrowing=is_borrowing(vllm_config))


def _keep_blocks(scheduler: Any, vllm_config: Any) -> int:
    """Blocks of the longest request that the engine takes, and the null block."""
    tokens: int = vllm_config.model_config.max_model_len + scheduler.num_lookahead_tokens
    groups = scheduler.kv_cache_config.kv_cache_groups
    return 1 + sum(-(-tokens // int(group.kv_cache_spec.block_size)) for group in groups)
