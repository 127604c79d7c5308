"""Starts the demo's processes, listens to them, and leaves none behind.

The coordinator is the real command, with its embedded Valkey, as an operator starts it: on a free
port, with a token for each role, and with data that vanish after the run.

Every child ends with this process (see `parent_death`) and leads a session of its own: Ctrl-C
reaches the demo alone, which then stops its children in order, and a child that does not stop is
killed with everything it has started. Children are started by the main thread, because the kernel
ties a child to the thread that forked it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from pydantic import ValidationError

from aqua_coordinator.access.tokens import Role, create_token
from aqua_demo.messages import (
    CONSUMER_ID,
    PRODUCER_ID,
    REPORTS,
    SAMPLE_INTERVAL_S,
    Command,
    Failure,
    Report,
)
from aqua_protocol import AquaError
from aqua_protocol.supervision import SupervisedThread, resting
from aqua_protocol.wire import Wire

STOP_WAIT_S: Final = 10.0
"""Seconds for a child to stop before it is killed. Doubled, a demo with a child that hangs ends ten
seconds later."""

START_LIMIT_S: Final = 120.0
"""Seconds for a coordinator and its Valkey to listen, which take three of a core: of a machine that
is busy with forty other things they get as much in two minutes. Doubled, a demo whose coordinator
hangs says so two minutes later."""

LOG_TAIL_LINES: Final = 15
"""Lines of a log in an error: a traceback of a few frames. Doubled, it fills a terminal."""


class DemoError(AquaError):
    """The demo could not show what it is meant to show."""

    code = "demo_failed"
    default_remedy = "Look at the logs in the output directory."


@dataclass(frozen=True, slots=True)
class ChildMessage:
    """Something that a child said, or its end."""

    name: str
    report: Report | None


class Child:
    """One process of the demo; a service, unless it speaks the demo's language.

    Args:
        log: Where its standard error goes.
        environment: Added to this process's own, without its Aqua settings.
        heard: Receives what it says on standard output, if it speaks the demo's language.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        log: Path,
        environment: dict[str, str],
        heard: queue.Queue[ChildMessage] | None = None,
    ) -> None:
        self.name = name
        self.log = log
        self.is_service = heard is None
        self.is_killed = False  # By us: its end is part of the story.
        self._heard = heard
        # Without the user's settings of Aqua a demo is the same everywhere.
        ours = {key: value for key, value in os.environ.items() if not key.startswith("AQUA_")}
        with log.open("wb") as log_file:
            self._process = subprocess.Popen(  # noqa: S603 - our own programs, without a shell
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if heard is not None else log_file,
                stderr=log_file,
                env=ours | environment,
                start_new_session=True,
            )
        if heard is not None:
            SupervisedThread(self._listen, "demo-child", name).start()

    @property
    def pid(self) -> int:
        """Its process id, which is also that of its process group."""
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative when a signal ended it."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status; None when it still runs after `timeout_s`."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.exit_status

    def send(self, command: Command) -> None:
        """Send a command; nowhere when the child is gone, which is heard of otherwise."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(command.model_dump_json().encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return

    def kill(self) -> None:
        """SIGKILL it and whatever it has started, as a machine that loses power would."""
        self.is_killed = True
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def log_tail(self) -> str:
        """The last lines that it logged."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def finish(self, patience_s: float = STOP_WAIT_S) -> None:
        """Ask it to come to its own end, and see to it that it does."""
        self.send(Command(finish=True))
        self.wait(patience_s)
        self.stop(patience_s)

    def stop(self, patience_s: float = STOP_WAIT_S) -> None:
        """End it, with force after a while, and whatever else is left in its session."""
        self._process.terminate()
        self.wait(patience_s)
        with suppress(ProcessLookupError):  # The usual case: it took its own children along.
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _listen(self) -> None:
        assert self._heard is not None
        assert self._process.stdout is not None
        with resting():  # It only listens.
            for line in self._process.stdout:
                try:
                    report = REPORTS.validate_json(line)
                except ValidationError as error:
                    text = f"{self.name} said something unintelligible: {error}"
                    report = Failure(error=DemoError(text).to_body())
                self._heard.put(ChildMessage(self.name, report))
        self._heard.put(ChildMessage(self.name, None))


class ProcessGroup:
    """The children of one run; leaving the context stops them all, the youngest first."""

    def __init__(self, directory: Path, *, patience_s: float = STOP_WAIT_S) -> None:
        self.heard: queue.Queue[ChildMessage] = queue.Queue(maxsize=10_000)
        self._directory = directory
        self._patience_s = patience_s
        self._children: list[Child] = []

    def start_program(self, name: str, module: str, settings: Wire) -> Child:
        """Start a module of this package, which speaks the demo's language, with settings."""
        arguments = [str(os.getpid()), settings.model_dump_json()]
        return self._start(name, f"aqua_demo.{module}", arguments, {}, self.heard)

    def start_service(
        self, name: str, command: Sequence[str], environment: dict[str, str]
    ) -> Child:
        """Start another program, which ends with this process."""
        arguments = [str(os.getpid()), *command]
        return self._start(name, "aqua_demo.parent_death", arguments, environment)

    def require_services(self) -> None:
        """Refuse to go on without a service that has ended.

        Raises:
            DemoError: One has; the end of its log is in the message.
        """
        for child in self._children:
            if child.is_service and child.exit_status is not None and not child.is_killed:
                raise self.died(child.name)

    def died(self, name: str) -> DemoError:
        """Make the error of a child that ended before its time."""
        child = next(child for child in self._children if child.name == name)
        status = child.wait(STOP_WAIT_S)
        return DemoError(
            f"the {name} ended early (exit status {status}):\n{child.log_tail()}",
            remedy=f"The whole log is {child.log}.",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The coordinator is the oldest and goes last, so that members can say goodbye to it.
        for child in reversed(self._children):
            child.stop(self._patience_s)

    def _start(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        environment: dict[str, str],
        heard: queue.Queue[ChildMessage] | None = None,
    ) -> Child:
        command = [sys.executable, "-m", module, *arguments]
        log = self._directory / f"{name}.log"
        self._children.append(Child(name, command, log=log, environment=environment, heard=heard))
        return self._children[-1]


@dataclass(frozen=True, slots=True)
class DemoCoordinator:
    """A running coordinator, and the tokens that it accepts; none where it asks for none."""

    url: str
    producer_token: str | None = field(default=None, repr=False)
    consumer_token: str | None = field(default=None, repr=False)
    operator_token: str | None = field(default=None, repr=False)

    @classmethod
    def start(cls, group: ProcessGroup, scratch: Path) -> Self:
        """Make tokens, start it and wait until its log says where it listens.

        Raises:
            DemoError: It did not start; its log is in the message.
        """
        tokens_file = scratch / "tokens.json"
        holders = {Role.PRODUCER: PRODUCER_ID, Role.CONSUMER: CONSUMER_ID, Role.OPERATOR: None}
        tokens = [create_token(tokens_file, roles=[r], member=m)[0] for r, m in holders.items()]
        child = group.start_service(
            "coordinator",
            [sys.executable, "-m", "aqua_coordinator", "serve"],
            {
                "AQUA_LISTEN_PORT": "0",
                "AQUA_DATA_DIR": str(scratch / "coordinator"),
                "AQUA_TOKENS_FILE": str(tokens_file),
            },
        )
        return cls(await_listening(group, child), *tokens)


def await_listening(group: ProcessGroup, child: Child) -> str:
    """Wait until the log of one of our services says where it listens; its URL.

    Raises:
        DemoError: It did not start; its log is in the message.
    """
    until_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until_s:
        for line in child.log.read_text(encoding="utf-8").splitlines():
            if '"listening"' in line:
                return str(json.loads(line)["url"])
        if child.wait(SAMPLE_INTERVAL_S) is not None:
            raise group.died(child.name)
    raise DemoError(
        f"the {child.name} does not listen after {START_LIMIT_S:.0f} s:\n{child.log_tail()}"
    )
