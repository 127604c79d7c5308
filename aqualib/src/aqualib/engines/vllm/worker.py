"""AquaWorker: vLLM's worker, which can stop a step between two layers.

A step that is aborted ends as an exception inside vLLM's model runner, which has prepared the
batch by then and sampled nothing. This worker catches it, collects what the connector has to
report, and answers with an output in which no request has got a token. What that means for
requests is the scheduler's business (`aborting_scheduler`): as a rule they stay in memory, and the
next step that they take part in tells the runner how far they are. Where steps overlap it preempts
all of them. The runner takes the latest token of a request from the step before there, by its place
in that; the step before is the aborted one now, which has none, so that note is dropped.

In most steps nothing is paged and nothing is to be told. Such a step runs as in an engine without a
connector: else vLLM asks it before each layer and after the step, which on a CPU is a fortieth of a
small model's step. vLLM's second runner disables connectors by the same means.

This is for vLLM's first model runner. The second keeps other notes and runs on GPUs alone, where
none of this was run: its steps run to their end (`abort_checks`).
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, kv_transfer_state
from vllm.platforms import current_platform
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from aqualib.engines.vllm.co_serving.safepoints import StepAbortedError
from aqualib.engines.vllm.connector import NOTHING_PLANNED, AquaConnector

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class AquaWorker(PlatformWorker):
    """vLLM's worker with steps that can be aborted; vLLM makes it from `--worker-cls`."""

    _aborted: ModelRunnerOutput | None = None

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step as vLLM does, or as far as it comes."""
        self._aborted = None
        if self._leaves_connector_alone(scheduler_output):
            connector = kv_transfer_state._KV_CONNECTOR_AGENT  # noqa: SLF001 - vLLM's runner 2 does
            kv_transfer_state._KV_CONNECTOR_AGENT = None  # noqa: SLF001
            try:
                return super().execute_model(scheduler_output)
            finally:
                kv_transfer_state._KV_CONNECTOR_AGENT = connector  # noqa: SLF001
        try:
            return super().execute_model(scheduler_output)
        except StepAbortedError:
            self._aborted = self._output_of_aborted(scheduler_output)
            return self._aborted

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample as vLLM does; of an aborted step, which is asked for if steps overlap, nothing."""
        if self._aborted is not None:
            aborted, self._aborted = self._aborted, None
            return aborted
        output = super().sample_tokens(grammar_output)
        if isinstance(output, ModelRunnerOutput):
            _drop_empty_report(output)
        return output

    def _leaves_connector_alone(self, scheduler_output: Any) -> bool:
        """Whether the connector has nothing to do in a step, and nothing to tell after it."""
        if scheduler_output.kv_connector_metadata is not NOTHING_PLANNED:
            return False  # Or there is none, or several.
        connector = get_kv_transfer_group()
        assert isinstance(connector, AquaConnector), connector
        return connector.is_at_rest and not self.use_v2_model_runner

    def _output_of_aborted(self, scheduler_output: Any) -> ModelRunnerOutput:
        """An output without a token, and with all that the connector reports."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, AquaConnector), connector
        connector.safepoints.is_unwinding = False
        batch = self.model_runner.input_batch
        batch.prev_sampled_token_ids = batch.prev_req_id_to_index = None
        sent, received = connector.get_finished(scheduler_output.finished_req_ids)
        reported = KVConnectorOutput(
            finished_sending=sent,
            finished_recving=received,
            kv_connector_stats=connector.get_kv_connector_stats(),
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=connector.build_connector_worker_meta(),
        )
        names = list(scheduler_output.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=[[] for _ in names],
            kv_connector_output=reported,
        )


def _drop_empty_report(output: ModelRunnerOutput) -> None:
    """Leave Aqua's report out if it says nothing, as in most steps; others' stay as they are."""
    reported = output.kv_connector_output
    # Without a report there may be no connector to ask for: an engine that only lends has none.
    if reported is None or not isinstance(get_kv_transfer_group(), AquaConnector):
        return
    if not (
        reported.finished_sending
        or reported.finished_recving
        or reported.invalid_block_ids
        or reported.kv_connector_stats
        or reported.kv_connector_worker_meta
    ):
        output.kv_connector_output = None
