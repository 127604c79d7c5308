"""Aqua's Figures 1/8, 9 and 13 as measurements: bursts, cached prefixes and long prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from aqua_protocol.hardware import GPUS
from aqua_schedulers.cfs import PagingTier
from aqua_simulator.papers.aqua import (
    LINES,
    BurstExperiment,
    Outcome,
    arxiv_lengths,
    burst_of,
    cached_prefix_run,
    outcomes,
    piecewise_bytes_per_s,
)
from aqua_simulator.papers.blendserve import Experiments
from aqua_simulator.papers.report import FigureMeasurement
from aqua_simulator.workloads.sources import SHAREGPT

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Seeds behind each mean, and behind those of the sensitivity; chosen by hand. Doubled, the figures
# take twice as long and scatter by a third less.
SEED_COUNT: Final = 5
SENSITIVITY_SEED_COUNT: Final = 3

# Fixed by the links: what copies reach on PCIe 5 and 4 with 16 lanes, bytes per second each way.
_PCIE5_BYTES_PER_S: Final = 50e9
_PCIE4_BYTES_PER_S: Final = 25e9

_SHOWN: Final = 55
"""Fixed by the paper: requests in its picture; what happens later is another, accidental burst."""


def figure8(experiments: Experiments) -> FigureMeasurement:
    """The burst on Llama-3.1-70B."""
    burst = burst_of(
        "Llama-3.1-70B",
        "H100-80GB",
        2,
        SHAREGPT.lengths,
        memory_share=0.9,
        dram_bytes_per_s=_PCIE5_BYTES_PER_S,
        factor=2.0,
    )
    experiments.progress("Aqua Figure 8: bursts on Llama-3.1-70B")
    found = outcomes(burst, _seeds(experiments, SEED_COUNT))
    fcfs, dram, peer, _ = found.values()
    values = {
        "FCFS, longest time to first token": fcfs.ttft_max_s,
        "gain of CFS over NVLink on it": fcfs.ttft_max_s / peer.ttft_max_s,
        "last slow request, CFS over DRAM": dram.last_slow(burst.before_count, _SHOWN),
        "last slow request, CFS over NVLink": peer.last_slow(burst.before_count, _SHOWN),
    }
    return _burst_figure(experiments, burst, found, values)


def figure13(experiments: Experiments) -> FigureMeasurement:
    """The burst of long prompts on Yi-34B."""
    burst = burst_of(
        "Yi-34B",
        "A100-80GB",
        1,
        arxiv_lengths,
        memory_share=0.95,
        dram_bytes_per_s=_PCIE4_BYTES_PER_S,
        factor=3.0,
    )
    experiments.progress("Aqua Figure 13: bursts on Yi-34B")
    return _burst_figure(experiments, burst, outcomes(burst, _seeds(experiments, SEED_COUNT)), {})


def _seeds(experiments: Experiments, count: int) -> list[int]:
    return [experiments.seed * 1000 + index for index in range(count)]


def _burst_figure(
    experiments: Experiments,
    burst: BurstExperiment,
    found: Mapping[str, Outcome],
    values: dict[str, float],
) -> FigureMeasurement:
    """What both bursts show, after the `values` that one of them has alone."""
    for name, outcome in found.items():
        put_out = outcome.preemption_count / sum(map(len, outcome.runs))
        values |= {
            f"{name}, longest time to first token": outcome.ttft_max_s,
            f"{name}, mean time per output token": outcome.tpot_mean_s * 1e3,
            f"{name}, mean completion": outcome.completion_mean_s,
            f"{name}, longest completion": outcome.completion_max_s,
            f"{name}, times a request was put out": put_out,
        }
    fcfs, dram, peer, ours = found.values()
    mean_s = fcfs.completion_mean_s
    gain = fcfs.ttft_max_s / ours.ttft_max_s
    values |= {
        "time per output token, CFS over DRAM to over NVLink": dram.tpot_mean_s / peer.tpot_mean_s,
        "gain of first-token on the longest time to first token": gain,
        "mean completion, CFS over NVLink to FCFS": peer.completion_mean_s / mean_s,
        "mean completion, first-token to FCFS": ours.completion_mean_s / mean_s,
    }

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, 2)
        for name, outcome in found.items():
            run = outcome.runs[0]
            panels[0].plot([row.ttft_s for row in run], label=name, linewidth=1)
            panels[1].plot([row.tpot_s * 1e3 for row in run], label=name, linewidth=1)
        labels = ("time to first token, s", "time per output token, ms")
        for axes, label in zip(panels, labels, strict=True):
            axes.set(xlabel="request, by arrival", ylabel=label, yscale="log")
        panels[0].legend(fontsize=7)

    facts = {
        "kv_tokens": burst.kv_tokens,
        "slice_iterations": burst.slice_iterations,
        "seed_count": SEED_COUNT,
    }
    return FigureMeasurement(values, _sensitivity(experiments, burst), facts, draw=draw)


def _sensitivity(experiments: Experiments, burst: BurstExperiment) -> dict[str, float]:
    """What the constants that the paper does not give do to its two claims."""
    piecewise = piecewise_bytes_per_s(burst.dram_bytes_per_s)
    cases: dict[str, dict[str, Any]] = {
        "all as above": {},
        "slices of 1 iteration": {"slice_iterations": 1},
        "slices of 20 iterations": {"slice_iterations": 20},
        "copies behind computation": {"copies_overlap": True},
        f"DRAM piecewise, {piecewise / 1e9:.1f} GB/s": {"dram_bytes_per_s": piecewise},
        "DRAM piecewise, slices of 20": {"dram_bytes_per_s": piecewise, "slice_iterations": 20},
        "recompute where cheaper, DRAM piecewise": {
            "dram_bytes_per_s": piecewise,
            "may_recompute": True,
        },
        "twice the KV memory": {"kv_tokens": 2 * burst.kv_tokens},
        "stable rate by a wait of 5 s": {"stable_wait_s": 5.0},
        "2,048 tokens a step": {"budget": 2048},
    }
    values = {}
    for label, changes in cases.items():
        experiments.progress(f"Sensitivity: {label}")
        seeds = _seeds(experiments, SENSITIVITY_SEED_COUNT)
        fcfs, dram, peer = outcomes(replace(burst, **changes), seeds, LINES[:3]).values()
        gain, cost = fcfs.ttft_max_s / peer.ttft_max_s, dram.tpot_mean_s / peer.tpot_mean_s
        values[f"{label}: gain of CFS over NVLink on the longest time to first token"] = gain
        values[f"{label}: time per output token, CFS over DRAM to over NVLink"] = cost
    return values


PREFIX_TOKENS: Final = 100_000
"""Fixed by the paper's experiment."""

CACHED_COUNT: Final = 30
"""Requests of the run, three of them hits; chosen by hand. Doubled, it shows six hits."""

CACHED_RATE_PER_S: Final = 0.5
"""Requests per second, calm enough that a hit waits for its copy and not for others; the paper
gives none. Doubled, hits begin to wait for each other."""

# Fixed by the paper and by OPT-30B: 48 layers of 7,168 values, keys and values, two bytes each; no
# grouped heads.
OPT_WEIGHT_BYTES: Final = 2 * 30 * 10**9
OPT_KV_BYTES_PER_TOKEN: Final = 2 * 48 * 7168 * 2
OPT_PROMPT_TOKENS: Final = 8192


def figure9(experiments: Experiments) -> FigureMeasurement:
    """A cached prefix of 100,000 tokens, and a prompt larger than memory."""
    experiments.progress("Aqua Figure 9: cached prefixes")
    burst = burst_of(
        "Yi-34B",
        "H100-80GB",
        2,
        SHAREGPT.lengths,
        memory_share=0.9,
        dram_bytes_per_s=_PCIE5_BYTES_PER_S,
        factor=1.0,
    )

    def waits_s(tier: PagingTier, dram_bytes_per_s: float) -> tuple[list[float], float]:
        """Times to first token by arrival, and the longest of those that ask for the prefix."""
        run = cached_prefix_run(
            replace(burst, dram_bytes_per_s=dram_bytes_per_s),
            tier,
            prefix_tokens=PREFIX_TOKENS,
            every=10,
            count=CACHED_COUNT,
            rate_per_s=CACHED_RATE_PER_S,
            seed=experiments.seed,
        )
        hit_s = max(row.ttft_s for row in run if row.prompt_tokens > PREFIX_TOKENS)
        return [row.ttft_s for row in run], hit_s

    dram = burst.dram_bytes_per_s
    lines = {
        "DRAM piecewise": waits_s(PagingTier.HOST, piecewise_bytes_per_s(dram)),
        "DRAM, gathered": waits_s(PagingTier.HOST, dram),
        "NVLink": waits_s(PagingTier.PEER, dram),
    }
    piecewise_s, gathered_s, peer_s = (hit_s for _, hit_s in lines.values())
    values = {f"{name}, time to first token of a hit": hit_s for name, (_, hit_s) in lines.items()}
    values |= {
        "gain of NVLink over DRAM piecewise": piecewise_s / peer_s,
        "gain of NVLink over DRAM, gathered": gathered_s / peer_s,
        **_long_prompt(burst),
    }
    rates = {
        "2 microseconds to launch a copy": piecewise_bytes_per_s(dram, launch_s=2e-6),
        "10 microseconds to launch a copy": piecewise_bytes_per_s(dram, launch_s=10e-6),
        "25 GB/s in one piece": 25e9,
    }
    sensitivity = {
        f"a hit over DRAM, {label}": waits_s(PagingTier.HOST, rate)[1]
        for label, rate in rates.items()
    }

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for name, (ttft_s, _) in lines.items():
            axes.plot(ttft_s, marker=".", label=name, linewidth=1)
        axes.set(xlabel="request, by arrival", ylabel="time to first token, s", yscale="log")
        axes.legend(fontsize=7)

    return FigureMeasurement(values, sensitivity, draw=draw)


def _long_prompt(burst: BurstExperiment) -> dict[str, float]:
    """Tokens per second of OPT-30B with its context behind a link, on an H100."""
    weights_s = OPT_WEIGHT_BYTES / burst.gpu.hbm_bytes_per_s
    context = OPT_KV_BYTES_PER_TOKEN * OPT_PROMPT_TOKENS
    dram_s, peer_s = (context / rate for rate in (burst.dram_bytes_per_s, burst.peer_bytes_per_s))
    small = GPUS["A100-80GB"]
    small_s = OPT_WEIGHT_BYTES / small.hbm_bytes_per_s + context / small.nvlink_bytes_per_s
    return {
        "OPT-30B over NVLink, A100 (Figure 12)": 1.0 / small_s,
        "OPT-30B over DRAM": 1.0 / (weights_s + dram_s),
        "OPT-30B over NVLink": 1.0 / (weights_s + peer_s),
        "gain, copies on top": (weights_s + dram_s) / (weights_s + peer_s),
        "gain, copies behind computation": max(weights_s, dram_s) / max(weights_s, peer_s),
    }


FIGURES: Final[dict[str, Callable[[Experiments], FigureMeasurement]]] = {
    "aqua-figure8": figure8,
    "aqua-figure9": figure9,
    "aqua-figure13": figure13,
}
"""Names on the command line."""
