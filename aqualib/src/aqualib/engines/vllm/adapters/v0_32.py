"""vLLM 0.32: as 0.31; preemption also ends auxiliary outputs."""

from aqualib.engines.vllm.adapters.base import Adapter

ADAPTER = Adapter(
    minor="0.32",
    run_limit="max_num_active_reqs",
    side_queue="kv_holding_waiting",
)
