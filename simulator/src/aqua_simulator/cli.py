"""`aqua-sim`: fit iteration times, check them, run engines on them, reproduce the papers.

Every command prints a table for people and, with `--json`, one JSON document for programs; plots
are PNG or SVG files. Heavy imports happen inside the commands, so that `--help` is quick.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from aqua_cli import Json, Output, Plot, print_json, print_table, progress, say
from aqua_cli import main as run_program
from aqua_protocol.errors import AquaError, ConfigError
from aqua_simulator.papers.cli import blend, paper, print_values
from aqua_simulator.whatif.cli import whatif

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float64

    from aqua_simulator.timing.fit import Fit

app = typer.Typer(
    name="aqua-sim",
    help="Simulate engines and clusters under Aqua's own policies.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


MOST_HOST_S: Final = 3600.0
"""Of the host's time in a step: more is a slip of the unit. Doubled, nothing changes."""

MOST: Final = 1e9
"""Of rates, factors, seconds and GB that are asked for: more is a slip too. Doubled, nothing
changes."""


def _amount(text: str, *names: str) -> Any:  # noqa: ANN401 - Typer's
    return typer.Option(*names, help=text, min=0.0, max=MOST)


FitFile = Annotated[
    Path | None,
    typer.Option("--fit", help="Fit file of `aqua-sim fit`; without it, the data sheet."),
]
ModelName = Annotated[str, typer.Option(help="Model name or Hugging Face config.")]
GpuName = Annotated[str, typer.Option(help="GPU name.")]
Width = Annotated[int, typer.Option("--tp", help="Tensor-parallel GPUs.", min=1)]
HostTime = Annotated[
    float, typer.Option(help="Host time per step, seconds.", min=0.0, max=MOST_HOST_S)
]


class Process(StrEnum):
    """Arrival processes of `run`."""

    TRACE = "trace"
    POISSON = "poisson"
    GAMMA = "gamma"
    ON_OFF = "on-off"
    BURST = "burst"


def main() -> None:
    """Entry point of the console script."""
    run_program(app, "aqua-sim")


@app.command()
def fit(
    profiles: Annotated[Path, typer.Argument(help="Folder with profile tables.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Fit file; .gz compresses.")],
    hold_out: Annotated[
        int, typer.Option(help="Leave every k-th row aside for `evaluate`; 0 uses all.", min=0)
    ] = 0,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Fit iteration times on a folder of profile tables."""
    from aqua_simulator.timing.fit import fit_samples
    from aqua_simulator.timing.profiles import read_folder

    if hold_out == 1:
        raise ConfigError("--hold-out 1 leaves no row to fit on", remedy="Use 2 or more.")
    samples = read_folder(profiles)
    result = fit_samples(samples, hold_out=hold_out)
    output.parent.mkdir(parents=True, exist_ok=True)
    result.save(output)
    if plot is not None:
        from aqua_simulator.plots import draw_fit

        draw_fit(result, plot)
    if as_json:
        functions = {
            key: {"kind": one.kind, "file": one.file, "row_count": one.row_count}
            for key, one in result.functions.items()
        }
        print_json({"fit": str(output), "hold_out": hold_out, "functions": functions})
        return
    files: dict[str, list[int]] = {}
    for one in result.functions.values():
        files.setdefault(one.file, []).append(one.row_count)
    print_table(
        f"Fitted {len(result.functions)} functions into {output}",
        ("file", "functions", "rows"),
        [(name, str(len(rows)), str(sum(rows))) for name, rows in sorted(files.items())],
    )


@app.command()
def evaluate(
    fit_path: Annotated[Path, typer.Option("--fit", help="Fit file of `aqua-sim fit`.")],
    profiles: Annotated[Path, typer.Option("--profiles", help="Folder with other rows.")],
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Report the error on rows that the fit has not seen (MAPE by operator and composite)."""
    from aqua_simulator.timing.evaluation import evaluate as score
    from aqua_simulator.timing.evaluation import overall
    from aqua_simulator.timing.fit import Fit
    from aqua_simulator.timing.profiles import read_folder

    scores = score(Fit.load(fit_path), read_folder(profiles))
    if not scores:
        raise ConfigError(
            "the fit has seen every row of the folder",
            remedy="Give other rows, or fit with --hold-out.",
        )
    levels = {level: overall(scores, level) for level in dict.fromkeys(one.level for one in scores)}
    if plot is not None:
        from aqua_simulator.plots import draw_scores

        draw_scores(scores, plot)
    if as_json:
        print_json({"overall_mape_percent": levels, "scores": [asdict(one) for one in scores]})
        return
    print_table(
        "Mean absolute percentage error on unseen rows",
        ("level", "name", "MAPE, %", "rows"),
        [(one.level, one.name, f"{one.mape_percent:.2f}", str(one.row_count)) for one in scores],
    )
    for level, value in levels.items():
        typer.echo(f"{level}: {value:.2f} % over all rows")


@app.command()
def run(  # noqa: PLR0917 - Typer hands options over by name
    lengths: Annotated[Path, typer.Option("--trace", help="Trace or length file (CSV).")],
    fit_path: FitFile = None,
    model: ModelName = "Llama-3-8B",
    gpu: GpuName = "A100-80GB",
    width: Width = 1,
    engines: Annotated[int, typer.Option(help="Engines behind one router.", min=1)] = 1,
    process: Annotated[
        Process, typer.Option(help="Arrivals: the trace's own, or generated.")
    ] = Process.TRACE,
    rate_per_s: Annotated[float, _amount("Requests per second.", "--rate")] = 1.0,
    count: Annotated[int, typer.Option("--requests", help="Generated requests.", min=1)] = 1000,
    variation: Annotated[float, _amount("Gap variation of `gamma`.")] = 2.0,
    on_s: Annotated[float, _amount("ON phase of `on-off`, seconds.")] = 60.0,
    off_s: Annotated[float, _amount("OFF phase of `on-off`, seconds.")] = 60.0,
    burst_factor: Annotated[float, _amount("Rate factor of `burst`.")] = 2.0,
    burst_start_s: Annotated[float, _amount("Start of the burst, seconds.")] = 60.0,
    burst_length_s: Annotated[float, _amount("Length of the burst, seconds.")] = 60.0,
    memory_share: Annotated[
        float, typer.Option(help="Share of HBM for weights and KV cache.", min=0.1, max=1.0)
    ] = 0.9,
    overhead_s: HostTime = 0.0,
    page_to: Annotated[
        str, typer.Option(help="Where preempted requests go: none, dram or peer.")
    ] = "none",
    page_gb: Annotated[float, _amount("Size of the page store, GB.")] = 64.0,
    copies_overlap: Annotated[
        bool,
        typer.Option("--copies-overlap/--copies-on-top", help="Copies hide behind computation."),
    ] = True,
    policy: Annotated[
        str, typer.Option(help="Who holds memory: fcfs, cfs or first-token (best for ours too).")
    ] = "fcfs",
    slice_iterations: Annotated[
        int, typer.Option("--slice", help="Engine steps of a turn.", min=1, max=10_000)
    ] = 5,
    fcfs_on_host: Annotated[
        bool, typer.Option("--fcfs-on-host", help="Preempt none while contexts go to DRAM.")
    ] = False,
    max_num_batched_tokens: Annotated[
        int, typer.Option(help="Token budget of a step.", min=1)
    ] = 2048,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once.", min=1)] = 256,
    seed: Annotated[int, typer.Option(help="Of generated arrivals.", min=0)] = 0,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Serve a trace on simulated engines with vLLM's rules, under a policy of `aqua_schedulers`."""
    from aqua_schedulers.cfs import FairSettings, PolicyName
    from aqua_simulator.serving.engine import serve_routed
    from aqua_simulator.serving.request import summary
    from aqua_simulator.serving.setup import EngineSpec
    from aqua_simulator.workloads.arrivals import burst, gamma, on_off, poisson, read_trace

    spec = EngineSpec(
        model=model,
        gpu=gpu,
        width=width,
        memory_share=memory_share,
        overhead_s=overhead_s,
        page_to=page_to,
        page_bytes=int(page_gb * 1e9),
        copies_overlap=copies_overlap,
        policy=PolicyName.named(policy),
        fair=FairSettings(slice_iterations=slice_iterations, fcfs_on_host=fcfs_on_host),
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
    )
    generators: dict[Process, Callable[..., Float64[np.ndarray, " count"]]] = {
        Process.POISSON: poisson,
        Process.GAMMA: partial(gamma, variation=variation),
        Process.ON_OFF: partial(on_off, on_s=on_s, off_s=off_s),
        Process.BURST: partial(
            burst, factor=burst_factor, start_s=burst_start_s, length_s=burst_length_s
        ),
    }
    times_s = None
    if process is not Process.TRACE:
        times_s = generators[process](count, rate_per_s=rate_per_s, seed=seed)
    arrivals = read_trace(lengths, times_s=times_s)
    table = _fit_or_none(fit_path)
    running = [spec.engine(table, name=f"engine-{index}") for index in range(engines)]
    with progress(f"Serving {len(arrivals):,} requests", quiet=as_json):
        served = serve_routed(running, arrivals)
    if plot is not None:
        from aqua_simulator.plots import draw_latencies

        draw_latencies({"served": served}, plot)
    result = summary(served)
    result["engines"] = [
        {
            "name": engine.name,
            "steps": engine.step_count,
            "busy_s": engine.busy_s,
            "preemptions": engine.preemption_count,
            "copy_s": engine.copy_s,
            "paged_out_tokens": engine.store.paged_out_tokens if engine.store else 0,
            "prefix_hit_share": engine.memory.hit_tokens / max(1, engine.memory.asked_tokens),
        }
        for engine in running
    ]
    if as_json:
        print_json(result)
        return
    print_values(
        f"{model} on {width} x {gpu}", {key: result[key] for key in result if key != "engines"}
    )
    print_table(
        "Engines",
        ("engine", "steps", "busy, s", "preemptions", "prefix hits"),
        [
            (
                one["name"],
                str(one["steps"]),
                f"{one['busy_s']:.1f}",
                str(one["preemptions"]),
                f"{one['prefix_hit_share']:.1%}",
            )
            for one in result["engines"]
        ],
    )


def _fit_or_none(path: Path | None) -> Fit | None:
    """The fit of a file; without one, a word on what stands in."""
    from aqua_simulator.timing.fit import Fit

    if path is not None:
        return Fit.load(path)
    say("No fit given: times are a roofline of the data sheet, a rough guess.")
    return None


@app.command("stable-rate")
def stable_rate_command(  # noqa: PLR0917 - Typer hands options over by name
    lengths: Annotated[
        Path, typer.Option(help="Prompt and output lengths: CSV or a trace, .gz or not.")
    ],
    fit_path: FitFile = None,
    model: ModelName = "Llama-3-8B",
    gpu: GpuName = "A100-80GB",
    width: Width = 1,
    overhead_s: HostTime = 0.0,
    ttft_s: Annotated[
        float, typer.Option(min=0.001, help="Limit of the median time to first token.")
    ] = 1.0,
    tbt_p99_s: Annotated[
        float, typer.Option(min=0.0001, help="Limit of the p99 of the time between tokens.")
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths.", min=0)] = 0,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Predict the rate that an engine sustains, for `aqua profile run llm --predicted` to begin at.

    The file is an idea for the profiler's first trial, and no measurement.
    """
    from aqua_cli import write_json
    from aqua_protocol.prediction import PredictedRate
    from aqua_simulator.serving.setup import EngineSpec
    from aqua_simulator.serving.stable_rate import stable_rate
    from aqua_simulator.workloads.arrivals import read_lengths

    spec = EngineSpec(model=model, gpu=gpu, width=width, overhead_s=overhead_s)
    table = _fit_or_none(fit_path)
    pairs = [(int(prompt), int(generated)) for prompt, generated in read_lengths(lengths)]
    with progress("Looking for the rate", quiet=as_json) as shown:
        rate_per_s = stable_rate(
            lambda: spec.engine(table, name="engine"),
            pairs,
            ttft_s=ttft_s,
            tbt_s=tbt_p99_s,
            seed=seed,
            on_progress=lambda tried: shown.update(note=f"{tried:.3g}/s"),
        )
    found = PredictedRate(
        model=model,
        gpu=gpu,
        rate_per_s=rate_per_s,
        ttft_s=ttft_s,
        tbt_s=tbt_p99_s,
        told_by="a fit of kernel tables" if table else "a roofline of the data sheet",
    )
    if output is not None:
        write_json(output, found)
    if as_json:
        print_json(found.model_dump())
    else:
        typer.echo(f"{model} on {width} x {gpu}: {rate_per_s:.3g} requests/s")


@app.command()
def replay(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder with recordings (*_requests.csv[.gz], *.jsonl, JSON of `vllm bench serve "
            "--save-detailed`), their *_meta.json, and kernel tables if there are any."
        ),
    ],
    fit_path: Annotated[
        Path | None, typer.Option("--fit", help="Fit file; default: the folder's own tables.")
    ] = None,
    calibrate_on: Annotated[
        float,
        typer.Option(
            "--calibrate",
            help="Share of the run, from its start, to choose the host overhead on; 0 for none.",
            min=0.0,
            max=0.5,
        ),
    ] = 0.2,
    gpu: Annotated[
        str | None, typer.Option(help="GPU of the recordings, where they do not say.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model of the recordings, where they do not say.")
    ] = None,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Compare against recorded runs of a real engine.

    What a recording does not say of its engine is assumed and told. One that cannot be read is
    named, the others are replayed, and the command ends with 2.
    """
    from aqua_simulator.serving.recordings import read_recordings
    from aqua_simulator.serving.replay import (
        calibrate,
        compare,
        errors_by_metric,
        iteration_time,
        simulate,
    )
    from aqua_simulator.timing.fit import Fit

    table = Fit.load(fit_path) if fit_path else None
    found = read_recordings(folder, gpu=gpu, model=model)
    refused = dict(found.refused)
    document: list[dict[str, Any]] = []
    for recording in found.recordings:
        try:
            time_of, timed_by = iteration_time(folder, recording, table)
            if calibrate_on > 0.0:
                time_of = calibrate(recording, time_of, first=calibrate_on)
            served, engine = simulate(recording, time_of)
        except AquaError as error:
            refused[recording.name] = f"{error.message} {error.remedy or ''}".strip()
            continue
        rows = compare(recording, served)
        document.append(
            {
                "name": recording.name,
                "gpu": recording.gpu,
                "model": recording.model_key,
                "request_count": len(recording.served),
                "calibrated_on_first": calibrate_on,
                "host_overhead_s": time_of.overhead_s,
                "timed_by": timed_by,
                "assumed": list(recording.assumed),
                "steps": engine.step_count,
                "preemptions": engine.preemption_count,
                "rows": rows,
            }
        )
        if plot is not None:
            from aqua_simulator.plots import draw_latencies

            # Of several recordings each has a picture of its own.
            several = len(found.recordings) > 1
            path = plot.with_stem(f"{plot.stem}-{recording.name}") if several else plot
            draw_latencies({"recorded": recording.served, "simulated": served}, path)
        if not as_json:
            _print_replayed(document[-1])
    errors = errors_by_metric({one["name"]: one["rows"] for one in document})
    if as_json:
        print_json({"recordings": document, "errors": errors, "refused": refused})
    elif len(document) > 1:
        _print_errors(errors, len(document))
    for name, reason in refused.items():
        say(f"Not replayed: {name}: {reason}")
    if refused:
        raise typer.Exit(2)


def _print_replayed(one: Mapping[str, Any]) -> None:
    """A recording beside its replay, and what was assumed."""
    overhead_ms, share = one["host_overhead_s"] * 1e3, one["calibrated_on_first"]
    print_table(
        f"{one['name']}: {one['request_count']} requests of {one['model']} on {one['gpu']}, host "
        f"overhead {overhead_ms:.2f} ms from the first {share:.0%}",
        ("", "recorded", "simulated", "difference, %"),
        [
            (name, f"{real:.4g}", f"{ours:.4g}", f"{off:+.2f}")
            for name, real, ours, off in (row.values() for row in one["rows"])
        ],
    )
    say(f"Step times: {one['timed_by']}.")
    for text in one["assumed"]:
        say(f"Assumed: {text}.")


def _print_errors(errors: Sequence[Mapping[str, Any]], count: int) -> None:
    """Errors by metric over a folder."""
    print_table(
        f"Errors over {count} recordings",
        ("", "mean, %", "worst, %", "of"),
        [
            (
                one["name"],
                f"{one['mean_absolute_percent']:.2f}",
                f"{one['worst_percent']:+.2f}",
                one["worst_recording"],
            )
            for one in errors
        ],
    )


app.command()(paper)
app.command()(blend)
app.command()(whatif)
