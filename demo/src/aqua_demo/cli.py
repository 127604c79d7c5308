"""`aqua-demo`: the command.

Exit status 0 means that every claim of the report holds; 1 that one does not, or that the run broke
off, with the reason on standard error; 2 that an option is wrong; 130 after Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer

from aqua_protocol import AquaError, ConfigError, TransportKind

if TYPE_CHECKING:
    from types import FrameType

    from rich.console import Console

    from aqua_demo.orchestration import Story
    from aqua_demo.planned import Arrangement
    from aqua_demo.report import DemoReport
    from aqua_demo.view import View

EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def demo(  # noqa: PLR0917 - a command has as many arguments as options
    transport: Annotated[
        TransportKind | None,
        typer.Option(help="How memory is shared; the best that works here if left out."),
    ] = None,
    output_directory: Annotated[
        Path,
        typer.Option("--output-dir", help="Where the report, the plot and the logs go."),
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
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, without its timeline.")
    ] = False,
    corrupt_one_byte: Annotated[
        bool,
        typer.Option(
            "--corrupt-one-byte",
            help="Negative control: change one stored byte on the way. The demo must fail.",
        ),
    ] = False,
) -> None:
    """Show one process's idle memory harvested by another, taken back and lent again."""
    from rich.console import Console

    console = Console(stderr=True)
    # A terminal that hangs up, or a supervisor that stops us, ends the children as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        logs = _prepare(output_directory)
        from aqua_demo.orchestration import Options, Story

        name = "quick" if quick else "full"
        arrangement = _arrangement(name, profile or [], plan)
        options = Options(
            scale=name,
            transport=transport,
            seed=seed,
            checksum=checksum,
            corrupt_one_byte=corrupt_one_byte,
            logs=logs,
            spare_images=None if arrangement is None else arrangement.spare_images,
            pairings=None if arrangement is None else arrangement.pairings,
        )
        with _view(console, quiet=as_json) as view:
            story = Story(options, view)
            report = story.run()
        _publish(report, story, output_directory, console, as_json=as_json)
    except AquaError as error:
        console.print(f"aqua-demo: {error.message}", style="red", markup=False)
        if error.remedy:
            console.print(error.remedy, markup=False)
        raise typer.Exit(EXIT_FAILED) from error
    except KeyboardInterrupt:
        console.print("interrupted; everything is stopped")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    for claim in report.claims:
        if not claim.holds:
            console.print(
                f"aqua-demo: not so: {claim.text}: {claim.reason}", style="red", markup=False
            )
    if not report.succeeded:
        raise typer.Exit(EXIT_FAILED)


def _arrangement(scale: str, profiles: list[Path], plan: Path | None) -> Arrangement | None:
    """What profiles and plan say, if there are any."""
    if plan is None and not profiles:
        return None
    if plan is None or not profiles:
        raise ConfigError(
            "profiles and a plan go together", remedy="Give --profile twice and --plan."
        )
    from aqua_demo.planned import read_arrangement
    from aqua_demo.scale import SCALES

    return read_arrangement(SCALES[scale], profiles, plan)


def _prepare(directory: Path) -> Path:
    """Make the directories, and say where logs go."""
    logs = directory / "demo-logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {directory}: {error}",
            remedy="Choose a writable directory with --output-dir.",
        ) from error
    return logs


def _view(console: Console, *, quiet: bool) -> View:
    from aqua_demo.view import LiveView, PlainView, QuietView

    if quiet:
        return QuietView()
    return LiveView(console) if console.is_terminal else PlainView(console)


def _publish(
    report: DemoReport, story: Story, directory: Path, console: Console, *, as_json: bool
) -> None:
    """Write the report and the plot; print the summary."""
    from aqua_demo.plot import draw
    from aqua_demo.view import summary

    report_path, plot_path = directory / "demo-report.json", directory / "demo-plot.png"
    report_path.write_text(report.model_dump_json(indent=2) + "\n", encoding="utf-8")
    draw(
        story.timeline,
        plot_path,
        subtitle=f"{report.scale} size, {report.transport}, torch"
        f" {report.versions['torch']}; {report.machine}. {report.remark}",
    )
    if as_json:
        sys.stdout.write(report.model_dump_json(indent=2, exclude={"timeline"}) + "\n")
    else:
        console.print(summary(report))
        console.print(f"report  {report_path}\nplot    {plot_path}", markup=False, highlight=False)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise KeyboardInterrupt


def main() -> None:
    """Entry point of `aqua-demo`."""
    app()
