"""The child's side of a pipe to the demo: samples and news out, commands in.

Standard output belongs to the pipe, so whatever a library prints goes to standard error instead,
which the parent keeps as the child's log. When the parent is gone, its end of the pipe closes and
the child is told to finish.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import Self, TextIO, TypeVar

from aqua_demo.messages import Command, Failure, LogLine
from aqua_demo.parent_death import end_with
from aqua_protocol import AquaError
from aqua_protocol.supervision import SupervisedThread, resting
from aqua_protocol.wire import Wire

SettingsT = TypeVar("SettingsT", bound=Wire)


class Parent:
    """The other end of the pipe."""

    def __init__(self, parent_pid: int) -> None:
        end_with(parent_pid)
        self.wants = Command()  # The latest.
        self.finished = threading.Event()  # Set when the parent wants an end, or is gone.
        self._lock = threading.Lock()
        self._out = own_output()
        self._reader = SupervisedThread(self._read, "demo-commands")
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s"
        )

    def tell(self, message: Wire) -> None:
        """Send one message; silently nowhere when the parent is gone."""
        with self._lock:
            try:
                self._out.write(message.model_dump_json() + "\n")
                self._out.flush()
            except BrokenPipeError:
                return  # The reader sees the end of its pipe and finishes the program.

    def news(self, text: str) -> None:
        """Say something to people."""
        self.tell(LogLine(text=text))

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, AquaError):
            self.tell(Failure(error=error.to_body()))

    def _read(self) -> None:
        with resting():  # It only listens.
            for line in sys.stdin:
                self.wants = Command.model_validate_json(line)
                if self.wants.finish:
                    self.finished.set()
        self.finished.set()


def own_output() -> TextIO:
    """Standard output for this program alone: what libraries and children print is logged.

    A line of theirs amid one of ours, longer than a pipe takes at once, would spoil both.
    """
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return out


def run_program(run: Callable[[SettingsT, Parent], None], settings: type[SettingsT]) -> None:
    """Run as `ProcessGroup.start_program` starts it, with the parent's pid and the settings."""
    with Parent(int(sys.argv[1])) as parent:
        run(settings.model_validate_json(sys.argv[2]), parent)
