"""Bursts on a real vLLM: first come first served beside time slices, with and without Aqua.

The paper's experiment (section 9.3, "Fair scheduling during bursts"; Figures 1 and 8) on a CPU:
requests at a rate that the engine sustains, twice that rate for a while, a pause while the surplus
is redirected to new instances, then the first rate again (`_bursts` says how, and what of it
follows from the paper's figures). Memory for keys and values is limited, so that the burst does not
fit. Four schedulers meet the same requests at the same time, by turns of a fraction of a second in
which the clocks of the others stand still, so that all of them meet the same machine:

    fcfs        vLLM's own
    recompute   the paper's policy, preempted requests are computed again
    aqua        the paper's policy, preempted requests page into memory lent by another process
    best        our policy, likewise

Without contention a second engine of vLLM's own (`control`) races, too, and the two together are
what others are measured by: equal engines differ by percents, and what the second loses or gains
against the first says by how many. As they may differ for as long as they live, all are started
anew several times; a figure is the median over all rounds. There `tier`, ours with the prefix tier,
pages out each request that finishes, while the others go on; and `null` is vLLM's own with a KV
connector that does nothing, for what vLLM pays for having one. `--bursts 0` measures nothing else.

Several bursts are drawn from a seed; a figure is the median over them, and `bursts` has them all.
Lengths are log-normal, as chat logs are, or of another kind; or arrivals and lengths come from
traces (`t_s,prompt_tokens,output_tokens` as CSV, gzipped or not), each of them one burst. A trace
was recorded on another machine, so it is played faster or slower: unless a speed is given, such
that where most requests come they are twice the stable rate, as in the paper's burst. Where nothing
waited there was no contention, and no figure means anything: that is said, and counted in
`bursts_without_waiting`. An engine that recomputes may take many times as long as the others: it is
stopped at twice, and what it has not finished counts as ended then, so that the gain over it is at
least as printed (`bursts_recompute_stopped`).

Throughput is output tokens over busy time, in which any request was unfinished: neither an idle
engine nor the last arrival decides it.

With `--records FILE` each burst and the turns of each start are kept when they end, and the next
run with the same options goes on there.

What it shows: waiting, slicing, and the cost of paging relative to that of computing, on one real
engine. What it does not: a GPU's numbers. A CPU computes a prompt slowly, so recomputing looks
worse than on a GPU, and memory is as near as the store, so paging looks better than over PCIe.
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import signal
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from _burst_engine import NULL_CONNECTOR
from _burst_race import BLOCK_TOKENS, SHAPE, STORE_BYTES, Bench, note, race, started
from _bursts import (
    BURST_SERVICE_TIMES,
    CALM_COUNT,
    KINDS,
    STABLE_SHARE,
    busiest_rate,
    faster,
    paper_burst,
    read_trace,
    steady,
    throughput,
)
from _records import Records
from aqua_demo.engines.online_load import Arrival, Lengths, p99

CAPACITY_COUNT: Final = 60
"""Requests whose finishing rate is taken for the engine's capacity, when all are there at once."""
CALM_TRIAL_COUNT: Final = 100
"""Requests at the stable rate alone, for what one takes there."""

POLICY_NAMES: Final = ("fcfs", "recompute", "aqua", "best")
CONTROL: Final = "control"
TIER: Final = "tier"
NULL: Final = "null"
IDLE: Final[list[Arrival]] = [(0.0, 64, 40 + 20 * index) for index in range(8)]
"""Requests that fit into memory together: none waits, so nothing is to be decided. They end one by
one, so that what becomes of their prefixes falls into the steps of the others."""
IDLE_ROUNDS: Final = 30
IDLE_STARTS: Final = 5
"""Of engines, each for a share of the rounds. Doubled, starting takes as long as the rounds."""
SPEED_ROUNDS: Final = 20
"""Of looking for the speed of a trace; a few settle it. Doubled, nothing changes."""


BARS: Final = {
    "ttft_p99_gain": (">=", 5.0),
    "ttft_max_gain": (">=", 5.0),
    "completion_ratio_vs_fcfs": ("<=", 1.5),
    "completion_max_ratio_vs_fcfs": ("<=", 1.05),
    "throughput_ratio_vs_fcfs": (">=", 0.98),
    "completion_gain_vs_recompute": (">=", 2.0),
    "idle_throughput_ratio": (">=", 0.97),
}
BEST_BARS: Final = BARS | {"completion_ratio_vs_fcfs": ("<=", 1.25)}
KIND_BARS: Final = {"long-prompts": {"ttft_p99_gain": (">=", 4.0), "ttft_max_gain": (">=", 4.0)}}
"""Where the wait for a first token is other prompts' computation, which no order makes shorter."""


def main(  # noqa: PLR0913 - a command has as many arguments as options
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    with_raw: Annotated[bool, typer.Option("--raw", help="With --json: every burst.")] = False,
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="CSV of arrivals and lengths, one burst; may be given several times."),
    ] = None,
    speed: Annotated[
        float | None,
        typer.Option(
            help="How many times as fast traces are played; by default such that they contend."
        ),
    ] = None,
    kind: Annotated[
        str, typer.Option(help=f"Lengths that are drawn: {', '.join(KINDS)}.")
    ] = "chats",
    bursts: Annotated[int, typer.Option(help="Bursts to draw; 0 for none.", min=0)] = 5,
    seed: Annotated[int, typer.Option(help="Of the first burst; others follow.")] = 0,
    blocks: Annotated[int, typer.Option(help="KV blocks of 32 tokens.", min=24)] = 64,
    stable: Annotated[
        float, typer.Option(help="Stable rate over capacity.", min=0.1, max=1.0)
    ] = STABLE_SHARE,
    slice_iterations: Annotated[int, typer.Option(help="Engine steps of a slice.", min=1)] = 4,
    plot: Annotated[Path | None, typer.Option(help="Where to draw TTFT and TPOT (PNG).")] = None,
    records: Annotated[Path | None, typer.Option(help="Keeps bursts; a run goes on here.")] = None,
) -> None:
    """Measure bursts under four schedulers."""
    if kind not in KINDS:
        raise typer.BadParameter(f"{kind} is none of {', '.join(KINDS)}", param_hint="--kind")
    if speed is not None and not (0 < speed < math.inf):
        raise typer.BadParameter("a factor above 0", param_hint="--speed")
    traces = [read_trace(path, blocks * BLOCK_TOKENS // 4) for path in trace or []]
    inputs = {
        "blocks": blocks,
        "block_tokens": BLOCK_TOKENS,
        "slice_iterations": slice_iterations,
        "model": SHAPE,
    }
    drawing = {"kind": kind, "bursts": bursts, "seed": seed}
    played_traces = {"traces": [str(path) for path in trace or []], "speed": speed}
    kept = Records(records, inputs | drawing | played_traces | {"stable": stable})
    # Else engines that have no turn stay behind for ever.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = policies(slice_iterations)
    tier = {**(options["best"] or {}), "prefix_tier": True}
    loads: list[list[Arrival]] = []
    found: dict[str, Any] = {}
    raw: dict[str, dict[str, Any]] = {
        name: {"bursts": [], "idle": []} for name in (*POLICY_NAMES, CONTROL, TIER, NULL)
    }
    if bursts or traces:
        with started(options, blocks) as engines:
            if traces:
                loads, found = played(engines["fcfs"], traces, speed, stable, kept)
            else:
                loads, found = drawn(engines["fcfs"], kind, bursts, seed, stable, kept)
            serve(engines, loads, raw, kept)
    rivals = ("fcfs", "aqua", "best") if loads else ("fcfs", "best")
    others = {CONTROL: None, TIER: tier, NULL: NULL_CONNECTOR}
    calm_options = {name: options[name] for name in rivals} | others
    for start in range(IDLE_STARTS):
        rounds = kept.once(f"calm start {start}", partial(serve_idle, calm_options, blocks))
        for name, figures in ((name, each[name]) for each in rounds for name in each):
            raw[name]["idle"].append(figures["rows"])
            raw[name]["paged"] = figures["paged"]
    summary = summarize(raw)
    if plot is not None and loads:
        draw({name: raw[name]["bursts"][0]["rows"] for name in POLICY_NAMES}, plot)
    if as_json:
        machine = {"cpus": os.cpu_count(), "machine": platform.processor() or platform.machine()}
        samples = {"raw": raw, "loads": loads} if with_raw else {}
        print(json.dumps(summary | {"inputs": inputs | found, "machine": machine} | samples))
    else:
        show(summary, KIND_BARS.get(kind, {}) if not traces else {})


def serve(
    engines: dict[str, Bench],
    loads: list[list[Arrival]],
    raw: dict[str, dict[str, Any]],
    kept: Records,
) -> None:
    """Race the engines over the bursts; figures go into `raw`."""
    for index, load in enumerate(loads):
        note(f"burst {index + 1} of {len(loads)}: {len(load)} requests")
        figures_of = kept.once(f"burst {index}", partial(race, engines, load, "recompute"))
        for name, figures in figures_of.items():
            raw[name]["bursts"].append(figures)
        if not raw["fcfs"]["bursts"][-1]["most_waiting"]:
            note("nothing waited: no contention, so no figure means anything; try more --speed")


def serve_idle(
    options: dict[str, dict[str, Any] | None], blocks: int
) -> list[dict[str, dict[str, Any]]]:
    """Start these engines, and race them without contention for a share of all rounds."""
    with started(options, blocks) as engines:
        note("turns without contention")
        return [race(engines, IDLE) for _ in range(IDLE_ROUNDS // IDLE_STARTS)]


def policies(slice_iterations: int) -> dict[str, dict[str, Any] | None]:
    """Options of the adapter for each scheduler of the comparison."""
    fair = {"policy": "cfs", "slice_iterations": slice_iterations, "granularity_tokens": 0}
    cfs = {**fair, "prefix_tier": False}
    paging = {**cfs, "store_bytes": STORE_BYTES}
    options: tuple[dict[str, Any] | None, ...] = (
        None,
        {**cfs, "mode": "recompute"},
        paging,
        {**paging, "policy": "first-token"},
    )
    return dict(zip(POLICY_NAMES, options, strict=True))


def drawn(
    fcfs: Bench, kind: str, count: int, seed: int, stable: float, kept: Records
) -> tuple[list[list[Arrival]], dict[str, Any]]:
    """Bursts of a kind of lengths, and what was measured for them."""
    draw_kind = KINDS[kind]
    lengths = draw_kind(CAPACITY_COUNT + CALM_TRIAL_COUNT, -1)
    rate, service_s, found = kept.once("calm", partial(calm, fcfs, stable, lengths))
    loads = [paper_burst(rate, service_s, seed + index, draw_kind) for index in range(count)]
    return loads, found | {"seed": seed, "kind": kind}


def played(
    fcfs: Bench, traces: list[list[Arrival]], speed: float | None, stable: float, kept: Records
) -> tuple[list[list[Arrival]], dict[str, Any]]:
    """Traces at a speed, and what was measured for each."""
    loads, measured = [], []
    for index, trace in enumerate(traces):
        lengths = [(prompt, output) for _, prompt, output in trace]
        some = random.Random(index).choices(lengths, k=CAPACITY_COUNT + CALM_TRIAL_COUNT)
        rate, service_s, found = kept.once(f"calm {index}", partial(calm, fcfs, stable, some))
        factor = speed or contending_speed(trace, rate, service_s)
        note(f"trace {index + 1} is played {factor:.3g} times as fast as it was recorded")
        loads.append(faster(trace, factor))
        measured.append(found | {"speed": factor})
    return loads, {"traces": measured}


def contending_speed(arrivals: list[Arrival], rate: float, service_s: float) -> float:
    """How fast a trace is played so that its busiest minute brings twice the stable rate.

    A minute is scaled as in `_bursts`; being played faster, it covers more of the trace.
    """
    span_s = arrivals[-1][0]
    factor = 1.0
    for _ in range(SPEED_ROUNDS):
        window_s = min(BURST_SERVICE_TIMES * service_s * factor, max(span_s, 1e-3))
        factor = 2 * rate / busiest_rate(arrivals, window_s)
    return factor


def calm(fcfs: Bench, share: float, lengths: Lengths) -> tuple[float, float, dict[str, Any]]:
    """The stable rate, what a request takes at it, and how the paper's objective fares there.

    Args:
        fcfs: The engine to ask.
        share: Of its capacity.
        lengths: Of the requests that it is asked with.
    """
    everything = [(0.0, *pair) for pair in lengths[:CAPACITY_COUNT]]
    rows = race({"fcfs": fcfs}, everything)["fcfs"]["rows"]
    capacity = len(rows) / max(row["end_s"] for row in rows)
    note(f"capacity: {capacity:.2f} requests/s with everything there at once")
    stream = steady(lengths[CAPACITY_COUNT:], share * capacity, seed=-3)
    run = race({"fcfs": fcfs}, stream)["fcfs"]
    found = {
        "capacity_requests_per_s": capacity,
        "stable_share": share,
        "service_s": mean_completion(run["rows"]),
        "stable_ttft_p99_s": p99(ttfts(run["rows"])),
        "stable_tbt_p99_s": run["tbt_p99_s"],
    }
    note(
        f"{share:.2f} of it: a request takes {found['service_s']:.2f} s, TTFT"
        f" {found['stable_ttft_p99_s']:.2f} s, between tokens {run['tbt_p99_s']:.3f} s (p99)"
    )
    return share * capacity, found["service_s"], found


# --- Figures --------------------------------------------------------------------------------


def summarize(raw: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The keys of the paper's policy, and of ours under `best`; `bursts` has them one by one."""

    def of(name: str) -> dict[str, Any]:
        each = [
            compare({who: raw[who]["bursts"][index]["rows"] for who in POLICY_NAMES}, name)
            for index in range(len(raw[name]["bursts"]))
        ]
        found = {key: statistics.median(row[key] for row in each) for key in each[0]}
        return {**found, "idle_throughput_ratio": idle_ratio(raw, name), "bursts": each}

    uncontended = {
        "idle_control_ratio": control_ratio(raw),
        "null_connector_idle_ratio": idle_ratio(raw, NULL),
        "tier_idle_throughput_ratio": idle_ratio(raw, TIER),
        "tier_paged_blocks": raw[TIER]["paged"].get("blocks", {}),
    }
    if not raw["best"]["bursts"]:
        return uncontended | {"best": {"idle_throughput_ratio": idle_ratio(raw, "best")}}
    contended = {
        "bursts_recompute_stopped": sum(
            each.get("is_stopped", False) for each in raw["recompute"]["bursts"]
        ),
        "bursts_without_waiting": sum(not each["most_waiting"] for each in raw["fcfs"]["bursts"]),
    }
    return of("aqua") | {"best": of("best")} | uncontended | contended


def idle_ratio(raw: dict[str, dict[str, Any]], name: str) -> float:
    """Throughput over that of vLLM's own engines where nobody waits: the median round."""
    return statistics.median(
        2 * throughput(its) / (throughput(first) + throughput(second))
        for its, first, second in zip(
            raw[name]["idle"], raw["fcfs"]["idle"], raw[CONTROL]["idle"], strict=True
        )
    )


def control_ratio(raw: dict[str, dict[str, Any]]) -> float:
    """Throughput of one of vLLM's own engines over that of the other."""
    return statistics.median(
        throughput(second) / throughput(first)
        for first, second in zip(raw["fcfs"]["idle"], raw[CONTROL]["idle"], strict=True)
    )


def compare(runs: dict[str, list[dict[str, float]]], name: str) -> dict[str, float]:
    """The keys of one policy against the baselines on one burst."""
    fcfs, ours, recompute = (runs[who] for who in ("fcfs", name, "recompute"))
    return {
        "ttft_p99_gain": p99(ttfts(fcfs)) / p99(ttfts(ours)),
        "ttft_max_gain": max(ttfts(fcfs)) / max(ttfts(ours)),
        "completion_ratio_vs_fcfs": mean_completion(ours) / mean_completion(fcfs),
        "completion_max_ratio_vs_fcfs": max(completions(ours)) / max(completions(fcfs)),
        "throughput_ratio_vs_fcfs": throughput(ours) / throughput(fcfs),
        "completion_gain_vs_recompute": mean_completion(recompute) / mean_completion(ours),
    }


def ttfts(rows: list[dict[str, float]]) -> list[float]:
    """Seconds from arrival to the first token."""
    return [row["first_s"] - row["arrival_s"] for row in rows]


def completions(rows: list[dict[str, float]]) -> list[float]:
    """Seconds from arrival to the last token."""
    return [row["end_s"] - row["arrival_s"] for row in rows]


def mean_completion(rows: list[dict[str, float]]) -> float:
    """Mean of `completions`."""
    return statistics.fmean(completions(rows))


def draw(runs: dict[str, list[dict[str, float]]], path: Path) -> None:
    """TTFT and time per output token by request of a burst, as in the paper's Figures 1 and 8."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 6), sharex=True)
    labels = {
        "fcfs": "vLLM, first come first served",
        "recompute": "time slices, recomputing",
        "aqua": "time slices with Aqua (paper's policy)",
        "best": "first tokens first with Aqua (ours)",
    }
    for name, label in labels.items():
        rows = sorted(runs[name], key=lambda row: row["arrival_s"])
        tpots = [
            1000 * (row["end_s"] - row["first_s"]) / max(1, row["output_tokens"] - 1)
            for row in rows
        ]
        above.plot(ttfts(rows), label=label)
        below.plot(tpots, label=label)
    for axes in (above, below):
        axes.axvline(CALM_COUNT, color="grey", linewidth=0.5)
    above.set_ylabel("time to first token (s)")
    below.set_ylabel("time per output token (ms)")
    below.set_xlabel("request, by arrival")
    above.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def show(summary: dict[str, Any], other_bars: dict[str, tuple[str, float]]) -> None:
    """The figures beside their bars, some of which are others for a kind of lengths."""
    best = summary["best"]
    paper_bars, best_bars = BARS | other_bars, BEST_BARS | other_bars
    for name in ("idle_control_ratio", "null_connector_idle_ratio"):
        print(f"{name:32}{summary[name]:8.3f}")
    name = "tier_idle_throughput_ratio"
    print(f"{name:32}{summary[name]:8.3f}  >=0.97")
    if "bursts" not in best:
        print(f"{'idle_throughput_ratio':32}{best['idle_throughput_ratio']:8.3f}  >=0.97")
        return
    count = len(best["bursts"])
    print(f"{'':32}{'paper':>8}{'bar':>8}{'best':>8}{'bar':>8}")
    for name, (relation, bar) in paper_bars.items():
        bars = f"{relation}{bar:g}", f"{best_bars[name][0]}{best_bars[name][1]:g}"
        print(f"{name:32}{summary[name]:8.3f}{bars[0]:>8}{best[name]:8.3f}{bars[1]:>8}")
    for who, found, bounds in (("paper", summary, paper_bars), ("best", best, best_bars)):
        held = sum(all(holds(row[key], bounds[key]) for key in row) for row in found["bursts"])
        print(f"{who}: all but the idle bar hold on {held} of {count} bursts")


def holds(value: float, bar: tuple[str, float]) -> bool:
    """Whether a figure reaches its bar."""
    relation, bound = bar
    return value >= bound if relation == ">=" else value <= bound


if __name__ == "__main__":
    typer.run(main)
