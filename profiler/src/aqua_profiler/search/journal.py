"""What a profile has measured so far, on disk, so that an interrupted one goes on where it was.

JSON lines. The first names what is measured; a journal of anything else is refused. Every trial is
appended when it ends and flushed; a last line that a crash cut off is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel

from aqua_profiler.errors import JournalMismatchError
from aqua_profiler.measure.summary import TrialSummary
from aqua_profiler.spec import UnloadedLatency
from aqua_schedulers.conserve import MeasuredStep


class _Line(BaseModel):
    """A line: what is measured, or one measurement."""

    subject: dict[str, Any] = {}
    unloaded: UnloadedLatency | None = None
    run: TrialSummary | None = None
    burst: TrialSummary | None = None
    factor: float = 0.0
    point: str = ""
    rows: list[MeasuredStep] = []


class Journal:
    """A journal, in memory alone without a path.

    Args:
        path: Where it is kept; read if it exists.
        subject: What is measured: endpoint, workload, objective.

    Attributes:
        unloaded: What a lone request took, if known.
        trials: Of the search, in order.
        bursts: Factor and summary of each, in order.
        points: Of steps, the rows of each that is done, by name.

    Raises:
        JournalMismatchError: It belongs to another subject, or is no journal of this version.
    """

    def __init__(self, path: Path | None, subject: dict[str, Any]) -> None:
        self._path = path
        self.unloaded: UnloadedLatency | None = None
        self.trials: list[TrialSummary] = []
        self.bursts: list[tuple[float, TrialSummary]] = []
        self.points: dict[str, list[MeasuredStep]] = {}
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            self._read(path, subject)
        else:
            self._append(_Line(subject=subject))

    def note_unloaded(self, unloaded: UnloadedLatency) -> None:
        """Keep what a lone request took."""
        self.unloaded = unloaded
        self._append(_Line(unloaded=unloaded))

    def note_trial(self, summary: TrialSummary) -> None:
        """Keep a trial of the search."""
        self.trials.append(summary)
        self._append(_Line(run=summary))

    def note_burst(self, factor: float, summary: TrialSummary) -> None:
        """Keep a burst at that factor of the stable rate."""
        self.bursts.append((factor, summary))
        self._append(_Line(burst=summary, factor=factor))

    def note_point(self, point: str, rows: list[MeasuredStep]) -> None:
        """Keep the steps of a point."""
        self.points[point] = rows
        self._append(_Line(point=point, rows=rows))

    def remove(self) -> None:
        """The profile is complete: nothing is left to resume."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _append(self, line: _Line) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(line.model_dump_json(exclude_unset=True) + "\n")

    def _read(self, path: Path, subject: dict[str, Any]) -> None:
        text = path.read_text(encoding="utf-8")
        whole = text[: text.rindex("\n") + 1] if "\n" in text else ""
        try:
            found, *lines = [_Line.model_validate_json(line) for line in whole.splitlines()]
        except ValueError as error:
            raise JournalMismatchError(
                f"{path} is not a journal of this version of aqua-profile"
            ) from error
        differing = sorted(name for name in subject if found.subject.get(name) != subject[name])
        if differing:
            raise JournalMismatchError(
                f"{path} is about something else: {', '.join(differing)} differ"
            )
        for line in lines:
            self.unloaded = line.unloaded or self.unloaded
            if line.run is not None:
                self.trials.append(line.run)
            if line.burst is not None:
                self.bursts.append((line.factor, line.burst))
            if line.point:
                self.points[line.point] = line.rows
        path.write_text(whole, encoding="utf-8")  # What follows was cut off by a crash.
