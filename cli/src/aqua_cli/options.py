"""Options that several commands have, with one spelling and one help text.

def solve(file: Path, output: Output = None, as_json: Json = False) -> None: ...
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

DEFAULT_COORDINATOR_URL: Final = "http://127.0.0.1:7700"

Json = Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")]
Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the result here.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw it here: .png or .svg.")]
CoordinatorUrl = Annotated[
    str, typer.Option("--url", envvar="AQUA_COORDINATOR_URL", help="The coordinator.")
]
CoordinatorToken = Annotated[
    str | None,
    typer.Option("--token", envvar="AQUA_TOKEN", help="Bearer token for the coordinator."),
]
