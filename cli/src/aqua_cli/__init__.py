"""What all commands of Aqua share, and the `aqua` command that finds them.

A command is a Typer app and one line: `main(app, "aqua-place")` runs it, turns expected errors
into a sentence and a remedy (or one JSON object under `--json`), and ends with a code of one
table, `ExitCode`. What a program may read goes to standard output (`print_json`), what a person
watches to standard error (`say`, `progress`). Files appear whole or not at all (`write_text`,
`write_json`, `write_bytes`, `replacing`), those that people wrote are read as they were meant
(`parse_document`), pictures look alike (`aqua_cli.figures`).

    app = typer.Typer(name="aqua-place", help="...", no_args_is_help=True)

    @app.command()
    def solve(file: Path, output: Output = None, as_json: Json = False) -> None:
        with progress("Searching", quiet=as_json) as shown:
            plan = place(file, on_stage=lambda stage: shown.update(note=stage))
        if output is not None:
            write_json(output, plan)
        ...

    def entry() -> None:  # [project.scripts] aqua-place = "aqua_placer.cli:entry"
        main(app, "aqua-place")

Importing this package loads Typer and nothing heavier: pydantic, rich and matplotlib come with
their first use, so that `--help` answers at once.
"""

from __future__ import annotations

from aqua_cli.documents import parse_document
from aqua_cli.files import replacing, write_bytes, write_json, write_text
from aqua_cli.output import print_json, print_table, say
from aqua_cli.program import (
    CoordinatorToken,
    CoordinatorUrl,
    ExitCode,
    Json,
    Output,
    Plot,
    exit_code_of,
    main,
)
from aqua_cli.progress import ProgressDisplay, progress

__all__ = [
    "CoordinatorToken",
    "CoordinatorUrl",
    "ExitCode",
    "Json",
    "Output",
    "Plot",
    "ProgressDisplay",
    "exit_code_of",
    "main",
    "parse_document",
    "print_json",
    "print_table",
    "progress",
    "replacing",
    "say",
    "write_bytes",
    "write_json",
    "write_text",
]
