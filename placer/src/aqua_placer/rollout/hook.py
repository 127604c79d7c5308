"""The command that carries a step out: a program of the operator's, started once a step.

It runs under `/bin/sh -c` in a process group of its own, with the step in `AQUA_*` variables and as
JSON on standard input; what it writes goes to our standard error. Exit status 0 says that the step
is under way: whether it arrived is for the coordinator to say. It may be started twice for one
step, if the first time was cut off, so it has to end well where all is done already. Never twice at
once: it inherits the journal's lock, so one that outlives a killed program keeps the next one out.

Ctrl-C and a passed timeout end all of the group: first by SIGINT, as a terminal would, so that
`helm` or `kubectl` end in order, then by SIGTERM, at last by SIGKILL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Final

from aqua_placer.errors import StepFailedError
from aqua_placer.rollout.interrupts import Interrupts
from aqua_placer.rollout.mapping import ClusterMapping
from aqua_protocol.plan import Move

GRACE_S: Final = 10.0
"""Seconds after each signal before the next one: `helm` takes a few to write its release's end.
Doubled, ctrl-C on a hook that ignores signals takes 40 s instead of 20."""

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)


@dataclass(frozen=True)
class Hook:
    """The operator's command.

    Attributes:
        command: Text for `/bin/sh -c`.
        timeout_s: Seconds that one step may take.
        grace_s: Seconds between signals, when it has to end.
        interrupts: Of the program.
    """

    command: str
    timeout_s: float
    grace_s: float = GRACE_S
    interrupts: Interrupts = field(default_factory=Interrupts)

    def run(self, move: Move, step_count: int, mapping: ClusterMapping, lock: IO[bytes]) -> None:
        """Carry a step out.

        Args:
            lock: A locked file that stays so while the hook or a child of it lives.

        Raises:
            StepFailedError: It ended with another status than 0, or took too long.
            KeyboardInterrupt: Ctrl-C; the hook has ended.
        """
        environment = os.environ | variables_of(move, step_count, mapping)
        # Before it runs: a Ctrl-C that meets pydantic at this comes out as an error of its own.
        told_on_stdin = move.model_dump_json().encode()
        process: subprocess.Popen[bytes] | None = None
        try:
            with self.interrupts.deferred():
                process = subprocess.Popen(  # noqa: S603 - the operator's own command
                    ["/bin/sh", "-c", self.command],
                    stdin=subprocess.PIPE,
                    stdout=sys.stderr.fileno(),
                    env=environment,
                    start_new_session=True,
                    pass_fds=(lock.fileno(),),
                )
            process.communicate(told_on_stdin, timeout=self.timeout_s)
        except subprocess.TimeoutExpired as error:
            assert process is not None, "only a process that was started can take long"
            self._end(process)
            raise StepFailedError(
                f"the hook of {told(move, step_count)} took longer than {self.timeout_s:g} s "
                "and was ended",
                remedy="See what it waits for, or raise --timeout; then run the same command "
                "again: it goes on with this step.",
                step=move.step,
            ) from error
        except BaseException:
            if process is not None:
                self._end(process)
            raise
        if process.returncode:
            status = process.returncode
            how = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
            raise StepFailedError(
                f"the hook of {told(move, step_count)} {how}",
                remedy="Its own words are above. Mend what is wrong, then run the same command "
                "again: it goes on with this step. Or plan anew from what runs now, with `replan`.",
                step=move.step,
                status=status,
            )

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """End the hook and all that it started."""
        try:
            for number in SIGNALS[:-1]:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(self.grace_s)
                    return
        finally:  # After a second ctrl-C, too.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, SIGNALS[-1])
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


def variables_of(move: Move, step_count: int, mapping: ClusterMapping) -> Mapping[str, str]:
    """What the hook finds in its environment; empty where a step has no such side."""
    values: dict[str, object] = {
        "AQUA_STEP": move.step,
        "AQUA_STEPS_DONE": move.step + 1,
        "AQUA_STEP_COUNT": step_count,
        "AQUA_STEP_KIND": move.kind,
        "AQUA_GROUP": move.group,
    }
    sides = (("FROM", move.from_server, move.from_gpus), ("TO", move.to_server, move.to_gpus))
    for side, server, gpus in sides:
        values[f"AQUA_{side}_SERVER"] = server or ""
        values[f"AQUA_{side}_GPUS"] = ",".join(map(str, gpus))
        node = None if server is None else mapping.server(server).node
        values[f"AQUA_{side}_NODE"] = node or ""
    return {name: str(value) for name, value in values.items()}


def told(move: Move, step_count: int) -> str:
    """A step in words."""
    sides = [side for side in (move.from_server, move.to_server) if side is not None]
    return f"step {move.step} of {step_count} ({move.kind} {move.group}: {' -> '.join(sides)})"
