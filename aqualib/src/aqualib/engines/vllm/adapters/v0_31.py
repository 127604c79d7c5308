"""vLLM 0.31: running requests and runner slots are bounded apart; only block holders wait apart."""

from aqualib.engines.vllm.adapters.base import Adapter

ADAPTER = Adapter(
    minor="0.31",
    run_limit="max_num_active_reqs",
    side_queue="kv_holding_waiting",
)
