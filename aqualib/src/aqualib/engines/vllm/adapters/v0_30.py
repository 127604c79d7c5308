"""vLLM 0.30: as 0.28; a connector is given the whole cache manager."""

from aqualib.engines.vllm.adapters.base import Adapter

ADAPTER = Adapter(
    minor="0.30",
    run_limit="max_num_running_reqs",
    side_queue="skipped_waiting",
)
