"""A child process that obeys lines and answers in lines of JSON.

The child reads its standard input and answers with `say`. What else its libraries print to standard
output is up to it; whoever reads `Program.line` sees that, too.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

from harness.fork_server import ForkedProcess
from harness.patience import variables

TESTS: Final = Path(__file__).resolve().parents[1]


class Program:
    """The test's side of a child; a context manager that kills it.

    Args:
        run: A function, forked from the server of the tests; or the path of a script for an
            interpreter of its own, which imports `harness` as a test does.
        argument: Its one argument.
        within_s: Bound of every wait for a line.
        environment: Further variables; of this process's own it inherits all but `AQUA_*`.
    """

    def __init__(
        self,
        run: str | Callable[[str], None],
        argument: str,
        *,
        within_s: float,
        **environment: str,
    ) -> None:
        paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        theirs = variables(PYTHONPATH=os.pathsep.join(paths), **environment)
        (stdin, self._words), (self._answers, stdout) = os.pipe(), os.pipe()
        self.process: Final[subprocess.Popen[bytes] | ForkedProcess] = (
            subprocess.Popen(
                [sys.executable, run, argument], stdin=stdin, stdout=stdout, env=theirs
            )
            if isinstance(run, str)
            else ForkedProcess(run, argument, streams={0: stdin, 1: stdout}, environment=theirs)
        )
        os.close(stdin)
        os.close(stdout)
        self._name = type(self).__name__
        self._within_s = within_s
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        os.close(self._words)
        os.close(self._answers)

    def tell(self, line: str) -> None:
        """Send one line."""
        os.write(self._words, line.encode() + b"\n")

    def call(self, verb: str, *arguments: object) -> Any:  # noqa: ANN401 - whatever the verb gives
        """Send `[verb, *arguments]` and wait for the answer."""
        self.tell(json.dumps([verb, *arguments]))
        return self.answer()

    def answer(self) -> Any:  # noqa: ANN401 - as above
        """The next line, which is JSON; errors as of `line`."""
        return json.loads(self.line())

    def line(self) -> str:
        """The next line.

        Raises:
            TimeoutError: None came in time.
            EOFError: The process has ended.
        """
        # Not a buffered reader: what it holds already, `select` would wait for in vain.
        while b"\n" not in self._unread:
            ready, _, _ = select.select([self._answers], [], [], self._within_s)
            if not ready:
                raise TimeoutError(f"{self._name} said nothing for {self._within_s} s")
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise EOFError(f"{self._name} has ended")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode()

    def freeze(self) -> None:
        """Stop the process as a hung one."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL it, and wait until it is gone."""
        self.process.kill()
        self.process.wait(self._within_s)


def say(answer: object) -> None:
    """Answer one line; called in the child."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
