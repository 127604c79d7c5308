"""ConServe's Figures 1, 2, 5 to 8 and section 6.4.2 as measurements, and ours on the same loads.

Every figure states `READINGS`: the paper leaves so much open that we chose among readings, and we
had its numbers before us when we did. What a figure shows is therefore that a reading of the paper
exists which gives this, not that the paper's text foretells it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aqua_schedulers.conserve import Objectives, ServiceClass
from aqua_simulator.co_serving.engine import CoServingEngine
from aqua_simulator.co_serving.job import CoServingRun
from aqua_simulator.papers.blendserve import Experiments
from aqua_simulator.papers.conserve import (
    CHECKPOINTS,
    CONSERVE,
    FIXED_LENGTHS,
    GUARDED,
    OFFLINE_ONLY,
    ONLINE_ONLY,
    PAPER_OBJECTIVES,
    PRIORITIES,
    SCHEDULER,
    SHAPE_BY_MINUTE,
    CoServingExperiment,
    FigureLine,
    fixed_lengths,
    highest_rate,
    trace,
)
from aqua_simulator.papers.conserve_beyond import beyond
from aqua_simulator.papers.report import FigureMeasurement
from aqua_simulator.serving.request import Arrival
from aqua_simulator.workloads.arrivals import gamma
from aqua_simulator.workloads.sources import LONGBENCH

if TYPE_CHECKING:
    from matplotlib.figure import Figure

READINGS: Final = "readings chosen with the printed results in view, no constant fitted to them"
"""What stands beside each headline."""

PHASE_S: Final = 180.0
"""Fixed by Figure 6: seconds of a phase."""

SETTLING_S: Final = 10.0
"""Seconds of a phase that do not count for offline throughput: the last online requests end, and
memory fills. Doubled, the rate of a phase of 180 s changes by less than a percent."""

STEADY_S: Final = 150.0
"""Seconds of the loads of Figures 7 and 8, 300 requests; the paper gives none. Doubled, tails
scatter less and the figures take twice as long."""

BURST_MINUTES: Final = (9, 10, 11)
"""Fixed by Figure 1(b): where the rate triples; its tails decide which rate is served."""

TRACE_MINUTES: Final = tuple(range(len(SHAPE_BY_MINUTE)))
"""Fixed by Figure 1(b)."""

SENSITIVE_MINUTES: Final = (4, 8, 9, 10)
"""Minutes of the trace on which Figure 5's sensitivity runs: the calm and the burst after it. All
fifteen would take four times as long."""

NAMES: Final[Mapping[str, FigureLine]] = {
    "Online-Only": ONLINE_ONLY,
    "vLLM++": PRIORITIES,
    "ConServe": CONSERVE,
    "ours": GUARDED,
}
"""The lines of Figure 6."""

PUBLISHED_NAMES: Final = ("Online-Only", "vLLM++", "ConServe")
"""Those of the paper, alone on the trace; ours is judged apart, on BurstGPT's lengths too."""

FACTS: Final = {"readings": READINGS}
"""What `published.toml` fills in."""

Load = tuple[CoServingExperiment, Sequence[Arrival], float]
"""A setup, its online requests, and until when offline ones run."""


def _synthetic(experiments: Experiments, **changes: Any) -> CoServingExperiment:  # noqa: ANN401 - fields
    values = {"offline": FIXED_LENGTHS, "seed": experiments.seed, **changes}
    return replace(CoServingExperiment(), **values)


def _steady(seed: int, rate_per_s: float, variation: float) -> list[Arrival]:
    """A load of Figures 7 and 8."""
    count = int(2.0 * rate_per_s * STEADY_S) + 50
    times = gamma(count, rate_per_s=rate_per_s, variation=variation, seed=seed)
    return fixed_lengths(time_s for time_s in times if time_s < STEADY_S)


@cache
def _steady_run(seed: int, rate_per_s: float, variation: float, line: FigureLine) -> CoServingRun:
    """One line on it; both figures have the same at 2 requests/s and CV 1."""
    setup = CoServingExperiment(offline=FIXED_LENGTHS, seed=seed)
    return setup.run(line, _steady(seed, rate_per_s, variation), STEADY_S)


@cache
def _trace_load(seed: int) -> tuple[CoServingExperiment, list[Arrival], float]:
    """The trace at the highest rate that online requests alone are served at."""
    setup = CoServingExperiment(seed=seed)
    rate = highest_rate(setup, lambda rate: trace(setup, rate, BURST_MINUTES))
    return setup, trace(setup, rate, TRACE_MINUTES), 60.0 * len(TRACE_MINUTES)


@cache
def _phases(seed: int, offline: str) -> tuple[CoServingExperiment, list[Arrival], float]:
    """ON at the highest rate, OFF, ON."""
    source = FIXED_LENGTHS if offline == FIXED_LENGTHS.name else LONGBENCH
    setup = CoServingExperiment(seed=seed, offline=source)

    def on(rate: float) -> list[float]:
        times = gamma(int(rate * PHASE_S), rate_per_s=rate, variation=1.0, seed=seed)
        return [float(time_s) for time_s in times if time_s < PHASE_S]

    times = on(highest_rate(setup, lambda rate: fixed_lengths(on(rate))))
    return setup, fixed_lengths([*times, *(2 * PHASE_S + time_s for time_s in times)]), 3 * PHASE_S


def _values(name: str, run: CoServingRun, until_s: float) -> dict[str, float]:
    """What the paper's figures show of one line."""
    values = {
        f"{name}, TTFT p99": run.ttft_p99_s * 1e3,
        f"{name}, TPOT p99": run.tpot_p99_s * 1e3,
        f"{name}, overall throughput": run.tokens_per_s(0.0, until_s),
    }
    if name != "Online-Only":
        offline = run.tokens_per_s(0.0, until_s, ServiceClass.OFFLINE)
        values[f"{name}, offline throughput"] = offline
    return values


def _runs(
    experiments: Experiments, load: Load, names: Mapping[str, FigureLine]
) -> dict[str, CoServingRun]:
    setup, arrivals, until_s = load
    found = {}
    for name, system in names.items():
        experiments.progress(f"ConServe: {name}, {len(arrivals):,} online requests")
        found[name] = setup.run(system, arrivals, until_s)
    return found


@cache
def _trace_runs(seed: int) -> dict[str, CoServingRun]:
    setup, arrivals, until_s = _trace_load(seed)
    return {name: setup.run(NAMES[name], arrivals, until_s) for name in PUBLISHED_NAMES}


def figure1(experiments: Experiments) -> FigureMeasurement:
    """The load of the trace's fifteen minutes."""
    experiments.progress("ConServe Figure 1: the trace")
    _, arrivals, until_s = _trace_load(experiments.seed)
    minute = np.array([int(each.arrival_s // 60) for each in arrivals])
    tokens = np.array([each.prompt_tokens + each.output_tokens for each in arrivals])
    loads = np.bincount(minute, weights=tokens) / 60.0
    counts = np.bincount(minute)
    return FigureMeasurement(
        {
            "mean load of the fifteen minutes": float(tokens.sum() / until_s),
            "highest load of a minute": float(loads.max()),
            "rise of the request rate into the tenth minute": counts[10] / counts[9],
        },
        facts=FACTS,
    )


def figure2(experiments: Experiments) -> FigureMeasurement:
    """Priorities alone, beside online requests alone."""
    experiments.progress("ConServe Figure 2: priorities on the trace")
    runs = _trace_runs(experiments.seed)
    alone, both = runs["Online-Only"], runs["vLLM++"]
    return FigureMeasurement(
        {
            "TTFT p99 of vLLM++ to Online-Only": both.ttft_p99_s / alone.ttft_p99_s,
            "TPOT p99 of vLLM++ to Online-Only": both.tpot_p99_s / alone.tpot_p99_s,
        },
        facts=FACTS,
    )


def figure5(experiments: Experiments) -> FigureMeasurement:
    """The trace and LongBench summaries."""
    experiments.progress("ConServe Figure 5: the trace")
    runs = _trace_runs(experiments.seed)
    _, _, until_s = _trace_load(experiments.seed)
    values: dict[str, float] = {}
    for name, run in runs.items():
        values |= _values(name, run, until_s)
    overall = {name: run.tokens_per_s(0.0, until_s) for name, run in runs.items()}
    values["gain of ConServe over Online-Only"] = overall["ConServe"] / overall["Online-Only"]
    values["ConServe to vLLM++, overall"] = 100.0 * overall["ConServe"] / overall["vLLM++"]
    return FigureMeasurement(values, _trace_sensitivity(experiments), FACTS, draw=_drawn(runs))


def _trace_sensitivity(experiments: Experiments) -> dict[str, float]:
    """ConServe beside vLLM++ on four minutes of the trace, by what the paper does not state."""
    found = {}
    setup, arrivals, _ = _trace_load(experiments.seed)
    arrivals = [
        replace(each, arrival_s=each.arrival_s % 60.0 + 60.0 * place)
        for place, minute in enumerate(SENSITIVE_MINUTES)
        for each in arrivals
        if each.arrival_s // 60.0 == minute
    ]
    until_s = 60.0 * len(SENSITIVE_MINUTES)
    for label, changes in {"four minutes, all as above": {}, **_TRACE_CASES}.items():
        experiments.progress(f"ConServe Figure 5, sensitivity: {label}")
        case = replace(setup, **changes)
        for name in ("ConServe", "vLLM++"):
            run = case.run(NAMES[name], arrivals, until_s)
            found[f"{label}: {name}, overall throughput"] = run.tokens_per_s(0.0, until_s)
    return found


def _drawn(runs: Mapping[str, CoServingRun]) -> Callable[[Figure], None]:
    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, 2)
        for name, run in runs.items():
            for axes, kind in zip(panels, ServiceClass, strict=True):
                start_s, tokens = run.series(5.0, kind)
                axes.plot(start_s, tokens, label=name, linewidth=1)
                axes.set(xlabel="time, s", ylabel=f"{kind} tokens/s")
        panels[0].legend(fontsize=7)

    return draw


def figure6(experiments: Experiments) -> FigureMeasurement:
    """Three phases: the highest online load, none, and the highest again."""
    load = _phases(experiments.seed, FIXED_LENGTHS.name)
    runs = _runs(experiments, load, NAMES)
    values: dict[str, float] = {}
    for name, run in runs.items():
        values |= {
            f"{name}, TTFT p99": run.ttft_p99_s * 1e3,
            f"{name}, TPOT p99": run.tpot_p99_s * 1e3,
        }
        if name != "Online-Only":
            # The last requests of the ON phase are through after a few seconds.
            off = run.tokens_per_s(PHASE_S + SETTLING_S, 2 * PHASE_S, ServiceClass.OFFLINE)
            values[f"{name}, offline throughput in the OFF phase"] = off
    sensitivity = {}
    for label, changes in _CASES.items():
        setup = _synthetic(experiments, **changes)
        rate = setup.run(OFFLINE_ONLY, (), PHASE_S).tokens_per_s(SETTLING_S, PHASE_S)
        sensitivity[f"{label}: ConServe in the OFF phase"] = rate
    return FigureMeasurement(values, sensitivity, FACTS, draw=_drawn(runs))


_CASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "offline requests of LongBench": {"offline": LONGBENCH},
    "no host time": {"overhead_s": 0.0},
    "steps of 512 tokens": {"max_tokens": 512},
    "40 GB of memory": {"hbm_bytes": 40 * 10**9},
}
"""What the paper does not state, changed one by one."""

_TRACE_CASES: Final[Mapping[str, Mapping[str, Any]]] = {
    **{label: changes for label, changes in _CASES.items() if "offline" not in changes},
    "offline requests of 1024 and 128 tokens": {"offline": FIXED_LENGTHS},
    "swaps at the rate of the link": {"is_piecewise": False},
}


def figure7(experiments: Experiments) -> FigureMeasurement:
    """Burstiness and rate."""
    cases = {
        **{f"CV {variation:g}": (2.0, variation) for variation in (0.5, 2.0)},
        **{f"{rate:g} requests/s": (rate, 1.0) for rate in (1.0, 2.0, 3.0)},
    }
    values: dict[str, float] = {}
    for label, load in cases.items():
        experiments.progress(f"ConServe Figure 7: {label}")
        lines = (ONLINE_ONLY, PRIORITIES, CONSERVE)
        alone, both, paper = (_steady_run(experiments.seed, *load, line) for line in lines)
        gain = _offline_per_s(paper) / _offline_per_s(both) - 1.0
        values |= {
            f"{label}, TTFT p99 of ConServe to ideal": paper.ttft_p99_s / alone.ttft_p99_s,
            f"{label}, TTFT p99 of vLLM++": both.ttft_p99_s * 1e3,
            f"{label}, offline throughput of ConServe to vLLM++": 100.0 * gain,
        }
    return FigureMeasurement(values, facts=FACTS)


def _offline_per_s(run: CoServingRun) -> float:
    return run.tokens_per_s(0.0, STEADY_S, ServiceClass.OFFLINE)


STAGES: Final[Mapping[str, FigureLine]] = {
    "vLLM++": PRIORITIES,
    "scheduler": SCHEDULER,
    "and checkpoints": CHECKPOINTS,
    "and prefetch": CONSERVE,
    "ours": GUARDED,
}
"""The bars of Figure 8, and ours."""


def figure8(experiments: Experiments) -> FigureMeasurement:
    """What each mechanism brings."""
    values: dict[str, float] = {}
    for name, line in {"Online-Only": ONLINE_ONLY, **STAGES}.items():
        experiments.progress(f"ConServe Figure 8: {name}")
        run = _steady_run(experiments.seed, 2.0, 1.0, line)
        values[f"{name}, TTFT p99"] = run.ttft_p99_s * 1e3
        if name in STAGES:
            values[f"{name}, offline throughput"] = _offline_per_s(run)
    sensitivity = {}
    arrivals = _steady(experiments.seed, 2.0, 1.0)
    for label, changes in _CASES.items():
        other = _synthetic(experiments, **changes)
        for name in ("scheduler", "and prefetch"):
            experiments.progress(f"ConServe Figure 8, sensitivity: {label}")
            run = other.run(STAGES[name], arrivals, STEADY_S)
            sensitivity[f"{label}: {name}, offline throughput"] = _offline_per_s(run)
    return FigureMeasurement(values, sensitivity, FACTS)


def safepoints(experiments: Experiments) -> FigureMeasurement:
    """Section 6.4.2: what safepoints cost and how soon they stop a step."""
    experiments.progress("ConServe section 6.4.2: safepoints")
    values: dict[str, float] = {}
    for name, system in (("ConServe", CONSERVE), ("ours", GUARDED)):
        engine, run = _aborted(experiments, system)
        spec = engine.spec
        groups = spec.layer_count // spec.safepoint_layers
        steps = np.array([step.end_s - step.start_s for step in run.steps if step.offline_tokens])
        lags = np.array(run.abort_lags_s)
        values |= {
            f"{name}, safepoints of a step": spec.safepoint_s * groups * 1e3,
            f"{name}, mean offline step": float(steps.mean() * 1e3),
            f"{name}, abort within, mean": float(lags.mean() * 1e3),
            f"{name}, abort within, longest": float(lags.max() * 1e3),
            f"{name}, most aborts by one online request": float(run.most_aborts),
        }
    sensitivity = {}
    for layers in (1, 4, 16):
        _, run = _aborted(experiments, CONSERVE, safepoint_layers=layers)
        label = f"a safepoint every {layers} layers" if layers > 1 else "a safepoint every layer"
        sensitivity[f"{label}: abort within, longest"] = max(run.abort_lags_s) * 1e3
    return FigureMeasurement(values, sensitivity, FACTS)


def _aborted(
    experiments: Experiments,
    system: FigureLine,
    **changes: Any,  # noqa: ANN401 - fields
) -> tuple[CoServingEngine, CoServingRun]:
    """Offline work that short online requests, each alone, abort again and again."""
    arrivals = [Arrival(f"online-{index}", 1.0 + 3.1 * index, 64, 4) for index in range(15)]
    # The paper's rule aborts only when the objective would be missed: make it tight.
    objectives = Objectives(ttft_s=0.03, tpot_s=PAPER_OBJECTIVES.tpot_s)
    engine = _synthetic(experiments, objectives=objectives, **changes).engine(system)
    return engine, engine.run(arrivals, 50.0)


FIGURES: Final[dict[str, Callable[[Experiments], FigureMeasurement]]] = {
    "conserve-figure1": figure1,
    "conserve-figure2": figure2,
    "conserve-figure5": figure5,
    "conserve-figure6": figure6,
    "conserve-figure7": figure7,
    "conserve-figure8": figure8,
    "conserve-safepoints": safepoints,
    "conserve-beyond": beyond,
}
"""Names on the command line; `conserve` is all of them."""
