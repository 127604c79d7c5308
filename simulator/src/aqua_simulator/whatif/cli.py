"""The command `aqua sim whatif`: what Aqua would save on a recorded cluster."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aqua_cli import Json, print_json, print_table, progress, say
from aqua_protocol.errors import ConfigError

if TYPE_CHECKING:
    from aqua_simulator.whatif.cluster import Cluster, InputFinding
    from aqua_simulator.whatif.report import SavingsReport


def whatif(  # noqa: PLR0917 - Typer hands options over by name
    traces: Annotated[
        list[Path] | None,
        typer.Argument(
            help="CSV files: t_s, model, prompt_tokens, output_tokens; ttft_s and latency_s (or "
            "first_token_s and last_token_s) if known."
        ),
    ] = None,
    cluster_path: Annotated[
        Path | None,
        typer.Option("--cluster", help="Deployment list, YAML or JSON: models, GPUs, prices."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Plan of `aqua place`: who lends to whom, and what runs.")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="GPU of a plan that comes without --cluster.")
    ] = None,
    prometheus: Annotated[
        str | None, typer.Option(help="URL of a Prometheus, in place of traces.")
    ] = None,
    prometheus_token: Annotated[
        str | None,
        typer.Option(envvar="AQUA_PROMETHEUS_TOKEN", help="Bearer token that it wants."),
    ] = None,
    end: Annotated[
        datetime | None, typer.Option(help="Until when to ask it, in UTC; default: now.")
    ] = None,
    window_s: Annotated[
        float, typer.Option("--window", help="Seconds of a window of it.", min=1.0, max=86_400.0)
    ] = 300.0,
    hours: Annotated[
        float | None,
        typer.Option(
            help="What the traces cover, from time 0; of Prometheus, for how long (24).",
            min=0.01,
            max=24 * 31,
        ),
    ] = None,
    silence: Annotated[
        str, typer.Option(help="A long silence of all models is: unknown (cut out) or idle.")
    ] = "unknown",
    seeds: Annotated[
        int, typer.Option(help="Days drawn beside the recorded one, for intervals.", min=0, max=99)
    ] = 3,
    samples: Annotated[
        int, typer.Option(help="Pieces of the day that are co-served.", min=1, max=10_000)
    ] = 6,
    sample_s: Annotated[
        float, typer.Option(help="Seconds of such a piece.", min=1.0, max=86_400.0)
    ] = 60.0,
    sensitivity: Annotated[
        bool, typer.Option(help="Find out which assumption matters most; half of the time.")
    ] = True,
    contention: Annotated[
        bool,
        typer.Option(help="Copies, collectives and kernels share links and memory bandwidth."),
    ] = True,
    interference: Annotated[
        Path | None,
        typer.Option(
            help="Measured curve, CSV: copy_share (of memory bandwidth), slowdown of kernels; "
            "default: what copies leave of the bandwidth."
        ),
    ] = None,
    exact: Annotated[
        bool, typer.Option(help="Plan every step by itself: hours for what takes minutes.")
    ] = False,
    processes: Annotated[
        int, typer.Option(help="To simulate in; results do not depend on it.", min=1, max=256)
    ] = 2,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the report as one HTML file with plots.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what Aqua would save on a cluster, from its recorded day.

    The day is simulated without Aqua and held to the recording, errors first; then with
    harvesting, fair slices, co-serving and blended batches, each alone and together. Input that is
    not as it should be is named, and left out.
    """
    from aqua_simulator.timing.contention import read_interference
    from aqua_simulator.whatif.answer import SENSITIVITIES, ask
    from aqua_simulator.whatif.prometheus import PrometheusSource, read_prometheus
    from aqua_simulator.whatif.recorded_day import read_day

    if silence not in {"unknown", "idle"}:
        raise ConfigError(f"a silence cannot be {silence!r}", remedy="unknown or idle.")
    if interference is not None and not contention:
        raise ConfigError(
            "a curve without contention is of no use",
            remedy="Leave out --interference or --no-contention.",
        )
    cluster, findings = _cluster(cluster_path, plan, gpu)
    if interference is not None:
        cluster = replace(cluster, interference=read_interference(interference))
    elif not contention:
        cluster = replace(cluster, interference=None)
    if bool(traces) == bool(prometheus):
        raise ConfigError(
            "give one recording", remedy="Give traces as CSV files, or --prometheus URL."
        )
    if traces:
        day = read_day(
            traces, list(cluster.engines), hours=hours, is_silence_idle=silence == "idle"
        )
    else:
        assert prometheus is not None, "checked above"
        end_s = (end or datetime.now(UTC)).replace(tzinfo=UTC).timestamp()
        start_s = end_s - (hours or 24.0) * 3600.0
        source = PrometheusSource(prometheus, start_s, end_s, window_s, prometheus_token)
        with progress("Asking Prometheus", quiet=as_json):
            day = read_prometheus(source, cluster)
    with progress("Simulating", total=1.0, quiet=as_json, log_every_s=30.0) as shown:
        answer = ask(
            cluster,
            day,
            [*findings, *day.findings],
            seeds=seeds,
            processes=processes,
            sample_count=samples,
            sample_s=sample_s,
            sensitivities=SENSITIVITIES if sensitivity else (),
            is_exact=exact,
            on_progress=lambda done, note: shown.update(done=done, note=note),
        )
    if html is not None:
        from aqua_simulator.whatif.html_report import write_report

        write_report(html, answer)
    if as_json:
        print_json(answer.document())
    else:
        print_answer(answer)


def _cluster(
    listed: Path | None, plan: Path | None, gpu: str | None
) -> tuple[Cluster, list[InputFinding]]:
    """The cluster of a list, of a plan, or of both."""
    from aqua_simulator.whatif.cluster import read_cluster, read_plan

    if listed is not None:
        cluster, findings = read_cluster(listed)
        if plan is None:
            return cluster, findings
        cluster, of_plan = read_plan(plan, gpu=gpu, cluster=cluster)
        return cluster, [*findings, *of_plan]
    if plan is None:
        raise ConfigError("no cluster is given", remedy="Give --cluster FILE or --plan FILE.")
    return read_plan(plan, gpu=gpu)


def print_answer(answer: SavingsReport) -> None:
    """The answer as tables, the twin's errors first."""
    from aqua_simulator.whatif.report import (
        Interval,
        check_table,
        contention_table,
        interval_text,
        latency_table,
        number_table,
    )

    def milliseconds(found: Interval | None) -> str:
        return "-" if found is None else f"{found.value * 1e3:.1f}"

    if answer.checks:
        print_table(*check_table(answer))
    for finding in answer.findings:
        say(f"{finding.kind}: {finding.where}: {finding.message}")
    typer.echo(
        f"{answer.gpu_count} GPUs over {answer.hours:.2f} h, idle for "
        f"{interval_text(answer.idle_gpu_hours)} GPU h"
    )
    _, columns, rows = number_table(answer)
    print_table(
        "What Aqua would bring: the recorded day (least to most of all days)", columns, rows
    )
    _, columns, rows = latency_table(answer, milliseconds)
    print_table("Latencies of the recorded day, ms", columns, rows)
    if answer.contention:
        title, columns, rows = contention_table(answer)
        print_table(f"{title}, on the recorded day", columns, rows)
    if answer.swings:
        _print_swings(answer)
    for remark in answer.remarks:
        typer.echo(f"- {remark}")


def _print_swings(answer: SavingsReport) -> None:
    print_table(
        "Which assumption matters most (all parts together)",
        ("", "offline work, GPU h", "memory, GB h", "moves by, %"),
        [
            (
                each.assumption,
                " to ".join(f"{value:.3g}" for value in each.offline_gpu_hours),
                " to ".join(f"{value:.3g}" for value in each.memory_gb_hours),
                f"{each.share * 100:.0f}",
            )
            for each in answer.swings
        ],
    )
