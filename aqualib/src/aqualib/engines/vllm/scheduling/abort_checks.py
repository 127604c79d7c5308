"""Whether an engine can abort a step of offline work, asked when it starts; if not, why.

An abort needs code of ours at each safepoint, all ranks on one machine in the same layers, and a
thread that takes requests in while a step runs. An engine without one of these serves by budgets
alone, and says which it lacks.
"""

from __future__ import annotations

import logging
import multiprocessing
from typing import Any, Final

from aqua_protocol import ConfigError
from aqua_schedulers.conserve import CoServingPolicyName
from aqualib.engines.vllm.options import AquaOptions
from aqualib.engines.vllm.plugin import CONNECTOR

logger: Final = logging.getLogger("aqualib")


def abortable_layers(vllm_config: Any, options: AquaOptions) -> int | None:
    """Layers of the model on each rank; None if steps of this engine cannot be aborted, said once.

    Raises:
        ConfigError: They cannot, and the options insist.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from aqualib.engines.vllm.worker import AquaWorker

    given = options.co_serving
    assert given is not None
    worker = resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)
    reason = why_not_abortable(vllm_config, options, worker_aborts=issubclass(worker, AquaWorker))
    if reason is None:
        logger.info(
            "co-serving: an online request that arrives aborts the step of offline work that runs; "
            "such a step does not overlap with the next"
        )
        model = vllm_config.model_config
        return int(model.get_num_layers(vllm_config.parallel_config))
    if given.layer_aborts:
        raise ConfigError(
            f"steps of this engine cannot be aborted: {reason}",
            remedy='Mend that, or drop "layer_aborts": budgets alone serve then.',
        )
    logger.warning(
        "co-serving: steps cannot be aborted inside (%s), so budgets alone keep offline work from "
        "online requests; an arrival waits for the step that runs",
        reason,
    )
    return None


def why_not_abortable(vllm_config: Any, options: AquaOptions, *, worker_aborts: bool) -> str | None:
    """Why steps of this engine cannot be aborted; None if they can.

    Args:
        vllm_config: The engine's.
        options: With `co_serving`.
        worker_aborts: Whether its worker is an `AquaWorker`.
    """
    given = options.co_serving
    assert given is not None
    parallel, transfer = vllm_config.parallel_config, vllm_config.kv_transfer_config
    graphs = vllm_config.compilation_config.cudagraph_mode
    ranks = parallel.data_parallel_size
    reasons = {
        "layer_aborts is false": given.layer_aborts is False,
        "the policy `priority` aborts nothing": given.policy is CoServingPolicyName.PRIORITY,
        f"there is no {CONNECTOR}, or others beside it": (
            transfer is None or transfer.kv_connector != CONNECTOR
        ),
        "--worker-cls aqualib.engines.vllm.AquaWorker is missing": not worker_aborts,
        "the engine runs in its caller's process, which adds requests between steps": (
            runs_in_callers_process()
        ),
        "model runner V2 is not tried; VLLM_USE_V2_MODEL_RUNNER=0 takes the other": (
            vllm_config.use_v2_model_runner
        ),
        "ranks of a pipeline are in different layers": parallel.pipeline_parallel_size > 1,
        "its ranks are not all processes of one machine": (
            parallel.nnodes > 1 or parallel.distributed_executor_backend not in {"mp", "uni"}
        ),
        "experts are shared by data-parallel engines, which step together": (
            ranks > 1 and vllm_config.model_config.is_moe
        ),
        "experts are moved between ranks (--enable-eplb)": parallel.enable_eplb,
        "layers of two half batches run at once (--enable-dbo)": parallel.use_ubatching,
        "full CUDA graphs of all batches have no safepoints": (
            graphs is not None and graphs.mixed_mode().name == "FULL"
        ),
        "pooling is not tried": vllm_config.model_config.runner_type == "pooling",
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def runs_in_callers_process() -> bool:
    """Whether nothing takes requests in while this process computes: it is no engine's own."""
    return multiprocessing.parent_process() is None
