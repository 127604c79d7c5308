"""The distributions of Aqua that are installed here, their versions, and the tools they bring.

Tools are found by entry points of the group `aqua.commands`, each a Typer app; nothing is imported
to find one. A third party's tool is found like ours.
"""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Final

COMMANDS_GROUP: Final = "aqua.commands"

DISTRIBUTIONS: Final = (
    *("aqua-protocol", "aqua-client", "aqua-cli", "aqualib", "aqua-schedulers", "aqua-coordinator"),
    *("aqua-placer", "aqua-profiler", "aqua-simulator", "aqua-batch", "aqua-demo"),
)
"""All that there are, from the ground up; they are released together, in one version."""

DISTRIBUTION_OF: Final = {
    "place": "aqua-placer",
    "batch": "aqua-batch",
    "sim": "aqua-simulator",
    "profile": "aqua-profiler",
    "demo": "aqua-demo",
    "coordinator": "aqua-coordinator",
}
"""What to install for a tool that is not there."""


def installed() -> dict[str, str]:
    """Versions of the distributions that are installed."""
    found = {}
    for name in DISTRIBUTIONS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def disagreement(versions: dict[str, str]) -> str:
    """Name the distributions of another version than most; empty if there is none."""
    kinds = list(versions.values())
    usual = max(kinds, key=kinds.count, default="")
    others = [f"{name} {found}" for name, found in versions.items() if found != usual]
    return f"most are {usual}, but {', '.join(others)}" if others else ""


def tools() -> dict[str, EntryPoint]:
    """Entry points of the tools that are installed, by their names."""
    return {entry.name: entry for entry in sorted(entry_points(group=COMMANDS_GROUP))}


def summary_of(tool: EntryPoint) -> str:
    """One line on a tool, from the metadata of its distribution: nothing is imported for it."""
    return "" if tool.dist is None else tool.dist.metadata["Summary"] or ""
