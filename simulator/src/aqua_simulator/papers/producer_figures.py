"""Aqua's Figures 10 to 12 as measurements: what lending costs a producer, and how it takes back.

A consumer's copies take memory bandwidth from the producer's kernels while they run, and on a
tensor-parallel producer half of the NVLink rate from its all-reduces. Kernels bound by memory
slow down by the whole share, those bound by computation not at all, so the costs here are those of
fair sharing; what a real switch and memory controller do beyond it is not modelled.

Source: Aqua sections 9.3 and 9.4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Final

import numpy as np

from aqua_protocol.hardware import GPUS, GpuModel
from aqua_schedulers.cfs import PagingTier, PolicyName
from aqua_simulator.papers.aqua import BurstExperiment, burst_of
from aqua_simulator.papers.blendserve import Experiments
from aqua_simulator.papers.report import FigureMeasurement
from aqua_simulator.serving.request import Arrival
from aqua_simulator.timing.contention import Flow, max_min_rates
from aqua_simulator.timing.iteration import BANDWIDTH_SHARE, IterationTime
from aqua_simulator.workloads.sources import SHAREGPT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Fixed by the paper and by OPT-30B: 48 layers of 7,168 values, keys and values, two bytes each; no
# grouped heads.
OPT_WEIGHT_BYTES: Final = 2 * 30 * 10**9
OPT_KV_BYTES_PER_TOKEN: Final = 2 * 48 * 7168 * 2
OPT_PROMPT_TOKENS: Final = 8192
OPT_CONTEXT_BYTES: Final = OPT_KV_BYTES_PER_TOKEN * OPT_PROMPT_TOKENS

PRODUCER_RATE_PER_S: Final = 5.0
"""Requests per second of Llama-3.1-8B: fixed by the paper (9.3), the most within its SLA."""

WIDE_RATE_PER_S: Final = 2.0
"""Requests per second of Llama-3.1-70B on four GPUs, "steady"; the paper gives none. Doubled, steps
hold twice the decodes, and the share that reads weights falls."""

REQUESTS: Final = 200
"""Of a run. Doubled, means are surer and take twice as long."""

LINK_STEP_S: Final = 10e-6
"""Seconds that an all-reduce of no size takes. Doubled, a step of 80 layers is 1.6 ms longer,
lending or not."""

PHASES: Final = ((120.0, 1.0), (60.0, 2.0), (120.0, 1.0))
"""Seconds and factor of the rate: fixed by Figure 12, whose traffic doubles at the 120th second;
the text does not say for how long."""

CONSUMER_START_S: Final = 60.0
"""Fixed by Figure 12."""

PENDING_REQUESTS: Final = 16
"""Requests that wait when the producer takes its memory back. Doubled, it takes back later."""

CALM_REQUESTS: Final = 4
"""Requests that wait at a steady rate now and then: prompts share the budget of a step. Doubled, it
lends again sooner."""

CALM_S: Final = 10.0
"""Seconds without more waiting than that after which it lends again. Doubled, it lends that much
later."""


def long_prompt_s(gpu: GpuModel, link_bytes_per_s: float) -> tuple[float, float]:
    """Seconds of a token of OPT-30B: to read the weights, and to copy the context in."""
    return OPT_WEIGHT_BYTES / gpu.hbm_bytes_per_s, OPT_CONTEXT_BYTES / link_bytes_per_s


def copying_share(gpu: GpuModel) -> float:
    """Share of the time in which OPT-30B, with its context at a peer, copies."""
    weights_s, copy_s = long_prompt_s(gpu, gpu.nvlink_bytes_per_s)
    return copy_s / (weights_s + copy_s)


def lending(gpu: GpuModel, share: float) -> GpuModel:
    """The GPU with what is left of its bandwidth beside copies that run that share of the time."""
    taken = share * gpu.nvlink_bytes_per_s / BANDWIDTH_SHARE
    return replace(gpu, hbm_bytes_per_s=gpu.hbm_bytes_per_s - taken)


def figure10(experiments: Experiments) -> FigureMeasurement:
    """A single-GPU producer, alone and while OPT-30B's context lies with it."""
    experiments.progress("Aqua Figure 10: producers")
    gpu = GPUS["H100-80GB"]
    share = copying_share(gpu)

    def measured(gpu: GpuModel) -> float:
        return _tpot_ms(experiments, replace(_chats(1), gpu=gpu), PRODUCER_RATE_PER_S)

    alone = measured(gpu)
    with_copies = measured(lending(gpu, share))
    lost = 1.0 - lending(gpu, share).hbm_bytes_per_s / gpu.hbm_bytes_per_s
    values = {
        "Llama-3.1-8B alone, mean time per output token": alone,
        "Llama-3.1-8B lending, mean time per output token": with_copies,
        "time per output token that lending adds": with_copies - alone,
        "throughput that a producer bound by memory loses (audio)": lost * 100,
        "time in which the consumer copies": share * 100,
    }
    always = {
        "copies all the time: added time per output token": measured(lending(gpu, 1.0)) - alone
    }
    return FigureMeasurement(values, always)


def figure11(experiments: Experiments) -> FigureMeasurement:
    """Llama-3.1-70B on four GPUs, each lending to an OPT-30B of its own."""
    experiments.progress("Aqua Figure 11: a tensor-parallel producer")
    gpu = GPUS["H100-80GB"]
    share, whole = copying_share(gpu), gpu.nvlink_bytes_per_s
    beside_copy, _copy = max_min_rates({"nvlink": whole}, [Flow(("nvlink",)), Flow(("nvlink",))])

    def measured(share: float) -> float:
        burst = replace(_chats(4), gpu=lending(gpu, share))

        def with_collectives(time_of: IterationTime) -> IterationTime:
            model = burst.model

            def linear(tokens: int) -> float:
                moved = 2.0 * (burst.width - 1) / burst.width * tokens * model.hidden_size * 2
                moved_s = (1.0 - share) * moved / whole + share * moved / beside_copy
                reduce_s = LINK_STEP_S + moved_s
                return time_of.linear(tokens) + 2 * model.layer_count * reduce_s

            return replace(time_of, linear=linear)

        return _tpot_ms(experiments, burst, WIDE_RATE_PER_S, with_collectives)

    alone, with_copies = measured(0.0), measured(share)
    values = {
        "Llama-3.1-70B alone, mean time per output token": alone,
        "Llama-3.1-70B lending, mean time per output token": with_copies,
        "time per output token that lending adds": (with_copies / alone - 1.0) * 100,
    }
    always = {"copies all the time: added time per output token": (measured(1.0) / alone - 1) * 100}
    return FigureMeasurement(values, always)


def _chats(width: int) -> BurstExperiment:
    """The producers' load: ShareGPT on H100s, no burst."""
    model = "Llama-3.1-8B" if width == 1 else "Llama-3.1-70B"
    burst = burst_of(
        model,
        "H100-80GB",
        width,
        SHAREGPT.lengths,
        memory_share=0.9,
        dram_bytes_per_s=50e9,
        factor=1.0,
    )
    return replace(burst, before_count=REQUESTS, after_count=0, length_s=0.0)


def _tpot_ms(
    experiments: Experiments,
    burst: BurstExperiment,
    rate_per_s: float,
    timed: Callable[[IterationTime], IterationTime] = lambda time_of: time_of,
) -> float:
    """Mean time per output token of a steady stream."""
    engine = burst.engine(PolicyName.FCFS, PagingTier.NOWHERE)
    engine.time_of = timed(engine.time_of)
    served = engine.run(burst.arrivals(rate_per_s, experiments.seed))
    return float(np.nanmean([row.tpot_s for row in served])) * 1e3


@dataclass(frozen=True, slots=True)
class _Look:
    """What Figure 12 shows of a moment."""

    at_s: float
    is_lent: bool
    free_bytes: float


def figure12(experiments: Experiments) -> FigureMeasurement:
    """Llama-3.1-8B lends to OPT-30B, takes back when its traffic doubles, and lends again."""
    experiments.progress("Aqua Figure 12: elasticity")
    burst = burst_of(
        "Llama-3.1-8B",
        "A100-80GB",
        1,
        SHAREGPT.lengths,
        memory_share=0.9,
        dram_bytes_per_s=25e9,
        factor=1.0,
    )
    looks = _lending_run(burst, experiments.seed)
    gpu, dram = burst.gpu, burst.dram_bytes_per_s
    fast, slow = (1.0 / sum(long_prompt_s(gpu, rate)) for rate in (gpu.nvlink_bytes_per_s, dram))
    doubled_s, calm_s = PHASES[0][0], PHASES[0][0] + PHASES[1][0]
    taken_s = next((each.at_s for each in looks if each.at_s > doubled_s and not each.is_lent), inf)
    again_s = next((each.at_s for each in looks if each.at_s > taken_s and each.is_lent), inf)
    active = [each.is_lent for each in looks if each.at_s >= CONSUMER_START_S]
    values = {
        "OPT-30B while memory is lent": fast,
        "OPT-30B while it is not": slow,
        "mean of OPT-30B": float(np.mean([fast if is_lent else slow for is_lent in active])),
        "taken back after the traffic doubled": taken_s - doubled_s,
        "lent again after the traffic fell": again_s - calm_s,
    }

    def draw(figure: Figure) -> None:
        panels = figure.subplots(2, 1, sharex=True)
        times = [each.at_s for each in looks]
        panels[0].plot(times, [each.free_bytes / 1e9 for each in looks])
        panels[0].set_ylabel("free memory, GB")
        rates = [
            0.0 if each.at_s < CONSUMER_START_S else fast if each.is_lent else slow
            for each in looks
        ]
        panels[1].plot(times, rates)
        panels[1].set(xlabel="seconds", ylabel="OPT-30B, tokens/s")

    return FigureMeasurement(values, draw=draw)


def _phased(burst: BurstExperiment, seed: int) -> list[Arrival]:
    """Requests of all phases, in order of arrival."""
    rate = burst.stable_rate_per_s()
    arrivals, start_s = [], 0.0
    for index, (length_s, factor) in enumerate(PHASES):
        count = round(rate * factor * length_s)
        stream = replace(burst, before_count=count, after_count=0, length_s=0.0)
        phase = stream.arrivals(rate * factor, seed * 100 + index)
        stretch = length_s / phase[-1].arrival_s
        for each in phase:
            name, at_s = f"{index}-{each.request_id}", start_s + each.arrival_s * stretch
            arrivals.append(replace(each, request_id=name, arrival_s=at_s))
        start_s += length_s
    return arrivals


def _lending_run(burst: BurstExperiment, seed: int) -> list[_Look]:
    """Serve the phases, looking once a second at what waits."""
    engine = burst.engine(PolicyName.FCFS, PagingTier.NOWHERE)
    block_bytes = engine.memory.block_tokens * burst.model.kv_bytes_per_token
    # All but what the steady rate needs is lent, as the paper's profile of the producer has it.
    steady = burst.engine(PolicyName.FCFS, PagingTier.NOWHERE)
    for arrival in _phased(burst, seed):
        engine.submit(arrival)
        if arrival.arrival_s <= PHASES[0][0]:
            steady.submit(arrival)
    blocks = steady.memory.free_count
    while steady.next_event_s < inf:
        steady.advance()
        blocks = min(blocks, steady.memory.free_count)
    assert blocks * block_bytes >= OPT_CONTEXT_BYTES, blocks
    # What is taken back is first copied to the host.
    leaving_s = OPT_CONTEXT_BYTES / burst.dram_bytes_per_s
    is_lent, back_s, waited_s, look_s = engine.memory.lend(blocks), inf, 0.0, 0.0
    looks: list[_Look] = []
    while engine.next_event_s < inf:
        engine.advance()
        if engine.now_s >= back_s:
            engine.memory.take_back(blocks)
            back_s = inf
        if engine.waiting_count > CALM_REQUESTS:
            waited_s = engine.now_s
        if is_lent and engine.waiting_count >= PENDING_REQUESTS:
            is_lent, back_s = False, engine.now_s + leaving_s
        elif not is_lent and back_s == inf and engine.now_s - waited_s >= CALM_S:
            is_lent = engine.memory.lend(blocks)
        while look_s <= engine.now_s:
            looks.append(_Look(look_s, is_lent, engine.memory.free_count * block_bytes))
            look_s += 1.0
    return looks


FIGURES: Final[dict[str, Callable[[Experiments], FigureMeasurement]]] = {
    "aqua-figure10": figure10,
    "aqua-figure11": figure11,
    "aqua-figure12": figure12,
}
"""Names on the command line."""
