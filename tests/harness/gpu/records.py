"""What has been run: one JSON file, replaced as a whole after each step."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from aqua_cli.files import write_json
from harness.gpu.outcome import Outcome
from harness.gpu.provenance import Origin

if TYPE_CHECKING:
    from pathlib import Path

FILE: Final = "records.json"


@dataclass(frozen=True)
class Record:
    """A step that has been run."""

    step: str
    fingerprint: str
    seconds: float
    origin: Origin
    outcome: Outcome

    def as_json(self) -> dict[str, Any]:
        """As the file keeps it."""
        return {
            "step": self.step,
            "fingerprint": self.fingerprint,
            "seconds": round(self.seconds, 1),
            "origin": self.origin.as_json(),
            "outcome": self.outcome.as_json(),
        }


def read_records(folder: Path) -> dict[str, Record]:
    """By the names of steps; empty where nothing has been run.

    Raises:
        ValueError, KeyError, TypeError: The file is damaged, or of another version.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    return {
        raw["step"]: Record(
            raw["step"],
            raw["fingerprint"],
            raw["seconds"],
            Origin(**raw["origin"]),
            Outcome.from_json(raw["outcome"]),
        )
        for raw in json.loads(path.read_text(encoding="utf-8"))
    }


def set_aside(folder: Path) -> Path:
    """Rename the file, so that none takes its place; what it is called then."""
    number = 1
    while (path := folder / f"records-{number}.json").exists():
        number += 1
    return (folder / FILE).rename(path)


def write_records(folder: Path, records: dict[str, Record]) -> None:
    """Replace the file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / FILE, [record.as_json() for record in records.values()])
