"""`aqua-demo`: the commands; by itself, the demo of lent memory.

Exit status 0 means that every claim of the report holds, 1 that one does not or that the run broke
off; the rest is as for all commands (`aqua_cli.ExitCode`). What was learned goes to
`demo-report.json`, a picture of it to `demo-plot.png`, what each process said to `demo-logs/`.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from aqua_cli import ExitCode, Json, print_json, say, write_json
from aqua_cli import main as run_app
from aqua_protocol import ConfigError, TransportKind

if TYPE_CHECKING:
    from rich.console import RenderableType

    from aqua_demo.claims import ClaimsReport
    from aqua_demo.view import ConsoleView

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

PLOT: Final = "demo-plot.png"

OutputDirectory = Annotated[
    Path, typer.Option("--output-dir", help="Where the report, the plot and the logs go.")
]


Quick = Annotated[bool, typer.Option("--quick", help="Smaller models, less to do.")]
Seed = Annotated[int, typer.Option(min=0, help="Of all that is random.")]


@app.callback(invoke_without_command=True)
def demo(  # noqa: PLR0917 - a command has as many arguments as options
    context: typer.Context,
    transport: Annotated[
        TransportKind | None,
        typer.Option(help="How memory is shared; the best that works here if left out."),
    ] = None,
    output_directory: OutputDirectory = Path(),
    quick: Quick = False,
    seed: Seed = 0,
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
    coordinator: Annotated[
        str | None,
        typer.Option(help="URL of one that runs, instead of one for this run; not with --plan."),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(envvar="AQUA_TOKEN", help="Of a producer and consumer; for --coordinator."),
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
    from aqua_demo.lending.planned import read_arrangement
    from aqua_demo.lending.plot import draw
    from aqua_demo.lending.run import DemoRun, Options
    from aqua_demo.lending.view import summary
    from aqua_demo.processes import DemoCoordinator
    from aqua_demo.scale import SCALES

    if coordinator is not None and plan is not None:
        raise ConfigError(
            "the demo's plan would replace the one that a running coordinator obeys",
            remedy="Give --plan without --coordinator: the demo then starts one.",
        )
    size = _size(quick=quick)
    scale, pairings = read_arrangement(SCALES[size], profile or [], plan)
    options = Options(
        size=size,
        scale=scale,
        transport=transport,
        seed=seed,
        checksum=checksum,
        corrupt_one_byte=corrupt_one_byte,
        logs=_prepare(output_directory),
        pairings=pairings,
        coordinator=DemoCoordinator(coordinator, token, token) if coordinator else None,
    )
    with _watching(as_json=as_json) as view:
        story = DemoRun(options, view)
        report = story.run()
    draw(story.record, output_directory / PLOT, subtitle=report.caption)
    _conclude(report, summary(report), output_directory, as_json=as_json)


@app.command("co-serving")
def co_serving(
    output_directory: OutputDirectory = Path(),
    quick: Quick = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Show a real vLLM that serves people in bursts, and an offline file in the gaps.

    Four vLLM engines run by turns, so that all meet the same machine: two with the online requests
    alone (how far these are apart is the noise), one with the offline file alone, and the one that
    co-serves. It shows that every answer equals stock vLLM's while offline requests give their
    memory up for online ones, and tells TTFT, TPOT and the share of the gaps that was filled. It
    needs vLLM beside Aqua (in a checkout: `make demo-coserve`). With --quick it took four minutes
    on two cores, without it 21 beside other work; what is seen on a GPU, a CPU cannot say.
    """
    _require("co-serving", "make demo-coserve", "vllm")
    from aqua_demo.co_serving.plot import draw
    from aqua_demo.co_serving.run import SCALES, CoServingDemoRun
    from aqua_demo.co_serving.view import summary

    size, logs = _size(quick=quick), _prepare(output_directory)
    with _watching(as_json=as_json) as view:
        story = CoServingDemoRun(size, SCALES[size], seed, logs, view)
        report = story.run()
    draw(story.runs, output_directory / PLOT, subtitle=report.caption)
    _conclude(report, summary(report), output_directory, as_json=as_json)


@app.command("batch")
def batch(
    output_directory: OutputDirectory = Path(),
    quick: Quick = False,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Show a batch of OpenAI's API on harvested memory and time, while parts of it are killed.

    A producer lends memory; a real vLLM serves people and, in their gaps, the batch, with
    checkpoints in that memory; a second vLLM is for the batch alone. Amid the batch the producer
    takes its memory back, and a dispatcher and the second vLLM are killed. It shows that each
    request is answered once and as stock vLLM does, and tells what people lost, and what order and
    gaps brought. It needs vLLM beside Aqua (in a checkout: `make demo-batch`). With --quick it took
    nine minutes on two cores beside other work; what is seen on a GPU, a CPU cannot say.
    """
    _require("batch", "make demo-batch", "vllm", "openai", "sqlalchemy")
    from aqua_demo.batch.plot import draw
    from aqua_demo.batch.run import SCALES, BatchDemoRun
    from aqua_demo.batch.view import summary

    size, logs = _size(quick=quick), _prepare(output_directory)
    with _watching(as_json=as_json) as view:
        story = BatchDemoRun(size, SCALES[size], seed, logs, view)
        report = story.run()
    draw(story.runs, story.done, story.moments, output_directory / PLOT, subtitle=report.caption)
    _conclude(report, summary(report), output_directory, as_json=as_json)


def _size(*, quick: bool) -> str:
    return "quick" if quick else "full"


def _require(command: str, target: str, *modules: str) -> None:
    """Refuse to begin without what only some installations have."""
    for module in modules:
        if find_spec(module) is None:
            raise ConfigError(
                f"`aqua-demo {command}` needs {module}, which is not installed here",
                remedy=f"In a checkout, `{target}` makes an environment with a vLLM for CPUs;"
                " elsewhere install `aqua-demo[batch]` beside your vLLM.",
            )


def _prepare(output_directory: Path) -> Path:
    """Have an end from outside end the children, too; returns the folder for logs."""
    # A terminal that hangs up, or a supervisor that stops us, ends the children as Ctrl-C does.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    logs = output_directory / "demo-logs"
    logs.mkdir(parents=True, exist_ok=True)
    return logs


@contextmanager
def _watching(*, as_json: bool) -> Iterator[ConsoleView]:
    """Show a run while it goes on, unless only its result is wanted."""
    from rich.console import Console

    from aqua_demo.view import ConsoleView

    try:
        with ConsoleView(Console(stderr=True, quiet=as_json)) as view:
            yield view
    except KeyboardInterrupt:
        say("everything is stopped")
        raise


def _conclude(
    report: ClaimsReport, seen: RenderableType, output_directory: Path, *, as_json: bool
) -> None:
    """Write the report beside the plot, show it, and end with what the claims say."""
    from rich.console import Console

    report_path = output_directory / "demo-report.json"
    write_json(report_path, report)
    if as_json:
        print_json(report.model_dump(mode="json", exclude={"timeline"}))
    else:
        Console(stderr=True).print(seen)
        say(f"report  {report_path}\nplot    {output_directory / PLOT}")
    for claim in report.claims:
        if not claim.holds:
            say(f"aqua-demo: not so: {claim.text}: {claim.reason}")
    if not report.succeeded:
        raise typer.Exit(ExitCode.FAILED)


def main() -> None:
    """Entry point of `aqua-demo`."""
    run_app(app, "aqua-demo")
