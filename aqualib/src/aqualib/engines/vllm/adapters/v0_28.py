"""vLLM 0.28: whatever a scheduling pass skips waits in `skipped_waiting`."""

from aqualib.engines.vllm.adapters.base import Adapter

ADAPTER = Adapter(
    minor="0.28",
    run_limit="max_num_running_reqs",
    side_queue="skipped_waiting",
)
