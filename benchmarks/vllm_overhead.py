"""What the fair scheduler costs a step: `schedule()` at 256 running requests, beside vLLM's own.

Two schedulers in one process, vLLM's and Aqua's, serve the same requests in lockstep without a
model: after each `schedule()` every request that is due gets a token. They take turns at going
first, so that both meet the same machine, and every step counts: the mean has the slices' ends in
it, the median has not.

    calm        256 requests run and nobody waits: nothing is to be decided
    contended   memory for about 256, and requests come twice as fast as they end: slices end,
                requests are put out and paged. What runs differs between the two then, and so does
                what vLLM's own part has to do.
    co-serving  two online requests decode, nothing happens, and none or eight offline requests are
                parked beside them; vLLM's own has the two alone.

Neither pays for copies here: those are the model runner's, and `vllm_burst.py` has them. Page-outs
and loads beside the model are answered after the step that begins them. What a step costs is
`schedule()` and `update_from_output()`, which hears the answers; `schedule()` is also given alone.
Times are seconds of CPU of the thread that schedules, so that other processes lengthen them little.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from _burst_engine import write_model
from _burst_race import HINT, note
from aqua_schedulers.cfs import PagingTier

RUNNING: Final = 256
BLOCK_TOKENS: Final = 32
MODEL_TOKENS: Final = 1024
PROMPT_TOKENS: Final = 32
OUTPUT_TOKENS: Final = 192
CONTENDED_BLOCKS: Final = RUNNING * (PROMPT_TOKENS + OUTPUT_TOKENS // 2) // BLOCK_TOKENS
ARRIVALS_PER_STEP: Final = 2 * RUNNING / OUTPUT_TOKENS
CALM_BLOCKS: Final = RUNNING * MODEL_TOKENS // BLOCK_TOKENS
WARM_STEPS: Final = 20
DECODING: Final = 2
PARKED: Final = 8
CO_SERVING: Final = {"mode": "checkpoint", "co_serving": {"ttft_s": 1.0, "tpot_s": 0.1}}
"""Without a step-time profile: then offline requests have no token beside answers."""
MAX_OVERHEAD: Final = 0.10


def main(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    steps: Annotated[int, typer.Option(help="Steps of each scheduler.", min=100, max=900)] = 600,
) -> None:
    """Measure the scheduler's overhead."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    found: dict[str, Any] = {"running": RUNNING, "steps": steps}
    with tempfile.TemporaryDirectory(prefix="aqua-overhead-") as folder:
        write_model(Path(folder), layers=1, hidden=64)
        bench = Schedulers(folder)
        note("calm")
        found |= compare(*bench.lockstep("first-token", CALM_BLOCKS, steps, arrivals_per_step=0.0))
        for policy in ("cfs", "first-token"):
            note(f"contended, {policy}")
            times = bench.lockstep(
                policy, CONTENDED_BLOCKS, steps, arrivals_per_step=ARRIVALS_PER_STEP
            )
            found[f"contended_{policy}"] = compare(*times)
        note("co-serving")
        found["co_serving"] = bench.co_serving(steps)
    if as_json:
        print(json.dumps(found))
        return
    show("calm", found, f" (bar {MAX_OVERHEAD:+.0%})")
    for policy in ("cfs", "first-token"):
        show(f"contended, {policy}", found[f"contended_{policy}"], "")
    beside = found["co_serving"]
    print(
        f"co-serving, {DECODING} decode: stock {beside['stock_step_us']:.0f} us a step with"
        f" update_from_output, Aqua {beside['aqua_step_us']:.0f} us, and"
        f" {beside['aqua_parked_step_us']:.0f} us with {PARKED} parked (medians)"
    )


class Schedulers:
    """Makes schedulers of an engine's configuration.

    Args:
        model: Folder of a model, of which only the shape of the KV cache matters.
    """

    def __init__(self, model: str) -> None:
        try:
            from vllm import LLM
        except ImportError:
            sys.exit(f"no vLLM here; {HINT}, run this with its Python")
        llm = LLM(
            model=model,
            skip_tokenizer_init=True,
            max_model_len=MODEL_TOKENS,
            num_gpu_blocks_override=CALM_BLOCKS,
            block_size=BLOCK_TOKENS,
            max_num_batched_tokens=2048,
            max_num_seqs=2 * RUNNING,
            gpu_memory_utilization=0.1,
            dtype="float32",
            enforce_eager=True,
            disable_log_stats=True,
            scheduler_cls="aqualib.engines.vllm.AquaScheduler",
            kv_transfer_config={
                "kv_connector": "AquaConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"is_offline": True},
            },
        )
        self._core = llm.llm_engine.engine_core.engine_core

    def lockstep(
        self, policy: str, blocks: int, steps: int, *, arrivals_per_step: float
    ) -> tuple[list[float], list[float], dict[str, float]]:
        """Microseconds of each step of vLLM's scheduler and of Aqua's, and what was going on."""
        stock, ours = self._new(None, blocks), self._new({"policy": policy}, blocks)
        pair = {"stock": stock, "ours": ours}
        for scheduler in pair.values():
            _report_store(scheduler, blocks)
        took_us: dict[str, list[float]] = {name: [] for name in pair}
        all_us: dict[str, list[float]] = {name: [] for name in pair}
        running: dict[str, list[int]] = {name: [] for name in pair}
        count = 0
        gc.collect()
        # A collection would fall upon one of the two.
        gc.disable()
        for step in range(steps):
            while count < RUNNING + step * arrivals_per_step:
                # Those at the start are as far as in a steady state.
                share = (1 + count) / RUNNING if arrivals_per_step and count < RUNNING else 1.0
                output = OUTPUT_TOKENS if arrivals_per_step else steps + 1
                for scheduler in pair.values():
                    scheduler.add_request(self._request(count, max(2, round(share * output))))
                count += 1
            order = list(pair) if step % 2 else list(pair)[::-1]
            for name in order:
                scheduler = pair[name]
                started_s = time.thread_time()
                output_of_step = scheduler.schedule()
                took_s = time.thread_time() - started_s
                running[name].append(len(scheduler.running))
                took_us[name].append(1e6 * took_s)
                all_us[name].append(1e6 * (took_s + _compute(scheduler, output_of_step)))
        gc.enable()
        events = {
            "stock_running": statistics.median(running["stock"][WARM_STEPS:]),
            "aqua_running": statistics.median(running["ours"][WARM_STEPS:]),
            "forced_preemptions": ours.forced_preemptions,
            "step_overhead_ratio": statistics.fmean(all_us["ours"][WARM_STEPS:])
            / statistics.fmean(all_us["stock"][WARM_STEPS:])
            - 1,
        }
        return took_us["stock"][WARM_STEPS:], took_us["ours"][WARM_STEPS:], events

    def co_serving(self, steps: int) -> dict[str, float]:
        """Medians of the microseconds of a step beside parked requests."""
        parts = {
            "stock_step_us": self._new(None, CALM_BLOCKS),
            "aqua_step_us": self._new(CO_SERVING, CALM_BLOCKS),
            "aqua_parked_step_us": self._new(CO_SERVING, CALM_BLOCKS),
        }
        output = steps + 2 * WARM_STEPS
        for scheduler in parts.values():
            _report_store(scheduler, CALM_BLOCKS)
        parking = parts["aqua_parked_step_us"]
        for index in range(PARKED):
            parking.add_request(self._request(DECODING + index, output, is_offline=True))
        for _ in range(WARM_STEPS):
            _compute(parking, parking.schedule())
        assert len(parking.running) == PARKED, "all of them have begun"
        for scheduler in parts.values():
            for index in range(DECODING):
                scheduler.add_request(self._request(index, output))
        took_us: dict[str, list[float]] = {name: [] for name in parts}
        gc.collect()
        gc.disable()
        for step in range(steps):
            for name in list(parts) if step % 2 else list(parts)[::-1]:
                scheduler = parts[name]
                started_s = time.thread_time()
                output_of_step = scheduler.schedule()
                took_s = time.thread_time() - started_s
                assert len(output_of_step.num_scheduled_tokens) == DECODING, name
                took_us[name].append(1e6 * (took_s + _compute(scheduler, output_of_step)))
        gc.enable()
        return {name: statistics.median(each[WARM_STEPS:]) for name, each in took_us.items()}

    def _new(self, options: dict[str, Any] | None, blocks: int) -> Any:  # noqa: ANN401 - vLLM's scheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        ours = self._core.scheduler
        config, cache = copy.copy(ours.vllm_config), copy.copy(ours.kv_cache_config)
        cache.num_blocks = blocks
        kind = Scheduler if options is None else type(ours)
        config.kv_transfer_config = None
        if options is not None:
            config.kv_transfer_config = copy.copy(ours.vllm_config.kv_transfer_config)
            all_options = {"is_offline": True, **options}
            config.kv_transfer_config.kv_connector_extra_config = all_options
        return kind(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=self._core.structured_output_manager,
            block_size=ours.block_size,
        )

    def _request(self, index: int, output_tokens: int, *, is_offline: bool = False) -> Any:  # noqa: ANN401 - vLLM's request
        from vllm import SamplingParams
        from vllm.v1.request import Request

        return Request(
            str(index),
            [3 + (index * 31 + at) % 2000 for at in range(PROMPT_TOKENS)],
            SamplingParams(
                temperature=0,
                max_tokens=output_tokens,
                ignore_eos=True,
                extra_args={"aqua_class": "offline"} if is_offline else None,
            ),
            None,
            arrival_time=float(index),
            block_hasher=self._core.request_block_hasher,
        )


def _report_store(scheduler: Any, blocks: int) -> None:  # noqa: ANN401 - vLLM's
    """Say as a worker does that its store has room for as much as the KV cache."""
    from aqualib.engines.vllm.paging.plan import WorkerReport, WorkerStore

    paging = getattr(scheduler, "paging", None)
    if paging is not None:
        paging.note(WorkerReport(location=PagingTier.PEER, store=WorkerStore(blocks, 1 << 20)))


def _compute(scheduler: Any, output: Any) -> float:  # noqa: ANN401 - vLLM's
    """Give every request that is due a token, as a model would; seconds until it was taken in."""
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    from aqualib.engines.vllm.connector import AquaWorkerReport

    names = list(output.num_scheduled_tokens)
    requests = (scheduler.requests[name] for name in names)
    tokens = [[7] if each.num_computed_tokens >= each.num_tokens else [] for each in requests]
    index = {name: at for at, name in enumerate(names)}
    answer = ModelRunnerOutput(req_ids=names, req_id_to_index=index, sampled_token_ids=tokens)
    plan = output.kv_connector_metadata
    if plan is not None:
        report = AquaWorkerReport(location=PagingTier.PEER, saved=Counter(list(plan.async_saves)))
        answer.kv_connector_output = KVConnectorOutput(
            finished_recving=set(plan.async_loads) or None,
            kv_connector_worker_meta=report if plan.async_saves else None,
        )
    started_s = time.thread_time()
    scheduler.update_from_output(output, answer)
    return time.thread_time() - started_s


def compare(stock: list[float], ours: list[float], events: dict[str, float]) -> dict[str, float]:
    """Means and medians, and ratios of both."""
    means, medians = ([of(stock), of(ours)] for of in (statistics.fmean, statistics.median))
    return {
        "stock_schedule_us": means[0],
        "aqua_schedule_us": means[1],
        "overhead_ratio": means[1] / means[0] - 1,
        "stock_schedule_median_us": medians[0],
        "aqua_schedule_median_us": medians[1],
        "overhead_median_ratio": medians[1] / medians[0] - 1,
        **events,
    }


def show(name: str, found: dict[str, float], bar: str) -> None:
    """One line."""
    print(
        f"{name}: stock {found['stock_schedule_us']:.0f} us a step with "
        f"{found['stock_running']:.0f} running, Aqua {found['aqua_schedule_us']:.0f} us with "
        f"{found['aqua_running']:.0f}, mean {found['overhead_ratio']:+.1%}{bar}, median "
        f"{found['overhead_median_ratio']:+.1%}; with update_from_output "
        f"{found['step_overhead_ratio']:+.1%}; {found['forced_preemptions']:.0f} put out"
    )


if __name__ == "__main__":
    typer.run(main)
