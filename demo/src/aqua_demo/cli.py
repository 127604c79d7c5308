"""`aqua-demo`: the commands; by itself, the demo of lent memory.

Exit status 0 means that every claim of the report holds, 1 that one does not or that the run broke
off; the rest is as for all commands (`aqua_cli.ExitCode`). What was learned goes to
`demo-report.json`, a picture of it to `demo-plot.png`, what each process said to `demo-logs/`.
"""

from __future__ import annotations

import signal
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aqua_cli import ExitCode, Json, print_json, say, write_json
from aqua_cli import main as run_app
from aqua_protocol import ConfigError, TransportKind

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from aqua_demo.engine_report import EngineDemoReport
    from aqua_demo.report import DemoReport

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

OutputDirectory = Annotated[
    Path, typer.Option("--output-dir", help="Where the report, the plot and the logs go.")
]


@app.callback(invoke_without_command=True)
def demo(  # noqa: PLR0917 - a command has as many arguments as options
    context: typer.Context,
    transport: Annotated[
        TransportKind | None,
        typer.Option(help="How memory is shared; the best that works here if left out."),
    ] = None,
    output_directory: OutputDirectory = Path(),
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
    if context.invoked_subcommand is not None:
        return
    logs = _prepare(output_directory)
    from rich.console import Console

    from aqua_demo.orchestration import DemoRun, Options
    from aqua_demo.planned import read_arrangement
    from aqua_demo.plot import draw
    from aqua_demo.scale import SCALES
    from aqua_demo.view import ConsoleView, summary

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
        with ConsoleView(console) as view:
            story = DemoRun(options, view)
            report = story.run()
    except KeyboardInterrupt:
        say("everything is stopped")
        raise
    plot_path = output_directory / "demo-plot.png"
    draw(story.record, plot_path, subtitle=report.caption)
    shown = report.model_dump(mode="json", exclude={"timeline"})
    _conclude(console, report, summary(report), shown, plot_path, as_json=as_json)


@app.command("co-serving")
def co_serving(
    output_directory: OutputDirectory = Path(),
    quick: Annotated[
        bool, typer.Option("--quick", help="A smaller model, fewer requests.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, arrivals and prompts.")] = 0,
    as_json: Json = False,
) -> None:
    """Show a real vLLM that serves people in bursts, and an offline file in the gaps.

    Four vLLM engines run by turns, so that all meet the same machine: two with the online requests
    alone (how far these are apart is the noise), one with the offline file alone, and the one that
    co-serves. It shows that every answer equals stock vLLM's while offline requests give their
    memory up for online ones, and tells TTFT, TPOT and the share of the gaps that was filled. It
    needs vLLM beside Aqua (in a checkout: `make demo-coserve`) and takes about ten minutes on two
    idle cores, a third of it with --quick; what is seen on a GPU, a CPU cannot say.
    """
    _require("vllm", "co-serving")
    logs = _prepare(output_directory)
    from rich.console import Console

    from aqua_demo.co_serving import CoServingDemoRun
    from aqua_demo.co_serving_plot import draw
    from aqua_demo.co_serving_view import summary
    from aqua_demo.view import ConsoleView

    console = Console(stderr=True, quiet=as_json)
    try:
        with ConsoleView(console) as view:
            story = CoServingDemoRun("quick" if quick else "full", seed, logs, view)
            report = story.run()
    except KeyboardInterrupt:
        say("everything is stopped")
        raise
    plot_path = output_directory / "demo-plot.png"
    draw(story.runs, plot_path, subtitle=report.caption)
    shown = report.model_dump(mode="json")
    _conclude(console, report, summary(report), shown, plot_path, as_json=as_json)


@app.command("batch")
def batch(
    output_directory: OutputDirectory = Path(),
    quick: Annotated[
        bool, typer.Option("--quick", help="A smaller model, fewer requests.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, arrivals and prompts.")] = 0,
    as_json: Json = False,
) -> None:
    """Show a batch of OpenAI's API on harvested memory and time, while parts of it are killed.

    A producer lends memory; a real vLLM serves people and, in their gaps, the batch, with
    checkpoints in that memory; a second vLLM is for the batch alone. Amid the batch the producer
    takes its memory back, and a dispatcher and the second vLLM are killed. It shows that each
    request is answered once and as stock vLLM does, and tells what people lost, and what order and
    gaps brought. It needs vLLM beside Aqua (in a checkout: `make demo-batch`) and takes about ten
    minutes on two idle cores, half of it with --quick; what is seen on a GPU, a CPU cannot say.
    """
    for module in ("vllm", "openai", "sqlalchemy"):
        _require(module, "batch")
    logs = _prepare(output_directory)
    from rich.console import Console

    from aqua_demo.batch import BatchDemoRun
    from aqua_demo.batch_plot import draw
    from aqua_demo.batch_view import summary
    from aqua_demo.view import ConsoleView

    console = Console(stderr=True, quiet=as_json)
    try:
        with ConsoleView(console) as view:
            story = BatchDemoRun("quick" if quick else "full", seed, logs, view)
            report = story.run()
    except KeyboardInterrupt:
        say("everything is stopped")
        raise
    plot_path = output_directory / "demo-plot.png"
    draw(story.runs, story.done, story.moments, plot_path, subtitle=report.caption)
    shown = report.model_dump(mode="json")
    _conclude(console, report, summary(report), shown, plot_path, as_json=as_json)


def _require(module: str, command: str) -> None:
    if find_spec(module) is None:
        target = "demo-coserve" if command == "co-serving" else "demo-batch"
        raise ConfigError(
            f"`aqua-demo {command}` needs {module}, which is not installed here",
            remedy=f"In a checkout, `make {target}` makes an environment with a vLLM for CPUs;"
            f" elsewhere install `aqua-demo[batch]` beside your vLLM.",
        )


def _prepare(output_directory: Path) -> Path:
    """Have an end from outside end the children, too; returns the folder for logs."""
    # A terminal that hangs up, or a supervisor that stops us, ends the children as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    logs = output_directory / "demo-logs"
    logs.mkdir(parents=True, exist_ok=True)
    return logs


def _conclude(
    console: Console,
    report: DemoReport | EngineDemoReport,
    seen: RenderableType,
    shown: dict[str, Any],
    plot_path: Path,
    *,
    as_json: bool,
) -> None:
    """Write the report beside the plot, show it, and end with what the claims say."""
    report_path = plot_path.with_name("demo-report.json")
    write_json(report_path, report)
    if as_json:
        print_json(shown)
    else:
        console.print(seen)
        say(f"report  {report_path}\nplot    {plot_path}")
    for claim in report.claims:
        if not claim.holds:
            say(f"aqua-demo: not so: {claim.text}: {claim.reason}")
    if not report.succeeded:
        raise typer.Exit(ExitCode.FAILED)


def main() -> None:
    """Entry point of `aqua-demo`."""
    run_app(app, "aqua-demo")
