"""What a profile has measured so far, on disk, so that an interrupted one goes on where it was.

JSON lines. The first names what is measured; a journal of anything else is refused. Every trial is
appended when it ends and flushed; a last line that a crash cut off is left out.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aqua_profiler.errors import JournalMismatchError
from aqua_profiler.measure.summary import TrialSummary
from aqua_profiler.objective import UnloadedLatency


class Journal:
    """A journal, in memory alone without a path.

    Args:
        path: Where it is kept; read if it exists.
        subject: What is measured: endpoint, workload, objective.

    Attributes:
        unloaded: What a lone request took, if known.
        trials: Of the search, in order.
        bursts: Factor and summary of each, in order.

    Raises:
        JournalMismatchError: It belongs to another subject, or is no journal.
    """

    def __init__(self, path: Path | None, subject: dict[str, Any]) -> None:
        self._path = path
        self.unloaded: UnloadedLatency | None = None
        self.trials: list[TrialSummary] = []
        self.bursts: list[tuple[float, TrialSummary]] = []
        if path is None:
            return
        if path.exists() and path.stat().st_size:
            self._read(path, subject)
        else:
            self._append({"subject": subject})

    def note_unloaded(self, unloaded: UnloadedLatency) -> None:
        """Keep what a lone request took."""
        self.unloaded = unloaded
        self._append({"unloaded": asdict(unloaded)})

    def note_trial(self, summary: TrialSummary) -> None:
        """Keep a trial of the search."""
        self.trials.append(summary)
        self._append({"run": summary.as_json()})

    def note_burst(self, factor: float, summary: TrialSummary) -> None:
        """Keep a burst at that factor of the stable rate."""
        self.bursts.append((factor, summary))
        self._append({"burst": summary.as_json(), "factor": factor})

    def remove(self) -> None:
        """The profile is complete: nothing is left to resume."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    def _append(self, entry: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(entry) + "\n")

    def _read(self, path: Path, subject: dict[str, Any]) -> None:
        lines = path.read_text(encoding="utf-8").split("\n")
        whole = lines[:-1]  # What follows the last line end was cut off, or is nothing.
        try:
            entries = [json.loads(line) for line in whole]
            found = entries[0]["subject"]
            if found == subject:
                for entry in entries[1:]:
                    self._take(entry)
        except (ValueError, LookupError, TypeError) as error:
            raise JournalMismatchError(f"{path} is not a journal of aqua-profile") from error
        if found != subject:
            differing = sorted(name for name in subject if found.get(name) != subject[name])
            raise JournalMismatchError(
                f"{path} is about something else: {', '.join(differing)} differ"
            )
        path.write_text("".join(line + "\n" for line in whole), encoding="utf-8")

    def _take(self, entry: dict[str, Any]) -> None:
        if "unloaded" in entry:
            self.unloaded = UnloadedLatency(**entry["unloaded"])
        elif "run" in entry:
            self.trials.append(TrialSummary.from_json(entry["run"]))
        elif "burst" in entry:
            self.bursts.append((entry["factor"], TrialSummary.from_json(entry["burst"])))
