"""AquaConnector: vLLM's two connector halves, filled with the two halves of paging.

vLLM makes one connector in the scheduler's process and one in each worker; the two halves share a
class and nothing else. This module only translates: what it is asked, by vLLM's names, into calls
of `KvPagingScheduler` and `KvPagingWorker`, which know nothing of vLLM.

Before each layer vLLM asks for what that layer reads: that is a safepoint (`safepoints`), and where
a load within the step is waited for, layer by layer. A full CUDA graph asks for nothing when it is
replayed, so what such a step reads is there before it begins.

Page-outs run, or begin, in `handle_preemptions`, which vLLM calls at the start of every step,
before blocks that were freed are written again. Synchronous page-ins begin in `start_load_kv`,
before the model, and have ended when vLLM asks what has failed, after it.

Models whose layers keep different things have several groups of blocks (`kv_groups`), which vLLM
gives them because this connector says that it can page them (`SupportsHMA`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, resolve_kv_cache_block_sizes
from vllm.v1.request import Request

from aqua_protocol import format_bytes
from aqualib.connection import connect
from aqualib.engines.vllm.co_serving.safepoints import Safepoints
from aqualib.engines.vllm.co_serving.scheduler import CoServing
from aqualib.engines.vllm.contract.versions import child_connectors
from aqualib.engines.vllm.coordinator_start import look_for_coordinator
from aqualib.engines.vllm.operations.metrics import AquaPromMetrics, AquaStats, Meter
from aqualib.engines.vllm.operations.switches import Switches
from aqualib.engines.vllm.options import SEVERAL, AquaOptions, model_name, options_of, rank_member
from aqualib.engines.vllm.paging.engine_checks import load_mode, require_attention, require_pageable
from aqualib.engines.vllm.paging.kv_groups import kv_groups
from aqualib.engines.vllm.paging.pins import PinRequest, Prefix, PrefixPinTable
from aqualib.engines.vllm.paging.plan import PagingPlan, WorkerReport
from aqualib.engines.vllm.paging.rows import by_layers
from aqualib.engines.vllm.paging.scheduler import KvPagingScheduler
from aqualib.engines.vllm.paging.store_size import store_size
from aqualib.engines.vllm.paging.tier_events import TierEvents, as_vllm_events
from aqualib.engines.vllm.paging.worker import KvPagingWorker
from aqualib.settings import load_settings

logger: Final = logging.getLogger("aqualib")


class AquaPagingPlan(PagingPlan, KVConnectorMetadata):
    """The step's plan, as vLLM passes it on."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle the plan of most steps as its name."""
        return "NOTHING_PLANNED" if self is NOTHING_PLANNED else super().__reduce__()


NOTHING_PLANNED: Final = AquaPagingPlan()
"""The plan of a step in which workers have nothing to do, the same one in each process."""


class AquaWorkerReport(WorkerReport, KVConnectorWorkerMetadata):
    """A worker's report, as vLLM passes it back."""


class AquaConnector(KVConnectorBase_V1, SupportsHMA):
    """Translates vLLM's connector calls for one half of paging; vLLM makes it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.options: Final = options_of(vllm_config)
        if self.options.is_paging:
            require_pageable(vllm_config, kv_cache_config)
            self._loses_all = kv_groups(kv_cache_config).loses_all
        self.paging_scheduler: Final = (
            open_paging_scheduler(self.options, vllm_config, kv_cache_config)
            if role is KVConnectorRole.SCHEDULER
            else None
        )
        # What cannot be loaded is computed again, whatever the command line says.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self.paging_worker: KvPagingWorker | None = None
        # A worker's, once its cache is there.
        self._safepoints: Safepoints | None = None
        self._has_layer_work = False
        self._block_count = kv_cache_config.num_blocks
        self._parallel = vllm_config.parallel_config
        self._meter = Meter()
        # Its scheduler's, to be seen on `/metrics`.
        self.switches = Switches()
        self.co_serving: CoServing | None = None
        self._model = model_name(vllm_config)
        half, events = self.paging_scheduler, vllm_config.kv_events_config
        self._tier_events: TierEvents | None = None
        if half is not None and half.has_tier and events and events.enable_kv_cache_events:
            self._tier_events = TierEvents(half.table)
        self.pins: PrefixPinTable | None = None
        if half is not None and half.has_tier:
            read_prefix = prefix_reader(half, vllm_config, kv_cache_config)
            self.pins = PrefixPinTable(half.table, self.options.pinned_share, read_prefix)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """None: any layout will do. vLLM asks before it lays the cache out.

        Raises:
            ConfigError: The model has layers that cannot be paged.
        """
        require_attention(vllm_config)
        return None

    # --- In the scheduler's process -------------------------------------------------------

    @property
    def requires_kv_delivery(self) -> bool:
        """False: what is not paged is computed again, so preemption may keep in-flight output."""
        return False

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Answer as `KvPagingScheduler.matched` does."""
        return self._scheduler_half.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Pass it on to `KvPagingScheduler.allocated`."""
        block_ids = blocks.get_block_ids() if num_external_tokens else ()
        self._scheduler_half.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> AquaPagingPlan:
        """The step's plan."""
        self.switches.has_changed = False
        if self.pins is not None:
            self.pins.expire()
        plan = self._scheduler_half.take_plan()
        if self.co_serving is not None:
            order = self.co_serving.safepoints_of(scheduler_output.num_scheduled_tokens)
            if order is not None:
                plan = plan or AquaPagingPlan()
                plan.safepoints = order
        assert plan is None or isinstance(plan, AquaPagingPlan), type(plan)
        return plan or NOTHING_PLANNED

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the workers found out."""
        paging = self._scheduler_half
        report = connector_output.kv_connector_worker_meta
        if report is not None:
            paging.note(report)
            if report.has_page is not None:
                assert self.co_serving is not None
                assert self.co_serving.aborts is not None
                self.co_serving.aborts.page_opened(by_all=report.has_page)
        if connector_output.finished_recving:
            paging.loads_ended(connector_output.finished_recving)

    def take_events(self) -> Iterable[Any]:
        """Tell what has come into the prefix tier and left it, if vLLM publishes events."""
        if self._tier_events is None:
            return ()
        return as_vllm_events(*self._tier_events.take())

    def reset_cache(self) -> bool:
        """Forget everything that was paged out."""
        self._scheduler_half.reset()
        return True

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Do as `request_finished_all_groups`, for an engine that has one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Tell `KvPagingScheduler.finished`; vLLM may free the blocks at once."""
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        self._scheduler_half.finished(request, block_ids, computed)
        return False, None

    def has_pending_block_frees(self) -> bool:
        """Whether blocks come free without another preemption."""
        return self._scheduler_half.freeing_blocks > 0

    def has_pending_push_work(self) -> bool:
        """Whether steps are needed to hear of what is under way, though no request is to run."""
        half = self._scheduler_half
        return half.is_saving or bool(half.loading_ids()) or self.switches.has_changed

    @property
    def _scheduler_half(self) -> KvPagingScheduler:
        assert self.paging_scheduler is not None, "asked in a worker"
        return self.paging_scheduler

    # --- In a worker ----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open this worker's store, once its KV cache is there.

        Raises:
            ConfigError: Settings are wrong, or the cache has a layout unknown here, or there is no
                room for a block.
        """
        # The tensors of a layer, where it keeps several, are on one device.
        first: Any = next(iter(kv_caches.values()))
        device = first.device if isinstance(first, torch.Tensor) else first[0].device
        self._safepoints = Safepoints(self._parallel.rank, self._parallel.world_size, device)
        if not self.options.is_paging:
            return
        rows, layer_ends = by_layers(kv_caches, self._block_count)
        block_bytes = sum(row.shape[1] for row in rows)
        parallel = self._parallel
        size = store_size(
            self.options.store_bytes,
            block_bytes=block_bytes,
            block_count=self._block_count,
            worker_count=parallel.local_world_size * max(1, parallel.data_parallel_size_local),
            settings=load_settings(),
        )
        if size.warning and not parallel.rank:  # It is the same for all of them.
            logger.warning("%s", size.warning)
        if not self.options.is_offline:
            look_for_coordinator(load_settings(), is_required=self.options.require_coordinator)
        aqua = connect(
            rank_member(parallel, parallel.rank),
            device=str(rows[0].device),
            model=self._model,
            host_bytes=size.host_bytes,
            is_offline=self.options.is_offline,
            # Graphs are captured when the KV cache is there, and only on GPUs.
            leases_from_first_step=rows[0].is_cuda,
        )
        self.paging_worker = KvPagingWorker(rows, aqua, size.capacity_blocks, layer_ends)
        logger.info(
            "KV blocks of %s page into room for %d of them (%s)",
            format_bytes(block_bytes),
            size.capacity_blocks,
            format_bytes(size.capacity_blocks * block_bytes),
        )

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """A step begins: page out what it may overwrite."""
        if self._safepoints is not None:
            self._safepoints.begin(kv_connector_metadata.safepoints)
            self._has_layer_work = self._safepoints.has_order
        if self.paging_worker is not None:
            self.paging_worker.page_out(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Page in what this step reads, and begin what the next ones read."""
        del kwargs
        if self.paging_worker is not None:
            plan = self._get_connector_metadata()
            is_layer_wise = bool(plan.in_places) and asks_for_layers(forward_context)
            self.paging_worker.page_in(plan, is_layer_wise=is_layer_wise)
            self._has_layer_work |= self.paging_worker.is_loading_layers

    def has_connector_metadata(self) -> bool:
        """Whether layers have anything to ask in this step: vLLM has them ask only then."""
        return self._has_layer_work

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Abort the step here if that is wanted; else wait for what the layer reads.

        Raises:
            StepAbortedError: It is aborted.
        """
        if self._safepoints is not None:
            self._safepoints.passed()
        if self.paging_worker is not None:
            self.paging_worker.await_layer(layer_name)

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are paged out whole, all layers at once."""

    def wait_for_save(self) -> None:
        """Do nothing: page-outs are done before the model runs."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose asynchronous loads have ended."""
        del finished_req_ids
        paging = self._reporting
        arrived = None if paging is None else paging.take_arrived()
        return None, arrived or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute again; none where requests begin again instead."""
        paging = self._reporting
        if paging is None:
            return set()
        failed = paging.take_failed_blocks()
        return set() if self._loses_all else failed

    def build_connector_worker_meta(self) -> AquaWorkerReport | None:
        """Report what the scheduler's half should know, if anything is new."""
        report = None if self._reporting is None else self._reporting.take_report()
        if self._safepoints is not None:
            aborted, has_page = self._safepoints.take_aborted(), self._safepoints.take_page()
            if aborted or has_page is not None:
                report = report or WorkerReport()
                report.aborted.update([aborted] if aborted else [])
                report.has_page = has_page
        if report is None:
            return None
        return AquaWorkerReport(*(getattr(report, each.name) for each in fields(report)))

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is under way in this worker, and nothing is to be told."""
        return (self._safepoints is None or self._safepoints.is_at_rest) and (
            self.paging_worker is None or self.paging_worker.is_at_rest
        )

    @property
    def safepoints(self) -> Safepoints:
        """This worker's."""
        assert self._safepoints is not None, "asked before the KV cache was there"
        return self._safepoints

    @property
    def _reporting(self) -> KvPagingWorker | None:
        """What has something to report; None while a step unwinds, whose output is lost."""
        is_unwinding = self._safepoints is not None and self._safepoints.is_unwinding
        return None if is_unwinding else self.paging_worker

    # --- Figures --------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> AquaStats | None:
        """Read what this half has counted since the last call."""
        half = self.paging_scheduler
        if half is None:
            counted = None if self._reporting is None else self._reporting.take_totals()
            return None if counted is None else self._meter.read(counted)
        if self.co_serving is not None and self.co_serving.is_told:
            return None  # Nothing has happened that would be counted.
        co_serving = {} if self.co_serving is None else self.co_serving.totals()
        pins = {} if self.pins is None else self.pins.levels()
        return self._meter.read({**half.totals(), **self.switches.levels(), **pins, **co_serving})

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> AquaStats:
        """The figures of another process."""
        return AquaStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> AquaPromMetrics:
        """The counters on the engine's `/metrics`."""
        return AquaPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- The end --------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Drop every block and leave."""
        if self._safepoints is not None:
            self._safepoints.close()
        if self.paging_worker is not None:
            self.paging_worker.close()
            self.paging_worker = None


def open_paging_scheduler(
    options: AquaOptions, vllm_config: Any, kv_cache_config: Any
) -> KvPagingScheduler:
    """Make the scheduler's half for an engine that can be paged, or will not be."""
    groups = kv_groups(kv_cache_config)
    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    tier = options.prefix_tier
    cache = vllm_config.cache_config
    return KvPagingScheduler(
        options.model_copy(update={"load": load_mode(options, vllm_config, groups)}),
        groups=groups,
        hash_tokens=hash_tokens,
        is_sharing=bool(cache.enable_prefix_caching) if tier is None else tier,
        plan_type=AquaPagingPlan,
    )


def asks_for_layers(forward_context: Any) -> bool:
    """Whether the step that begins calls `wait_for_layer_load` before each layer's attention.

    A full graph is replayed without, and the second model runner does not say here which it takes.
    """
    mode = forward_context.cudagraph_runtime_mode
    return forward_context.attn_metadata is not None and mode.name != "FULL"


def prefix_reader(
    paging: KvPagingScheduler, vllm_config: Any, kv_cache_config: Any
) -> Callable[[PinRequest], Prefix]:
    """Make what finds the blocks of a prefix, by hashes like those of requests."""
    _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    hash_name = vllm_config.cache_config.prefix_caching_hash_algo
    hasher = get_request_block_hasher(hash_tokens, get_hash_fn_by_name(hash_name))

    def read(pin: PinRequest) -> Prefix:
        request = Request(
            request_id=pin.id,
            prompt_token_ids=pin.prompt_token_ids,
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=pin.cache_salt,
            block_hasher=hasher,
        )
        return Prefix(*paging.keys.prefix(request))

    return read


def find_connector(connector: Any) -> AquaConnector | None:
    """Our connector, if it is what the engine uses, or among what a `MultiConnector` does."""
    if isinstance(connector, AquaConnector):
        return connector
    if type(connector).__name__ != SEVERAL:
        return None
    children = [each for each in child_connectors(connector) if isinstance(each, AquaConnector)]
    return children[0] if children else None
