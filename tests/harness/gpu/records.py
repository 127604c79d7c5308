"""What has been run: one JSON file, replaced as a whole after each step.

It keeps what was taken on any hardware: a figure of a GPU that was borrowed is not had again. One
run at a time writes it; two would also be in each other's figures.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from aqua_cli.files import write_json
from aqua_protocol import ConfigError
from harness.gpu.outcome import Outcome
from harness.gpu.provenance import Origin

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

FILE: Final = "records.json"
DAMAGED: Final = "records.damaged.json"
LOCK: Final = "lock"


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


def read_records(folder: Path) -> list[Record]:
    """In the order of the file; empty where nothing has been run.

    Raises:
        ConfigError: The file is none of ours.
    """
    path = folder / FILE
    if not path.exists():
        return []
    try:
        return [
            Record(
                raw["step"],
                raw["fingerprint"],
                raw["seconds"],
                Origin(**raw["origin"]),
                Outcome.from_json(raw["outcome"]),
            )
            for raw in json.loads(path.read_text(encoding="utf-8"))
        ]
    except (ValueError, TypeError, LookupError) as error:
        raise ConfigError(
            f"{path} holds no records: {type(error).__name__}: {error}",
            remedy="Bring a whole copy of it, or move it away.",
        ) from error


def set_aside(folder: Path) -> Path:
    """Keep a file that holds no records under another name, which is returned."""
    return (folder / FILE).replace(folder / DAMAGED)


def write_records(folder: Path, records: Iterable[Record]) -> None:
    """Replace the file.

    Raises:
        ConfigError: It cannot be written there.
    """
    write_json(folder / FILE, [record.as_json() for record in records])


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Be the one run that writes to a folder, which is made.

    Raises:
        ConfigError: Another one does.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"another run writes to {folder}",
                remedy="Wait for its end: two runs on a GPU measure each other.",
            ) from error
        yield
