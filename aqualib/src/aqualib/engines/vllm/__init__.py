r"""vLLM under Aqua: prompts share the GPU in time slices, and their KV pages into Aqua memory.

    python -m vllm.entrypoints.openai.api_server --model M \
      --scheduler-cls aqualib.engines.vllm.AquaScheduler \
      --kv-transfer-config '{"kv_connector": "AquaConnector", "kv_role": "kv_both"}'

Nothing of vLLM is patched. The scheduler decides *who* computes (policies of `aqua_schedulers.cfs`)
and tells the connector what a preempted request leaves behind; the connector decides *where* that
is kept and brings it back. Both halves talk in block ids of vLLM and in numbered places of ours:

    scheduler's process                                    each worker's process
    AquaScheduler ──> KvPagingScheduler ── PagingPlan ───> KvPagingWorker ──> BlockStore of aqualib
         │                 │  BlockTable:    one per step        │
     policy events         │  request, hash ─> place             │
                           └──── WorkerReport: places lost, ─────┘
                                 where paged blocks are

One room for each thing it does, from the roof to the ground; a room imports from below it:

    scheduling   who computes in a step: what `AquaScheduler` adds to vLLM's scheduler
    lending      blocks of the KV cache lent to others while the load is low
    operations   admin API, switches, metrics
    paging       blocks in Aqua memory, without vLLM
    co_serving   budgets of online and offline requests, aborts of steps
    requests     tenant, class and priority, as a request says them
    contract     which versions of vLLM have what all this uses

Whatever goes wrong on Aqua's side ends as "these blocks are not there", which vLLM answers by
computing them again. The names below are loaded when they are used, because importing vLLM is
slow and only an engine has it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from aqualib.engines.vllm.connector import AquaConnector
    from aqualib.engines.vllm.lending.scheduler import LendingScheduler
    from aqualib.engines.vllm.lending.worker import LendingWorker
    from aqualib.engines.vllm.operations.admin_api import AquaMiddleware
    from aqualib.engines.vllm.scheduler import AquaScheduler
    from aqualib.engines.vllm.worker import AquaWorker

__all__ = [
    "AquaConnector",
    "AquaMiddleware",
    "AquaScheduler",
    "AquaWorker",
    "LendingScheduler",
    "LendingWorker",
]

_HOMES: Final = {
    "AquaConnector": "aqualib.engines.vllm.connector",
    "AquaMiddleware": "aqualib.engines.vllm.operations.admin_api",
    "AquaScheduler": "aqualib.engines.vllm.scheduler",
    "AquaWorker": "aqualib.engines.vllm.worker",
    "LendingScheduler": "aqualib.engines.vllm.lending.scheduler",
    "LendingWorker": "aqualib.engines.vllm.lending.worker",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
