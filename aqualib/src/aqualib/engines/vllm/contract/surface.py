"""What Aqua uses of vLLM's insides, by class: the one list that every check of a version reads.

An engine's start looks for the names on the living objects (`versions`); the contract looks for
them in the sources of a version, without importing it, and remembers how the functions among them
were written (`contract`). `a|b` means that one of them is enough: vLLM renamed it, and `versions`
takes what is there.
"""

from __future__ import annotations

from typing import Final

CONNECTOR_PLACE: Final = "vllm.distributed.kv_transfer.kv_connector"

SCHEDULER: Final = (
    *("cache_config", "connector", "kv_cache_config", "kv_cache_manager", "requests", "running"),
    *("max_num_active_reqs|max_num_running_reqs", "max_num_scheduled_tokens", "waiting"),
    *("kv_holding_waiting|skipped_waiting", "_inflight_prefills", "_pause_state", "pause_state"),
    *("failed_recving_kv_req_ids", "finished_recving_kv_req_ids", "recompute_kv_load_failures"),
    *("requires_kv_delivery", "scheduler_config", "vllm_config", "_free_request"),
    *("_preempt_request", "add_request", "get_num_unfinished_requests", "reset_prefix_cache"),
    *("max_model_len", "schedule", "update_from_output", "_request_remaining_blocks"),
    # The one place in both of vLLM's loops that asks how many tokens a request takes in a step.
    *("_mamba_block_aligned_split", "need_mamba_block_aligned_split", "policy"),
)
BLOCK_POOL: Final = ("blocks", "evict_blocks", "free_blocks", "get_num_free_blocks", "touch")

USED: Final = {
    "Scheduler": SCHEDULER,
    "KVCacheManager": ("block_pool", "coordinator", "free", "get_block_ids"),
    "BlockPool": BLOCK_POOL,
}
"""Attributes of vLLM's classes that fair scheduling and paging use."""

USED_TO_LEND: Final = {
    "Scheduler": (
        *("finish_requests", "get_request_counts", "kv_cache_config", "num_lookahead_tokens"),
        "shutdown",
    ),
    "BlockPool": (*BLOCK_POOL, "num_gpu_blocks"),
    "KVCacheBlock": ("block_id", "is_null", "ref_cnt"),
}
"""Attributes that lending uses."""

SURFACE: Final[dict[str, tuple[str, ...]]] = {
    "vllm.v1.core.sched.scheduler:Scheduler": (*SCHEDULER, *USED_TO_LEND["Scheduler"]),
    # Under asynchronous scheduling ours stand before these.
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler": (
        "_update_after_schedule",
        "_update_request_with_output",
    ),
    # What `PolicyRequestQueue` stands in for.
    "vllm.v1.core.sched.request_queue:RequestQueue": (
        *("add_request", "peek_request", "pop_request", "prepend_request", "prepend_requests"),
        *("remove_request", "remove_requests"),
    ),
    "vllm.v1.core.sched.interface:PauseState": ("PAUSED_ALL", "PAUSED_NEW", "UNPAUSED"),
    "vllm.v1.core.sched.output:SchedulerOutput": (
        *("finished_req_ids", "num_scheduled_tokens", "total_num_scheduled_tokens"),
        "scheduled_spec_decode_tokens",
    ),
    # Wrapped, to hear of requests while a step runs, by a scheduler that is its attribute.
    "vllm.v1.engine.core:EngineCore": ("preprocess_add_request", "scheduler"),
    # Says whether a step asks for its layers.
    "vllm.forward_context:ForwardContext": ("attn_metadata", "cudagraph_runtime_mode"),
    "vllm.v1.engine:EngineCoreRequest": (
        *("priority", "prompt_token_ids", "request_id", "sampling_params"),
    ),
    # What the worker makes of a step that was aborted.
    "vllm.v1.outputs:ModelRunnerOutput": (
        *("kv_connector_output", "req_id_to_index", "req_ids", "sampled_token_ids"),
    ),
    "vllm.v1.outputs:KVConnectorOutput": (
        *("finished_recving", "finished_sending", "invalid_block_ids", "kv_connector_stats"),
        "kv_connector_worker_meta",
    ),
    "vllm.v1.worker.gpu_input_batch:InputBatch": ("prev_req_id_to_index", "prev_sampled_token_ids"),
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": ("execute_model", "input_batch"),
    # Asks the connector for its report on the way out of a step that was aborted, too.
    "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin": (
        "_get_kv_connector_output",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager": USED["KVCacheManager"],
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": ("get_block_ids",),
    "vllm.v1.core.block_pool:BlockPool": USED_TO_LEND["BlockPool"],
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": ("single_type_managers",),
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": (
        *("block_size", "get_num_skipped_tokens", "req_to_blocks"),
    ),
    "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager": ("get_num_skipped_tokens",),
    "vllm.v1.core.single_type_kv_cache_manager:ChunkedLocalAttentionManager": (
        "get_num_skipped_tokens",
    ),
    "vllm.distributed.kv_events:BlockRemoved": ("block_hashes", "medium"),
    "vllm.distributed.kv_events:BlockStored": (
        *("block_hashes", "block_size", "lora_id", "medium", "parent_block_hash", "token_ids"),
    ),
    "vllm.sampling_params:SamplingParams": ("max_tokens",),
    "vllm.utils.hashing:get_hash_fn_by_name": (),
    "vllm.utils.import_utils:resolve_obj_by_qualname": (),
    "vllm.distributed.kv_transfer.kv_transfer_state:get_kv_transfer_group": (),
    # Finds none in steps that leave the connector alone.
    "vllm.distributed.kv_transfer.kv_transfer_state:has_kv_transfer_group": (),
    "vllm.v1.core.kv_cache_utils:get_request_block_hasher": (),
    "vllm.v1.core.kv_cache_utils:maybe_convert_block_hash": (),
    "vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes": (),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": USED_TO_LEND["KVCacheBlock"],
    "vllm.v1.kv_cache_interface:KVCacheConfig": (
        *("kv_cache_groups", "kv_cache_tensors", "needs_kv_cache_zeroing", "num_blocks"),
    ),
    "vllm.v1.kv_cache_interface:KVCacheTensor": ("size",),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": ("kv_cache_spec",),
    "vllm.v1.kv_cache_interface:KVCacheSpec": ("block_size",),
    "vllm.v1.kv_cache_interface:FullAttentionSpec": (),
    "vllm.v1.kv_cache_interface:MLAAttentionSpec": (),
    "vllm.v1.kv_cache_interface:SlidingWindowSpec": ("sliding_window",),
    "vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec": ("attention_chunk_size",),
    "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs": ("kv_cache_specs",),
    "vllm.config.scheduler:SchedulerConfig": ("async_scheduling", "get_scheduler_cls"),
    "vllm.v1.request:Request": (
        *(
            "__init__",
            "arrival_time",
            "block_hashes",
            "is_finished",
            "num_computed_tokens",
            "num_output_tokens",
        ),
        *("num_prompt_tokens", "num_tokens", "priority", "request_id", "skip_reading_prefix_cache"),
        *("max_tokens", "num_output_placeholders", "sampling_params", "status"),
    ),
    "vllm.v1.core.sched.request_queue:SchedulingPolicy": ("FCFS",),
    "vllm.v1.request:RequestStatus": (
        *("FINISHED_ABORTED", "PREEMPTED", "RUNNING", "WAITING", "WAITING_FOR_REMOTE_KVS"),
        "WAITING_FOR_STREAMING_REQ",
    ),
    f"{CONNECTOR_PLACE}.v1.base:KVConnectorBase_V1": (
        *("__init__", "_get_connector_metadata", "_kv_transfer_config", "build_connector_meta"),
        *("build_connector_worker_meta", "build_kv_connector_stats", "build_prom_metrics"),
        *("get_block_ids_with_load_errors", "get_finished", "get_kv_connector_stats"),
        *("get_num_new_matched_tokens", "get_required_kvcache_layout", "handle_preemptions"),
        *("has_pending_push_work", "register_kv_caches", "request_finished"),
        *("requires_kv_delivery", "reset_cache", "save_kv_layer", "shutdown", "start_load_kv"),
        *("update_connector_output", "update_state_after_alloc", "wait_for_layer_load"),
        *("has_connector_metadata", "take_events", "wait_for_save"),
    ),
    f"{CONNECTOR_PLACE}.v1.base:SupportsHMA": ("request_finished_all_groups",),
    f"{CONNECTOR_PLACE}.v1.base:KVConnectorMetadata": (),
    f"{CONNECTOR_PLACE}.v1.base:KVConnectorWorkerMetadata": ("aggregate",),
    f"{CONNECTOR_PLACE}.v1.base:KVConnectorRole": ("SCHEDULER", "WORKER"),
    f"{CONNECTOR_PLACE}.v1.metrics:KVConnectorStats": ("aggregate", "is_empty", "reduce", "reset"),
    f"{CONNECTOR_PLACE}.v1.metrics:KVConnectorPromMetrics": ("observe",),
    f"{CONNECTOR_PLACE}.v1.multi_connector:MultiConnector": ("_connectors",),
    f"{CONNECTOR_PLACE}.factory:KVConnectorFactory": ("register_connector",),
    "vllm.v1.metrics.utils:create_metric_per_engine": (),
    "vllm.v1.worker.gpu_worker:Worker": (
        *("execute_model", "initialize_from_config", "sample_tokens", "shutdown"),
        "use_v2_model_runner",
    ),
    "vllm.v1.worker.cpu_worker:CPUWorker": ("initialize_from_config",),
}
"""By `module:class` or `module:function`: the attributes of it that are used or overridden."""

IMPLEMENTED: Final = {
    f"{CONNECTOR_PLACE}.v1.base:SupportsHMA": "connector:AquaConnector",
    f"{CONNECTOR_PLACE}.v1.base:KVConnectorBase_V1": "connector:AquaConnector",
    f"{CONNECTOR_PLACE}.v1.base:KVConnectorWorkerMetadata": "paging.plan:WorkerReport",
    "vllm.v1.core.sched.request_queue:RequestQueue": "requests.queue:PolicyRequestQueue",
}
"""Interfaces of vLLM that classes of ours implement: an abstract method that is new is missing."""
