"""What was done of a re-placement, on disk before the next thing is done.

A file of JSON lines beside the plan: a head that names the plan, then one line for each step that
was begun (with where its group was then) and for each that the coordinator has confirmed. Whatever
ends the program, the next run reads how far it came. A last line that was cut off counts as never
written. One process holds the file at a time, with the hooks that it starts.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from aqua_placer.errors import RolloutJournalError
from aqua_protocol.plan import Plan

JOURNAL_VERSION: Final = 1
"""Fixed: the form of the file."""

_BEGINNING: Final = b'{"journal": '
"""Fixed, as that."""


@dataclass
class RolloutJournal:
    """How far a re-placement is.

    Attributes:
        confirmed_count: Steps that are done, the first ones of the plan.
        begun: Where the group of the next step was (domain by member) when its hook was started;
            None if it was not.
        is_pushed: Whether the coordinator has the plan's matches.
    """

    file: IO[bytes]
    confirmed_count: int = 0
    begun: dict[str, str] | None = None
    is_pushed: bool = False

    def begin(self, step: int, before: dict[str, str]) -> None:
        """Note that a step's hook is about to start."""
        self.begun = before
        self._append({"step": step, "event": "begun", "before": before})

    def confirm(self, step: int) -> None:
        """Note that the coordinator sees the result of a step."""
        self.confirmed_count, self.begun = step + 1, None
        self._append({"step": step, "event": "confirmed"})

    def pushed(self) -> None:
        """Note that the coordinator has the plan's matches."""
        self.is_pushed = True
        self._append({"event": "pushed"})

    def _append(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry | {"at_s": round(time.time(), 3)})
        self.file.write(line.encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())

    def _read(self, entry: dict[str, Any]) -> None:
        match entry:
            case {"event": "begun", "before": dict(before)}:
                self.begun = before
            case {"event": "confirmed", "step": int(step)}:
                self.confirmed_count, self.begun = step + 1, None
            case {"event": "pushed"}:
                self.is_pushed = True


@contextmanager
def open_journal(path: Path, plan: Plan) -> Iterator[RolloutJournal]:
    """The journal of a plan, made if there is none, held until the block ends.

    Raises:
        RolloutJournalError: It is another plan's, in use, or not a journal.
        OSError: It cannot be read or written.
    """
    with path.open("a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RolloutJournalError(
                f"another process holds {path}, or the hook of one that was killed",
                remedy="Wait for it, or end it.",
            ) from error
        file.seek(0)
        *lines, cut_off = file.read().split(b"\n")  # Empty, unless a write was cut off.
        journal = RolloutJournal(file)
        head = {"journal": JOURNAL_VERSION, "plan_hash": plan.plan_hash, "steps": len(plan.moves)}
        try:
            entries = [json.loads(line) for line in lines]
            written = {key: entries[0][key] for key in head} if entries else None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise _no_journal(path) from error
        if written is None and not cut_off.startswith(_BEGINNING[: len(cut_off)]):
            raise _no_journal(path)
        if written is not None and written != head:
            raise RolloutJournalError(
                f"{path} is the journal of plan {str(written['plan_hash'])[:12]}, this is "
                f"{plan.plan_hash[:12]}",
                remedy="Go on with that plan, or name another file: --journal.",
            )
        # Not before: a file that is none of this plan's journals stays as it is.
        if cut_off:
            file.truncate(file.seek(0, os.SEEK_END) - len(cut_off))
        if written is None:
            journal._append(head)  # noqa: SLF001 - of this module
        for entry in entries[1:]:
            journal._read(entry)  # noqa: SLF001 - of this module
        try:
            yield journal
        finally:  # Not held by what a hook has left running.
            fcntl.flock(file, fcntl.LOCK_UN)


def _no_journal(path: Path) -> RolloutJournalError:
    return RolloutJournalError(
        f"{path} is not a journal of `aqua place apply`", remedy="Name another: --journal."
    )
