"""Where a profile was made: machine, program, command."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Final

from aqua_protocol.profile import Provenance

SECRET_OPTIONS: Final = ("--token", "--api-key")
"""Options whose values do not go into a profile."""


def provenance(workload_sha256: str = "", *, hardware: str = "", engine: str = "") -> Provenance:
    """This process, now; names of the host and of its user stay out."""
    return Provenance(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command_line(sys.argv),
        hardware=hardware or f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}",
        engine=engine,
        workload_sha256=workload_sha256,
        profiler=f"aqua-profiler {version('aqua-profiler')}",
    )


def command_line(arguments: list[str]) -> str:
    """The command, without its secrets."""
    shown, hide = [os.path.basename(arguments[0])], False  # noqa: PTH119 - a string, not a path
    for argument in arguments[1:]:
        name = argument.split("=", 1)[0]
        if hide:
            shown.append("***")
        elif name in SECRET_OPTIONS and "=" in argument:
            shown.append(f"{name}=***")
        else:
            shown.append(argument)
        hide = name in SECRET_OPTIONS and "=" not in argument and not hide
    return shlex.join(shown)
