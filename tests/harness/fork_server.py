"""Processes forked from a server that has imported what they need: they start in milliseconds.

Starting Python anew takes a second of a processor, and two with torch; a suite starts hundreds. A
forked process is one of its own in all that tests do to it: it is killed, frozen and found by its
pid. It differs in its command line, and in that modules are imported already. So what is about
that (a command as a user types it, an engine, an interpreter that ends) uses `subprocess`.

The server is single-threaded and never starts CUDA, so its children may.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any, Final

SERVER: Final = multiprocessing.get_context("forkserver")
# What is not installed is passed over: a GPU machine has no coordinator.
SERVER.set_forkserver_preload(
    [
        "aqua_batch.service.server",
        "aqua_coordinator.cli",
        "aqua_coordinator.server",
        "aqualib.consumer",
        "aqualib.leasing.client",
        "aqualib.producer.producer",
        "aqualib.transports.memfd",
        "aqualib.tensor",
        "harness.doom",
    ]
)


def start_server() -> None:
    """Start the server, unless it runs: for tests that count their descriptors."""
    forkserver.ensure_running()


class ForkedProcess:
    """A process that runs `main`; what tests use of `subprocess.Popen`.

    Args:
        main: Of a module, by whose name the process finds it.
        arguments: For `main`; sockets and connections are passed on.
        streams: Descriptors here, by what they are there: 0, 1 or 2.
        environment: All of its variables; None for those of this process.
    """

    def __init__(
        self,
        main: Callable[..., None],
        *arguments: str | socket.socket | None,
        streams: Mapping[int, int] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        variables = dict(os.environ if environment is None else environment)
        passed = {there: Connection(os.dup(here)) for there, here in (streams or {}).items()}
        self._process = SERVER.Process(
            target=_begin, args=(main, arguments, passed, variables), daemon=True
        )
        self._process.start()
        for each in passed.values():
            each.close()
        pid = self._process.pid
        assert pid is not None, "it has been started"
        self.pid: Final[int] = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self._status is None and (status := self._process.exitcode) is not None:
            self._status = status
            self._process.close()  # Its descriptors, which some tests count.
        return self._status

    def wait(self, timeout_s: float) -> int:
        """Its exit status, when it has ended.

        Raises:
            TimeoutExpired: It has not.
        """
        if self._status is None:
            self._process.join(timeout_s)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s)
        return status

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            # The server knows of an end before we do.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)


def _begin(
    main: Callable[..., None],
    arguments: tuple[Any, ...],
    passed: Mapping[int, Connection],
    environment: Mapping[str, str],
) -> None:
    for number, connection in passed.items():
        os.dup2(connection.fileno(), number)
        connection.close()
    if 0 in passed:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - descriptor 0
    os.environ.clear()
    os.environ.update(environment)
    main(*arguments)
