"""A real vLLM in a process of its own, run by a scenario and watched over pipes.

The program (this file, run as a script) answers with one JSON line per event: `paused` when the
scenario asked for a pause, until a line arrives on its standard input, and `done` with everything
that a test may judge. `VllmProgram` is the test's side.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from harness.bounds import HANG_S, until
from harness.program import Program, say
from harness.step_aborts import ASKED, ASKING, STOPPED, allow_aborts_in_process

START_WITHIN_S: Final = 400.0
"""Importing vLLM on a busy machine takes most of a minute."""

CUT: Final[Counter[str]] = Counter()
"""Columns of loads, and layers that waited for one."""

SLOWED: Final = "HARNESS_SLOWED"
"""Names a file to a `SlowedWorker`, which is slowed while the file is there."""

BLOCK_TOKENS: Final = 32
"""The smallest block of vLLM's attention for CPUs."""

STOCK: Final[dict[str, Any]] = {
    "max_model_len": 512,
    "num_gpu_blocks_override": 24,
    "block_size": BLOCK_TOKENS,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.1,
    "dtype": "float32",
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "seed": 0,
}
"""Arguments of `vllm.LLM` unless a scenario has others: an engine whose memory is soon short."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What to run.

    Attributes:
        model: Folder of the model.
        aqua: Options of the adapter; None runs vLLM's own scheduler without a connector.
        engine: Further arguments of `vllm.LLM`.
        request_count: Requests, all added at the start.
        prompt_tokens: Shortest and longest prompt.
        output_tokens: Each generates so many.
        shared_tokens: Of every prompt, the same at its start.
        rounds: How often the same requests are run, one round after the other.
        pause_at_step: Say `paused` before this step and wait for a line.
        await_leased_bytes: Wait for so much peer memory before the first request; after the pause
            where there is one without a coordinator before it.
        joins_at_pause: Whether that is so.
        zeroes_loads: What is paged in is zeroed: the negative control.
        spoil_at_step: Before this step, all that is in the store stops matching its checksums.
        abort_at_step: Before this step, every third request is aborted.
        evict_at_step: Before this step, half of what runs is evicted; it is resumed when no other
            request is left.
        zeroes_from_round: From this round on, likewise what is paged in is zeroed.
        pinned: Prompts that are pinned at the pause, and asked for once more at the end.
        lend: What to lend, by vLLM's own scheduler or, with `aqua`, ours.
        lending_worker: By which class.
        await_offered_bytes: Wait for so much to be offered, then say `offered` and wait for a line,
            before the first request.
        wave_at_step: Before this step, the requests of the round are added once more.
        offers_before_wave: The wave comes later if requests wait then, and once memory is offered.
        overlaps_steps: Schedule asynchronously: a step before the last one's output is there.
        is_beside: Our connector is one of several.
        online_every: Every n-th request is online, the others offline; 0 says nothing.
        aborted_layers: Share of the layers of abortable steps at which an abort is asked for.
        aborting_worker: By which class.
        seed: By which that is random.
        cuts_loads: Loads within a step come layer by layer, however small they are.
    """

    model: str
    aqua: dict[str, Any] | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    request_count: int = 12
    prompt_tokens: tuple[int, int] = (20, 90)
    output_tokens: int = 100
    shared_tokens: int = 0
    rounds: int = 1
    pause_at_step: int = 0
    await_leased_bytes: int = 0
    joins_at_pause: bool = False
    zeroes_loads: bool = False
    spoil_at_step: int = 0
    abort_at_step: int = 0
    evict_at_step: int = 0
    zeroes_from_round: int = 0
    pinned: int = 0
    lend: dict[str, Any] | None = None
    lending_worker: str = "aqualib.engines.vllm.LendingWorker"
    await_offered_bytes: int = 0
    wave_at_step: int = 0
    offers_before_wave: bool = False
    overlaps_steps: bool = False
    is_beside: bool = False
    online_every: int = 0
    aborted_layers: float = 0.0
    aborting_worker: str = "harness.holding_worker.AskingWorker"
    seed: int = 0
    cuts_loads: bool = False


class VllmProgram(Program):
    """Runs one scenario.

    Args:
        scenario: What to run.
        environment: Further variables.
    """

    def __init__(self, scenario: Scenario, **environment: str) -> None:
        super().__init__(
            __file__,
            json.dumps(asdict(scenario)),
            within_s=START_WITHIN_S,
            **{"OMP_NUM_THREADS": "1", **environment},
        )

    def until(self, event: str) -> dict[str, Any]:
        """The answer that begins with `event`."""
        while True:
            line = self.line()
            # Between them, whatever vLLM prints.
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                if answer["event"] == event:
                    return answer

    def go_on(self) -> None:
        """End the pause."""
        self.tell("")


def run(scenario: Scenario, **environment: str) -> dict[str, Any]:
    """Run a scenario to its end."""
    with VllmProgram(scenario, **environment) as program:
        return program.until("done")


# --- The program ----------------------------------------------------------------------------


def prompts_of(scenario: Scenario) -> list[list[int]]:
    """Its prompts, shape (request_count, tokens), always the same."""
    rng = random.Random(1)
    shared = [rng.randrange(2, 320) for _ in range(scenario.shared_tokens)]
    low, high = scenario.prompt_tokens
    return [
        shared + [rng.randrange(2, 320) for _ in range(rng.randrange(low, high))]
        for _ in range(scenario.request_count)
    ]


def make_engine(scenario: Scenario) -> Any:  # noqa: ANN401 - vLLM's
    """A vLLM `LLMEngine` in this process."""
    from vllm import LLM

    options: dict[str, Any] = {**STOCK, **scenario.engine}
    if scenario.overlaps_steps:
        from harness.overlapping_steps import allow_overlapping_steps

        allow_overlapping_steps()
        options["async_scheduling"] = True
    if scenario.aqua is not None:
        options["scheduler_cls"] = "aqualib.engines.vllm.AquaScheduler"
        options["kv_transfer_config"] = _connector("AquaConnector", scenario.aqua)
        if scenario.is_beside:
            other = {
                **_connector("IdleConnector", {}),
                "kv_connector_module_path": "harness.idle_connector",
            }
            several = {"connectors": [other, options["kv_transfer_config"]]}
            options["kv_transfer_config"] = _connector("MultiConnector", several)
    if scenario.cuts_loads:
        from harness.cut_loads import cut_loads

        cut_loads(CUT)
    if scenario.aborted_layers:
        allow_aborts_in_process()
        os.environ[ASKING] = f"{scenario.aborted_layers} {scenario.seed}"
        options["worker_cls"] = scenario.aborting_worker
    if scenario.lend is not None:
        options["worker_cls"] = scenario.lending_worker
        options.setdefault("scheduler_cls", "aqualib.engines.vllm.LendingScheduler")
        if scenario.aqua is None:
            options["additional_config"] = {"aqua": {"lend": scenario.lend}}
        else:
            transfer = options["kv_transfer_config"]
            transfer["kv_connector_extra_config"] = {**scenario.aqua, "lend": scenario.lend}
    return LLM(model=scenario.model, disable_log_stats=False, **options).llm_engine


def _connector(name: str, extra: dict[str, Any]) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}


def _main(scenario: Scenario) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    from vllm import SamplingParams

    engine = make_engine(scenario)
    worker = find_worker(scenario)
    _before_step(scenario, 0, engine, worker)
    prompts = prompts_of(scenario)

    def add(turn: int | str) -> None:
        for index, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=0,
                max_tokens=scenario.output_tokens,
                ignore_eos=True,
                extra_args=_told(scenario, index),
            )
            engine.add_request(f"{turn}-{index}", {"prompt_token_ids": prompt}, params)

    steps = Steps(engine)
    tokens: dict[str, list[int]] = {}
    step = 0
    has_waved = False
    for turn in range(scenario.rounds):
        add(turn)
        first_step = step
        while engine.has_unfinished_requests():
            step += 1
            _before_step(scenario, step, engine, worker)
            _in_round(scenario, turn, step - first_step, engine, worker)
            if step == scenario.abort_at_step:
                engine.abort_request([f"{turn}-{index}" for index in range(0, len(prompts), 3)])
            if not has_waved and 0 < scenario.wave_at_step <= step and _is_ready(scenario, engine):
                has_waved = True
                add("wave")
            for output in steps.make():
                if output.finished:
                    name = output.request_id
                    tokens[name] = list(output.outputs[0].token_ids)
    steps.settle()
    tokens |= _ask_for_pinned(scenario, engine, steps)
    say({"event": "done", "tokens": tokens, "steps": step, **_figures(engine, worker)})
    if scenario.lend is not None:
        engine.engine_core.engine_core.scheduler.shutdown()


def _told(scenario: Scenario, index: int) -> dict[str, str] | None:
    """What a request says of its class."""
    if not scenario.online_every:
        return None
    return {"aqua_class": "offline" if index % scenario.online_every else "online"}


class Steps:
    """An engine's steps; if nothing comes of them for long, an error that says how it stands."""

    def __init__(self, engine: Any) -> None:  # noqa: ANN401 - vLLM's
        self._engine = engine
        self._idle_s = 0.0

    def make(self) -> Any:  # noqa: ANN401 - vLLM's
        """Make one."""
        begun_s = time.monotonic()
        outputs = self._engine.step()
        self._idle_s = 0.0 if outputs else self._idle_s + time.monotonic() - begun_s
        if self._idle_s > HANG_S:
            scheduler = self._engine.engine_core.engine_core.scheduler
            free_blocks = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            requests = [
                (name, each.status.name, each.num_computed_tokens, each.num_tokens)
                for name, each in scheduler.requests.items()
            ]
            raise TimeoutError(f"nothing comes of steps; {free_blocks} blocks free; {requests}")
        return outputs

    def settle(self) -> None:
        """An engine goes on until what it pages out beside the model is acknowledged."""
        while self._engine.engine_core.engine_core.scheduler.has_requests():
            self.make()


def _before_step(scenario: Scenario, step: int, engine: Any, worker: Any) -> None:  # noqa: ANN401 - vLLM's, ours
    """What the scenario wants to happen around the engine; step 0 is before any request."""
    if step == 0 and scenario.await_offered_bytes:
        _await_offer(engine, scenario.await_offered_bytes)
        say({"event": "offered", **_figures(engine, worker)})
        sys.stdin.readline()
    if step and step == scenario.pause_at_step:
        for name, prompt in _pinned(scenario).items():
            _command(engine, "pin", id=name, prompt_token_ids=prompt)
        say({"event": "paused", **_figures(engine, worker)})
        sys.stdin.readline()
        if scenario.joins_at_pause:
            _await_leases(scenario, worker.aqua)
    if step and step == scenario.spoil_at_step:
        worker.store._sums ^= 1


def _is_ready(scenario: Scenario, engine: Any) -> bool:  # noqa: ANN401 - vLLM's
    """Whether the wave may come: how long the first requests wait is up to the machine."""
    if not scenario.offers_before_wave:
        return True
    if engine.engine_core.engine_core.scheduler.get_request_counts()[1]:
        return False
    _await_offer(engine, 1)
    return True


def _await_offer(engine: Any, nbytes: int) -> None:  # noqa: ANN401 - vLLM's
    """Wait until the informer has offered so much: its thread has no event for others.

    A reclaim ends first: what is taken back meanwhile would be a part of it.
    """
    service = engine.engine_core.engine_core.scheduler.lending_service
    lender = service.memory_producer

    def has_offered() -> bool:
        service.informer.wake()
        return lender.offered_bytes >= nbytes and not lender.open_reclaim_bytes

    until(has_offered, lambda: service.lending)


def find_worker(scenario: Scenario) -> Any:  # noqa: ANN401 - a KvPagingWorker, or None
    """What pages for the engine of this process, once it has leased what the scenario awaits."""
    if scenario.aqua is None:
        return None
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if not has_kv_transfer_group():  # Of several workers, each has its own.
        return None
    from aqualib.engines.vllm.connector import find_connector

    connector = find_connector(get_kv_transfer_group())
    worker: Any = None if connector is None else connector.paging_worker
    if worker is None:
        return None
    if scenario.await_leased_bytes and not scenario.joins_at_pause:
        _await_leases(scenario, worker.aqua)
    if scenario.zeroes_loads:
        zero_loads(worker)
    return worker


def _in_round(scenario: Scenario, turn: int, step: int, engine: Any, worker: Any) -> None:  # noqa: ANN401 - as above
    """What the scenario wants to happen before a step that is counted from its round's first."""
    if step == 1 and 0 < scenario.zeroes_from_round == turn:
        zero_loads(worker)
    if scenario.evict_at_step:
        _evict_or_resume(engine, is_time=step == scenario.evict_at_step)


def zero_loads(worker: Any) -> None:  # noqa: ANN401 - a KvPagingWorker
    """Have what is paged in be zeroes from now on."""
    page_in = worker.store.page_in

    def page_in_nothing(slots: Any, rows: Any, **how: Any) -> Any:  # noqa: ANN401 - tensors, a transfer
        transfer = page_in(slots, rows, **how)
        rows.zero_()
        return transfer

    worker.store.page_in = page_in_nothing


def _evict_or_resume(engine: Any, *, is_time: bool) -> None:  # noqa: ANN401 - vLLM's
    """Evict half of what runs, or resume what is evicted once nothing else is left."""
    scheduler = engine.engine_core.engine_core.scheduler
    if is_time:
        _command(engine, "evict", count=len(scheduler.running) // 2, hold_s=3600)
    elif len(scheduler.requests) == len(scheduler.evictions()):
        for each in scheduler.evictions():
            _command(engine, "resume", id=each["request_id"])


def _pinned(scenario: Scenario) -> dict[str, list[int]]:
    """The longest prompts, by what they are called when they are asked for again."""
    prompts = prompts_of(scenario)
    longest = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    return {f"again-{index}": prompts[index] for index in longest[: scenario.pinned]}


def _ask_for_pinned(scenario: Scenario, engine: Any, steps: Steps) -> dict[str, list[int]]:  # noqa: ANN401 - vLLM's
    """The first tokens of their answers."""
    from vllm import SamplingParams

    tokens: dict[str, list[int]] = {}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for name, prompt in _pinned(scenario).items():
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    while engine.has_unfinished_requests():
        for output in steps.make():
            tokens[output.request_id] = list(output.outputs[0].token_ids)
    return tokens


def _command(engine: Any, command: str, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's
    """What the admin API has the scheduler do."""
    answer = engine.engine_core.engine_core.scheduler(command, arguments)
    assert "result" in answer, answer
    result: dict[str, Any] = answer["result"]
    return result


def _await_leases(scenario: Scenario, aqua: Any) -> None:  # noqa: ANN401 - an Aqua
    until(
        lambda: sum(a.mapped_bytes for a in aqua.attachments) >= scenario.await_leased_bytes,
        "peer memory is leased",
    )


def _figures(engine: Any, worker: Any) -> dict[str, Any]:  # noqa: ANN401 - vLLM's, ours
    from prometheus_client import REGISTRY

    scheduler = engine.engine_core.engine_core.scheduler
    paging = getattr(scheduler, "paging", None)
    resting = sys.modules.get("harness.resting_worker")
    figures: dict[str, Any] = {
        "forced": getattr(scheduler, "forced_preemptions", 0),
        "paging": {} if paging is None else asdict(paging.counts),
        "scheduler": type(scheduler).__name__,
        "held_places": 0 if paging is None else paging.table.held_count,
        "asked_layers": sorted(ASKED),
        "stopped_layers": sorted(STOPPED),
        "steps_found": {} if resting is None else dict(resting.FOUND),
        "metrics": {
            sample.name: sample.value
            for metric in REGISTRY.collect()
            for sample in metric.samples
            if sample.name.startswith("aqua:")
        },
    }
    pins = getattr(scheduler, "pins", None)
    if pins is not None:
        figures["pins"] = pins.states()["pins"]
    service = getattr(scheduler, "lending_service", None)
    if service is not None:
        ended = service.metrics.ended_reclaims
        figures |= {
            "running": len(scheduler.running),
            "offered_bytes": service.memory_producer.offered_bytes,
            "leased_bytes": service.memory_producer.leased_bytes,
            "absent_blocks": service.lending.out_blocks,
            "pool_blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks,
            "usage": scheduler.kv_cache_manager.usage,
            "reclaims": ended.count,
            "reclaimed_bytes": ended.returned_bytes,
            "reclaim_s": ended.seconds,
        }
    if worker is not None:
        stats = worker.aqua.stats()
        figures |= {
            "paged_blocks": {
                way: nbytes // worker.block_bytes for way, nbytes in worker.paged_bytes.items()
            },
            "cut": dict(CUT),
            "failures": dict(worker.failures),
            "location": worker.location().value,
            "leased_bytes": stats.leased_bytes,
            "drained_bytes": stats.drained_bytes,
            "paged_in_bytes": stats.paged_in_bytes,
            "spilled_bytes": stats.spilled_bytes,
        }
    return figures


if __name__ == "__main__":
    _main(Scenario(**json.loads(sys.argv[1])))
