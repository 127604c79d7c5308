"""The commands of `aqua-sim` that simulate the papers' experiments: `paper` and `blend`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aqua_cli import Json, Plot, print_json, print_table, progress, write_json
from aqua_protocol.errors import ConfigError

if TYPE_CHECKING:
    from aqua_simulator.papers.report import Reproduction

Interference = Annotated[float, typer.Option(help="Alpha of the step time.", min=0.0, max=1.0)]


def paper(  # noqa: PLR0917 - Typer hands options over by name
    names: Annotated[
        list[str],
        typer.Argument(
            help="table3, figure2, figure3, figure5 .. figure12, beyond (BlendServe), "
            "aqua-figure8 .. aqua-figure13, conserve-figure1 .. conserve-figure8, "
            "conserve-safepoints, conserve-beyond; a whole paper: blendserve, aqua, conserve; all. "
            "On one core: figure6 one minute, each of figure9 .. figure12 up to three, "
            "aqua-figure8 and aqua-figure13 four, others under one."
        ),
    ],
    request_count: Annotated[
        int, typer.Option("--requests", help="Requests per trace.", min=1000)
    ] = 400_000,
    seed: Annotated[int, typer.Option(help="Of workloads and samples.", min=0)] = 1,
    interference: Interference = 0.4,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with recorded lengths (arxiv_summarization*.csv[.gz])."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write the sections as Markdown here.")
    ] = None,
    plots: Annotated[Path | None, typer.Option("--plots", help="Folder for PNG files.")] = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps finished figures; what it holds is not run again."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Reproduce tables or figures of a paper and print ours beside the published numbers."""
    from aqua_simulator.papers.blendserve import Experiments
    from aqua_simulator.papers.figures import named, reproduce
    from aqua_simulator.papers.report import Reproduction, picture_of, write_page

    wanted = named(names)
    made: list[Reproduction] = []
    with progress("Simulating", total=len(wanted), quiet=as_json) as shown:
        experiments = Experiments(
            request_count=request_count,
            seed=seed,
            interference=interference,
            data=data,
            progress=lambda text: shown.update(note=text),
        )
        for done, key in enumerate(wanted):
            shown.update(done=done)
            kept = None
            if resume is not None:
                kept = resume / f"{key}-{request_count}-{seed}-{interference:g}.json"
            if kept is not None and kept.is_file():
                made.append(Reproduction.model_validate_json(kept.read_bytes()))
                continue
            figure = reproduce(key, experiments)
            made.append(figure)
            if plots is not None:
                figure.save_plot(picture_of(key, plots))
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_json(kept, figure)
    if output is not None:
        write_page(output, made, plots, names)
    if as_json:
        figures = [figure.model_dump(mode="json") for figure in made]
        print_json({"request_count": request_count, "seed": seed, "figures": figures})
        return
    for figure in made:
        _print_reproduction(figure)


def blend(  # noqa: PLR0917 - Typer hands options over by name
    policy: Annotated[
        str, typer.Option(help="dfs, fcfs, random, balanced, blendserve or foresight.")
    ] = "foresight",
    source: Annotated[str, typer.Option(help="Compute-bound source of the blend.")] = "BurstGPT",
    density: Annotated[float, typer.Option(help="Compute density of the blend.", min=0.01)] = 0.9,
    sharing: Annotated[float, typer.Option(help="Prefix sharing.", min=0.0, max=1.0)] = 0.35,
    request_count: Annotated[
        int, typer.Option("--requests", help="Requests of the blend.", min=100)
    ] = 400_000,
    sample: Annotated[
        float, typer.Option(help="Share of output lengths known from a sample.", min=1e-4, max=1.0)
    ] = 0.01,
    media_known: Annotated[
        bool, typer.Option("--media-known/--media-unknown", help="Media state their length.")
    ] = True,
    interference: Interference = 0.4,
    seed: Annotated[int, typer.Option(help="Of workload and sample.", min=0)] = 1,
    as_json: Json = False,
    plot: Plot = None,
) -> None:
    """Run an offline blend of BlendServe's sources under one policy."""
    import time
    from dataclasses import replace

    from aqua_simulator.offline.policies import OfflinePolicy
    from aqua_simulator.papers.blendserve import Experiments, Trace
    from aqua_simulator.workloads.sources import SOURCES

    known = [name.value for name in OfflinePolicy]
    if policy not in known:
        raise ConfigError(f"no policy named {policy!r}", remedy=f"Known: {', '.join(known)}.")
    if source not in SOURCES:
        raise ConfigError(f"no source named {source!r}", remedy=f"Known: {', '.join(SOURCES)}.")
    experiments = Experiments(request_count=request_count, seed=seed, interference=interference)
    trace = Trace(f"{source} ({density:g}, {sharing:g})", density, sharing, SOURCES[source])
    settings = replace(experiments.plan, sample_probability=sample, media_known=media_known)
    started = time.perf_counter()
    with progress(f"Running {request_count:,} requests", quiet=as_json):
        made = experiments.run(trace, OfflinePolicy(policy), settings=settings)
    if plot is not None:
        from aqua_simulator.plots import draw_usage

        draw_usage(made.result.usage, plot)
    result = {
        "policy": policy,
        "request_count": request_count,
        "makespan_s": made.result.makespan_s,
        "tokens_per_s": made.result.tokens_per_s,
        "optimal_s": made.bound.optimal_s,
        "share_of_optimum": made.optimal_share,
        "density": made.bound.density,
        "sharing": made.result.sharing,
        "sharing_of_optimum": made.sharing_share if made.optimal_sharing else 1.0,
        "steps": made.result.end.step,
        "retractions": made.result.end.retraction_count,
        "recomputed_tokens": made.result.recomputed_tokens,
        "peak_kv_tokens": made.result.end.peak_resident_tokens,
        "capacity_tokens": experiments.capacity_tokens,
    }
    if as_json:
        print_json(result)
        return
    print_values(f"{trace.name} under {policy}", result)
    typer.echo(f"Simulated in {time.perf_counter() - started:.1f} s.")


def print_values(title: str, values: Mapping[str, Any]) -> None:
    """Print a table of names and values, numbers with four digits."""
    rows = [
        (key, f"{value:.4g}" if isinstance(value, float) else str(value))
        for key, value in values.items()
    ]
    print_table(title, ("", "value"), rows)


def _print_reproduction(made: Reproduction) -> None:
    """A figure: where it comes from, rows, sensitivity, and what to know about it."""
    typer.echo(f"{made.source}.")
    print_table(made.title, made.columns, made.table)
    for each in made.chosen:
        typer.echo(f"- Chosen knowing the result: {each.name}, {each.value}: {each.why}")
    if made.sensitivity:
        rows = [(row.name, row.ours_text, row.unit or "") for row in made.sensitivity]
        print_table("Sensitivity", ("", "ours", "unit"), rows)
    for text in (*made.surrogates, *made.remarks):
        typer.echo(f"- {text}")
