"""Where a measurement was taken: GPU, driver, libraries, commit, time."""

from __future__ import annotations

import os
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

COMMIT_VARIABLE: Final = "AQUA_COMMIT"
"""Names the commit where the tree has come without its history."""


@dataclass(frozen=True)
class Origin:
    """Where and of what.

    Attributes:
        is_stand_in: Whether there was no GPU, so that no figure means anything.
    """

    gpu: str
    driver: str
    torch: str
    commit: str
    measured_at: str
    is_stand_in: bool

    @property
    def hardware(self) -> str:
        """What a record must have been taken on to count."""
        return f"{self.gpu}; driver {self.driver}; torch {self.torch}"

    def as_json(self) -> dict[str, object]:
        """As records keep it."""
        return asdict(self)


def commit_of(root: Path) -> str:
    """The commit of a tree, "-dirty" with changes; what `AQUA_COMMIT` says where git does not."""
    command = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--abbrev=12",
        "--dirty",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        found = ""
    else:
        found = done.stdout.strip() if done.returncode == 0 else ""
    return found or os.environ.get(COMMIT_VARIABLE) or "unknown"


def now() -> str:
    """The time, UTC, to the second."""
    return datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S")
