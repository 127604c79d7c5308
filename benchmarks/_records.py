"""Parts of a long measurement, kept as they end, so that the measurement can go on later."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from aqua_cli.files import write_text

Part = TypeVar("Part")


class Records:
    """The parts that one file keeps, by name.

    A file of other settings ends the program: parts of two measurements are none of either.

    Args:
        path: The file, which need not be there; None keeps nothing beyond this run.
        settings: What the measurement depends on, as JSON can hold it.
    """

    def __init__(self, path: Path | None, settings: Mapping[str, Any]) -> None:
        self._path = path
        self._settings = settings
        self._parts: dict[str, Any] = {}
        if path is None or not path.exists():
            return
        try:
            kept = json.loads(path.read_text())
            self._parts = kept["parts"]
            if kept["settings"] == settings:
                return
            other = f"of {kept['settings']}, not of {settings}"
        except (OSError, ValueError, KeyError, TypeError) as error:
            other = f"no such file: {type(error).__name__}: {error}"
        sys.exit(f"{path} is {other}. Name another file, which need not be there")

    def once(self, name: str, measure: Callable[[], Part]) -> Part:
        """A part as it was kept, or measured now and kept; as JSON keeps it, so without tuples."""
        if name not in self._parts:
            self._parts[name] = json.loads(json.dumps(measure()))
            if self._path is not None:
                kept = {"settings": self._settings, "parts": self._parts}
                write_text(self._path, json.dumps(kept))
        part: Part = self._parts[name]
        return part
