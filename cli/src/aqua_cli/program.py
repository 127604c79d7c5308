"""Runs a Typer app as a program: expected errors become words and an exit code, always the same.

- An error of Aqua's, a file that cannot be used, wrong usage: one sentence and one remedy on
  standard error. Under `--json` instead one object on standard output,
  `{"error": {"code", "message", "remedy", "details"}}`, so that a script reads either kind of
  answer from one place.
- Ctrl-C: a word, and 130.
- A reader that has left (`aqua-sim ... | head`): silence, and 1.
- Anything else is a bug and keeps its traceback.

Every app gets `--version` on the way. Options that several commands have, with one spelling and one
help text, are here as types: `def solve(file: Path, output: Output = None, as_json: Json = False)`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import IntEnum
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn

import typer
import typer.core
import typer.main

from aqua_cli.output import print_json, say

if TYPE_CHECKING:
    from aqua_protocol.errors import ErrorBody


DEFAULT_COORDINATOR_URL: Final = "http://127.0.0.1:7700"

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the result here.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw it here: .png or .svg.")]
CoordinatorUrl = Annotated[
    str,
    typer.Option(
        "--url", envvar="AQUA_COORDINATOR_URL", help="The coordinator, or several by commas."
    ),
]
CoordinatorToken = Annotated[
    str | None,
    typer.Option("--token", envvar="AQUA_TOKEN", help="Bearer token for the coordinator."),
]


class ExitCode(IntEnum):
    """Exit status of every command of Aqua.

    A command says 1 itself (`raise typer.Exit(ExitCode.FAILED)`) where its own answer is "no"; the
    others follow from the error that it raises.
    """

    DONE = 0
    FAILED = 1
    """A check failed, a target was missed, or the service refused."""
    WRONG = 2
    """Wrong usage, input or configuration; nothing was done."""
    UNAVAILABLE = 3
    """Something that is needed is not available: a service, solver, engine or device."""
    INTERRUPTED = 130
    """Ctrl-C, as shells have it: 128 + SIGINT."""


UsageError: Final = typer.BadParameter.__mro__[1]
"""Typer brings its own copy of click and does not export this class of it."""


def main(app: typer.Typer, name: str) -> NoReturn:
    """Run `app` as the console script `name`, and exit."""
    sys.exit(run(command_of(app, name), name, sys.argv[1:]))


def command_of(app: typer.Typer, name: str) -> Any:  # noqa: ANN401 - Typer's click is private
    """The app as a command with `--version`, which prints the distribution of script `name`."""
    command = typer.main.get_command(app)
    command.params.append(_version_option(name))
    return command


def run(command: Any, name: str, args: Sequence[str]) -> int:  # noqa: ANN401 - as above
    """Run a command on `args`; returns the exit status instead of exiting."""
    as_json = "--json" in (args[: args.index("--")] if "--" in args else args)
    if sys.stdout is None:  # As a shell's `>&-` leaves it.
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - until the end
    try:
        result = command.main(list(args), prog_name=name, standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_output()
        return ExitCode.FAILED
    except (KeyboardInterrupt, typer.Abort):
        result = ExitCode.INTERRUPTED
    except Exception as error:
        if (report := _report_of(error)) is None:
            raise
        body, status = report
        try:
            sys.stdout.flush()
            _tell(body, name, as_json=as_json)
            sys.stdout.flush()
        except OSError:  # A full disk takes no error either.
            _silence_output()
            _tell(body, name, as_json=False)
        return status
    if result == ExitCode.INTERRUPTED:
        _tell(_body("interrupted", "interrupted"), name, as_json=as_json)
    return result if isinstance(result, int) else ExitCode.DONE


def _silence_output() -> None:
    """Python flushes standard output once more at its end, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report_of(error: Exception) -> tuple[ErrorBody, int] | None:
    """What to tell of an error and how to exit; None if it is not an expected one."""
    from aqua_protocol.errors import AquaError

    if isinstance(error, AquaError):
        return error.to_body(), exit_code_of(error)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        body = _body(
            "system_error", f"{where}{error.strerror or error}", "Check the path and its rights."
        )
        return body, exit_code_of(error)
    if isinstance(error, UsageError):
        context = getattr(error, "ctx", None)
        is_help = type(error).__name__ == "NoArgsIsHelpError"  # Private, as its base is.
        remedy = "" if is_help or context is None else f"`{context.command_path} --help` shows how."
        return _body("usage", error.format_message(), remedy), ExitCode.WRONG  # type: ignore[attr-defined] # of the private click
    return None


def exit_code_of(error: BaseException) -> ExitCode:
    """The exit status for an expected error.

    Services say with HTTP status 501, 503 and the like that what is needed is not there; errors
    of this program carry the same statuses (`AquaError.http_status`), so one rule serves both.
    """
    from aqua_protocol import errors

    match error:
        case KeyboardInterrupt():
            return ExitCode.INTERRUPTED
        case errors.UnavailableError() | errors.TransportUnavailableError():
            return ExitCode.UNAVAILABLE
        case errors.AquaError(http_status=501) | ConnectionError() | TimeoutError():
            return ExitCode.UNAVAILABLE
        case errors.ConfigError() | errors.RequestInvalidError():
            return ExitCode.WRONG
        case errors.AquaError():
            return ExitCode.FAILED
        case OSError():
            return ExitCode.WRONG
    raise AssertionError(f"{error!r} is not an expected error")


def _body(code: str, message: str, remedy: str = "") -> ErrorBody:
    from aqua_protocol.errors import ErrorBody

    return ErrorBody(code=code, message=message, remedy=remedy)


def _tell(body: ErrorBody, name: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"error": body.model_dump(mode="json", exclude={"retry_after_s"})})
        return
    if body.code == "usage" and not body.remedy:  # No arguments: the message is the help,
        if body.message:  # unless rich has shown it already.
            say(body.message)
        return
    say(f"{name}: {body.message}" + ("" if body.code == body.message else f" [{body.code}]"))
    if body.remedy:
        say(f"  {body.remedy}")


def _version_option(name: str) -> Any:  # noqa: ANN401 - as above
    """The option `--version`, taken from an app of its own: Typer makes options no other way."""

    def show(value: bool) -> None:  # noqa: FBT001 - Typer calls it
        if value:
            print(version_of(name))  # noqa: T201 - what the option is for
            raise typer.Exit

    donor = typer.Typer(add_completion=False)
    option = typer.Option(
        False,  # noqa: FBT003 - the default comes first
        "--version",
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show the version and exit.",
    )

    @donor.command()
    def ignored(*, version: bool = option) -> None:
        del version

    return typer.main.get_command(donor).params[0]


def version_of(script: str) -> str:
    """Script, distribution and version in one line, as in `aqua-place 0.1.0 (aqua-placer)`."""
    for entry in entry_points(group="console_scripts", name=script):
        if entry.dist is not None:
            return f"{script} {entry.dist.version} ({entry.dist.name})"
    return f"{script} (not installed)"
