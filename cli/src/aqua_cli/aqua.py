"""The command `aqua`: every tool of Aqua under one name, and a doctor for the machine.

    aqua place solve cluster.yaml     the same as    aqua-place solve cluster.yaml

A tool is loaded when it is called, so `aqua --help` costs no tool's imports, and a tool that is
broken stays its own affair.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from aqua_cli.distributions import DISTRIBUTION_OF, disagreement, installed, summary_of, tools
from aqua_cli.output import print_json, say
from aqua_cli.program import ExitCode, Json, command_of, run


class ToolGroup(TyperGroup):
    """A group whose commands stand in for tools until one is called."""

    def __init__(self, **attributes: Any) -> None:  # noqa: ANN401 - Typer's own
        super().__init__(**attributes)
        self._tools = tools()
        for name, entry in self._tools.items():
            self.add_command(TyperCommand(name, help=summary_of(entry)))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - click's, private
        """Find the command to run: a tool is loaded here, not before.

        Raises:
            UnavailableError: The tool is not installed, or does not load.
        """
        name = args[0]
        if name in self._tools:
            return name, self._load(name), args[1:]
        if name in DISTRIBUTION_OF and not ctx.resilient_parsing:
            from aqua_protocol.errors import UnavailableError

            raise UnavailableError(
                f"`aqua {name}` is not installed", remedy=f"pip install {DISTRIBUTION_OF[name]}"
            )
        return super().resolve_command(ctx, args)

    def _load(self, name: str) -> Any:  # noqa: ANN401 - as above
        entry = self._tools[name]
        try:
            app = entry.load()
        except (ImportError, AttributeError) as error:
            from aqua_protocol.errors import UnavailableError

            distribution = entry.dist.name if entry.dist is not None else entry.value
            raise UnavailableError(
                f"`aqua {name}` does not load: {error}",
                remedy=f"pip install --force-reinstall {distribution}; `aqua doctor` says more.",
            ) from error
        return command_of(app, f"aqua-{name}")


app = typer.Typer(
    name="aqua",
    cls=ToolGroup,
    help="Lend idle GPU memory between engines: the tools of Aqua under one name.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_versions(wanted: bool) -> None:  # noqa: FBT001 - Typer calls it
    if not wanted:
        return
    versions = installed()
    for name, version in versions.items():
        print(name, version)  # noqa: T201 - what the option is for
    if differs := disagreement(versions):
        say(f"aqua: versions disagree: {differs}")
        say("  Install one version of all.")
    raise typer.Exit


@app.callback()
def aqua(
    *,
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            is_eager=True,
            callback=_show_versions,
            help="List the installed distributions of Aqua and exit.",
        ),
    ] = False,
) -> None:
    """Take the options that stand before a tool's name."""


@app.command()
def doctor(*, as_json: Json = False) -> None:
    """Say what this machine offers: GPUs, transports, coordinator, and what disagrees."""
    from aqua_cli.doctor import examine, render
    from aqua_cli.progress import progress
    from aqua_protocol.findings import FindingLevel

    with progress("Examining", quiet=as_json) as shown:
        findings = examine(on_probe=lambda name: shown.update(note=name))
    if as_json:
        print_json({"findings": [finding.model_dump(mode="json") for finding in findings]})
    else:
        render(findings)
    if any(finding.level is FindingLevel.FAIL for finding in findings):
        raise typer.Exit(ExitCode.FAILED)


def main() -> None:
    """Entry point of `aqua`."""
    sys.exit(run(typer.main.get_command(app), "aqua", sys.argv[1:]))
