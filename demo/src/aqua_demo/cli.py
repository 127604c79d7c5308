"""`aqua-demo`: the command.

Exit status 0 means that every claim of the report holds, 1 that one does not or that the run broke
off; the rest is as for all commands (`aqua_cli.ExitCode`). What was learned goes to
`demo-report.json`, a picture of it to `demo-plot.png`, what each process said to `demo-logs/`.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from aqua_cli import ExitCode, Json, print_json, say, write_json
from aqua_cli import main as run_app
from aqua_protocol import TransportKind

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(  # noqa: PLR0917 - a command has as many arguments as options
    transport: Annotated[
        TransportKind | None,
        typer.Option(help="How memory is shared; the best that works here if left out."),
    ] = None,
    output_directory: Annotated[
        Path, typer.Option("--output-dir", help="Where the report, the plot and the logs go.")
    ] = Path(),
    quick: Annotated[bool, typer.Option("--quick", help="Small models; half a minute.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, sampling and arrivals.")] = 0,
    checksum: Annotated[
        bool, typer.Option("--checksum", help="Check every block that comes back.")
    ] = False,
    profile: Annotated[
        list[Path] | None,
        typer.Option(help="Profiles of both programs, by aqua-profile; with --plan."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Plan of aqua-place that the coordinator obeys.")
    ] = None,
    as_json: Json = False,
    corrupt_one_byte: Annotated[
        bool,
        typer.Option(
            "--corrupt-one-byte",
            help="Negative control: change one stored byte on the way. The demo must fail.",
        ),
    ] = False,
) -> None:
    """Show one process's idle memory harvested by another, taken back and lent again."""
    # A terminal that hangs up, or a supervisor that stops us, ends the children as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    logs = output_directory / "demo-logs"
    logs.mkdir(parents=True, exist_ok=True)
    from rich.console import Console

    from aqua_demo.orchestration import DemoRun, Options
    from aqua_demo.planned import read_arrangement
    from aqua_demo.plot import draw
    from aqua_demo.scale import SCALES
    from aqua_demo.view import RunView, summary

    size = "quick" if quick else "full"
    scale, pairings = read_arrangement(SCALES[size], profile or [], plan)
    options = Options(
        size=size,
        scale=scale,
        transport=transport,
        seed=seed,
        checksum=checksum,
        corrupt_one_byte=corrupt_one_byte,
        logs=logs,
        pairings=pairings,
    )
    console = Console(stderr=True, quiet=as_json)
    try:
        with RunView(console) as view:
            story = DemoRun(options, view)
            report = story.run()
    except KeyboardInterrupt:
        say("everything is stopped")
        raise
    report_path = output_directory / "demo-report.json"
    plot_path = output_directory / "demo-plot.png"
    write_json(report_path, report)
    draw(story.record, plot_path, subtitle=report.caption)
    if as_json:
        print_json(report.model_dump(mode="json", exclude={"timeline"}))
    else:
        console.print(summary(report))
        say(f"report  {report_path}\nplot    {plot_path}")
    for claim in report.claims:
        if not claim.holds:
            say(f"aqua-demo: not so: {claim.text}: {claim.reason}")
    if not report.succeeded:
        raise typer.Exit(ExitCode.FAILED)


def main() -> None:
    """Entry point of `aqua-demo`."""
    run_app(app, "aqua-demo")
