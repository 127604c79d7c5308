"""AquaConnector: vLLM's two connector halves, filled with the two halves of paging.

vLLM makes one connector in the scheduler's process and one in each worker; the two halves share a
class and nothing else. This module only translates: what it is asked, by vLLM's names, into calls
of `KvPagingScheduler` and `KvPagingWorker`, which know nothing of vLLM.

Page-outs run in `handle_preemptions`, which vLLM calls at the start of every step, before blocks
that were freed are written again. Synchronous page-ins run in `start_load_kv`, before the model.

Hybrid models keep several groups of blocks, whose numbers overlap. This connector does not declare
support for them, and vLLM then gives such models one group; the few that cannot live with one are
refused by vLLM itself at its start.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any, Final

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

from aqua_protocol import ConfigError, format_bytes
from aqualib.connection import connect
from aqualib.engines.vllm.engine_metrics import AquaPromMetrics, AquaStats, Meter
from aqualib.engines.vllm.kv_paging_scheduler import KvPagingScheduler
from aqualib.engines.vllm.kv_paging_worker import KvPagingWorker
from aqualib.engines.vllm.options import AquaOptions, model_name, options_of
from aqualib.engines.vllm.paging_plan import PagingPlan, WorkerReport
from aqualib.engines.vllm.rows import block_rows
from aqualib.settings import load_settings

logger: Final = logging.getLogger("aqualib")


class AquaPagingPlan(PagingPlan, KVConnectorMetadata):
    """The step's plan, as vLLM passes it on."""


class AquaWorkerReport(WorkerReport, KVConnectorWorkerMetadata):
    """A worker's report, as vLLM passes it back."""


class AquaConnector(KVConnectorBase_V1):
    """Translates vLLM's connector calls for one half of paging; vLLM makes it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.options: Final = options_of(vllm_config)
        self.paging_scheduler: Final = (
            open_paging_scheduler(self.options, vllm_config, kv_cache_config)
            if role is KVConnectorRole.SCHEDULER
            else None
        )
        # What cannot be loaded is computed again, whatever the command line says.
        self._kv_transfer_config.kv_load_failure_policy = "recompute"
        self.paging_worker: KvPagingWorker | None = None
        self._block_count = kv_cache_config.num_blocks
        self._capacity_blocks = _capacity_blocks(self.options, kv_cache_config)
        self._meter = Meter()
        self._model = model_name(vllm_config)

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
        block_ids = blocks.get_block_ids()[0] if num_external_tokens else ()
        self._scheduler_half.allocated(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> AquaPagingPlan:
        """The step's plan."""
        del scheduler_output
        plan = self._scheduler_half.take_plan()
        return AquaPagingPlan(*(getattr(plan, each.name) for each in fields(plan)))

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the workers found out."""
        paging = self._scheduler_half
        if connector_output.finished_recving:
            paging.loads_ended(connector_output.finished_recving)
        report = connector_output.kv_connector_worker_meta
        if report is not None:
            paging.note(report)

    def reset_cache(self) -> bool:
        """Forget everything that was paged out."""
        self._scheduler_half.reset()
        return True

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Tell `KvPagingScheduler.finished`; vLLM may free the blocks at once."""
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        self._scheduler_half.finished(request, block_ids, computed)
        return False, None

    @property
    def _scheduler_half(self) -> KvPagingScheduler:
        assert self.paging_scheduler is not None, "asked in a worker"
        return self.paging_scheduler

    # --- In a worker ----------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open this worker's store, once its KV cache is there.

        Raises:
            ConfigError: Settings are wrong, or the cache has a layout unknown here.
        """
        if not self.options.is_paging:
            return
        rows = block_rows(kv_caches.values(), self._block_count)
        block_bytes = sum(row.shape[1] for row in rows)
        nbytes = self._capacity_blocks * block_bytes
        device = rows[0].device
        settings = load_settings()
        room = _with_slack(nbytes, block_bytes, settings.slab_bytes)
        aqua = connect(
            device=str(device),
            model=self._model,
            host_bytes=settings.host_bytes or max(room, settings.wanted_bytes or 0),
            is_offline=self.options.is_offline,
            # Graphs are captured when the KV cache is there, and only on GPUs.
            leases_from_first_step=device.type == "cuda",
        )
        self.paging_worker = KvPagingWorker(rows, aqua, self._capacity_blocks)
        logger.info(
            "KV blocks of %s page into room for %d of them (%s)",
            format_bytes(block_bytes),
            self._capacity_blocks,
            format_bytes(nbytes),
        )

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Page out what this step may overwrite."""
        if self.paging_worker is not None:
            self.paging_worker.page_out(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Page in what this step reads, and begin what the next ones read."""
        del forward_context, kwargs
        if self.paging_worker is not None:
            self.paging_worker.page_in(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are done when `start_load_kv` returns, or beside the model."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are paged out whole, all layers at once."""

    def wait_for_save(self) -> None:
        """Do nothing: page-outs are done before the model runs."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Requests whose asynchronous loads have ended."""
        del finished_req_ids
        arrived = self.paging_worker.take_arrived() if self.paging_worker is not None else None
        return None, arrived or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks to compute again."""
        return self.paging_worker.take_failed_blocks() if self.paging_worker is not None else set()

    def build_connector_worker_meta(self) -> AquaWorkerReport | None:
        """Report what the scheduler's half should know, if anything is new."""
        report = self.paging_worker.take_report() if self.paging_worker is not None else None
        if report is None:
            return None
        return AquaWorkerReport(*(getattr(report, each.name) for each in fields(report)))

    # --- Figures --------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> AquaStats | None:
        """Read what this half has counted since the last call."""
        half = self.paging_scheduler or self.paging_worker
        return None if half is None else self._meter.read(half.totals())

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
        if self.paging_worker is not None:
            self.paging_worker.close()
            self.paging_worker = None


def open_paging_scheduler(
    options: AquaOptions, vllm_config: Any, kv_cache_config: Any
) -> KvPagingScheduler:
    """Make the scheduler's half for an engine.

    Raises:
        ConfigError: The engine keeps its KV in a way that is not supported.
    """
    groups = kv_cache_config.kv_cache_groups
    parallel = vllm_config.parallel_config
    shards = parallel.decode_context_parallel_size * parallel.prefill_context_parallel_size
    if options.is_paging and (len(groups) != 1 or shards != 1):
        raise ConfigError(
            f"{len(groups)} groups of KV blocks over {shards} context-parallel ranks cannot be "
            "paged",
            remedy="Add --disable-hybrid-kv-cache-manager, run without context parallelism, or "
            'set "mode": "recompute".',
        )
    cache = vllm_config.cache_config
    block_tokens = groups[0].kv_cache_spec.block_size
    hash_tokens = getattr(kv_cache_config, "hash_block_size", None) or block_tokens
    tier = options.prefix_tier
    return KvPagingScheduler(
        options,
        capacity_blocks=_capacity_blocks(options, kv_cache_config),
        block_bytes=_block_bytes(kv_cache_config) if options.is_paging else 0,
        block_tokens=block_tokens,
        hash_tokens=hash_tokens,
        is_sharing=bool(cache.enable_prefix_caching) if tier is None else tier,
    )


def _capacity_blocks(options: AquaOptions, kv_cache_config: Any) -> int:
    """Places in a worker's store: the same number in every process."""
    if not options.is_paging:
        return 0
    count = int(kv_cache_config.num_blocks)
    if options.store_bytes is None:
        return count
    block_bytes = _block_bytes(kv_cache_config)
    capacity = options.store_bytes // block_bytes
    if capacity < 1:
        raise ConfigError(
            f"store_bytes={options.store_bytes} does not hold one KV block of {block_bytes} bytes",
            remedy="Raise store_bytes, or leave it out: then it is as large as the KV cache.",
        )
    return int(capacity)


def _block_bytes(kv_cache_config: Any) -> int:
    """The size of one block, all layers, on one worker."""
    (group,) = kv_cache_config.kv_cache_groups
    spec = group.kv_cache_spec
    # Layers of different sizes come as one specification, which counts them all.
    layers = 1 if hasattr(spec, "kv_cache_specs") else len(group.layer_names)
    return int(spec.page_size_bytes) * layers


def _with_slack(nbytes: int, block_bytes: int, slab_bytes: int) -> int:
    """Host memory for so many bytes of blocks: a slab holds a whole number of them."""
    per_slab = max(1, slab_bytes // block_bytes)
    count = -(-nbytes // (per_slab * block_bytes))
    return (count + 1) * slab_bytes
