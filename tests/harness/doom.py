"""Doom: a process that dies at a chosen step of the protocol, instead of at a random moment.

A *step* is the n-th time that a process does one observable thing: sends or receives a message of
one type, calls the coordinator, runs a script over the books, makes, maps or unmaps a slab, copies
bytes. `Ledger` wraps those functions from the outside, so that the product has no hooks. It writes
every step it passes to a file, and at the doomed one, before or after the thing is done, sends
SIGKILL to its own process (or to the store). A walk over the recorded steps is then a walk over
the protocol, and a failure names the step at which it can be repeated.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import threading
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from asyncio import Future
    from collections.abc import Callable, Iterator

    from aqua_client import Call
    from aqua_coordinator.store.pipeline import Answer, Argument


class Side(StrEnum):
    """When, relative to the step."""

    BEFORE = "before"
    AFTER = "after"


class Victim(StrEnum):
    """Who dies."""

    SELF = "self"
    STORE = "store"
    STORE_AND_DATA = "store-and-data"
    """The store loses what it had written: its disk is gone."""


@dataclass(frozen=True, slots=True)
class Doom:
    """One death: `before send:released#2`."""

    side: Side
    step: str
    number: int
    victim: Victim = Victim.SELF

    def __str__(self) -> str:
        victim = "" if self.victim is Victim.SELF else f"{self.victim} "
        return f"{victim}{self.side} {self.step}#{self.number}"

    @classmethod
    def walk(
        cls, counts: Counter[str], *, deepest: int, victim: Victim = Victim.SELF
    ) -> Iterator[Self]:
        """Every step that was recorded, up to `deepest` repetitions, before and after."""
        for step in sorted(counts):
            for number in range(1, min(counts[step], deepest) + 1):
                for side in Side:
                    yield cls(side, step, number, victim)


KILL: Final = "kill"
"""Recorded among the steps right before a SIGKILL."""


class Ledger:
    """Counts the steps of this process and carries out its doom.

    Args:
        path: File that every step is appended to, one name a line.
        doom: When to die; None only records.
    """

    def __init__(self, path: Path, doom: Doom | None) -> None:
        self._doom = doom
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self.store_pid: Callable[[], int | None] = lambda: None
        self.store_data: Path | None = None

    def begin(self, name: str) -> int:
        """A step is about to be taken; returns which repetition it is."""
        with self._lock:
            self._counts[name] += 1
            number = self._counts[name]
            os.write(self._fd, f"{name}\n".encode())
        self._strike(Side.BEFORE, name, number)
        return number

    def end(self, name: str, number: int) -> None:
        """The step has been taken."""
        self._strike(Side.AFTER, name, number)

    def _strike(self, side: Side, name: str, number: int) -> None:
        doom = self._doom
        if doom is None or (doom.side, doom.step, doom.number) != (side, name, number):
            return
        os.write(self._fd, f"{KILL}\n".encode())
        if doom.victim is Victim.SELF:
            os.kill(os.getpid(), signal.SIGKILL)
        pid = self.store_pid()
        assert pid is not None, "there is no store to kill"
        os.kill(pid, signal.SIGKILL)
        if doom.victim is Victim.STORE_AND_DATA:
            assert self.store_data is not None
            shutil.rmtree(self.store_data / "appendonlydir", ignore_errors=True)

    def watch(self, owner: type, method: str, name: Callable[..., str | None]) -> None:
        """Make calls of `owner.method` steps.

        `name` is called with the arguments; calls that it has no name for are no steps.
        """
        plain = getattr(owner, method)

        @functools.wraps(plain)
        def stepping(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - whatever is wrapped
            step = name(*args, **options)
            if step is None:
                return plain(*args, **options)
            number = self.begin(step)
            answer = plain(*args, **options)
            self.end(step, number)
            return answer

        setattr(owner, method, stepping)

    def watch_received(self, owner: type, method: str) -> None:
        """Make every message that `owner.method` returns a step, named by its type.

        Before and after are the same here: what has not been received has no type yet.
        """
        plain = getattr(owner, method)

        @functools.wraps(plain)
        def stepping(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - whatever is wrapped
            message, fds = plain(*args, **options)
            step = f"receive:{message.type}"
            self.end(step, self.begin(step))
            return message, fds

        setattr(owner, method, stepping)


def recorded(path: Path) -> Counter[str]:
    """The steps that a process passed."""
    return Counter(path.read_text().split()) if path.exists() else Counter()


CALLS: Final = {
    "PUT producers": "call:report_producer",
    "PUT consumers": "call:report_consumer",
    "POST leases": "call:grant_lease",
    "POST release": "call:release_lease",
}


def _shape(call: Call[Any]) -> str:
    """Method and noun of a call, without ids: `/v1/producers/p` and `/v1/leases/l/release`."""
    parts = call.path.split("/")
    return f"{call.method} {parts[2] if len(parts) < 5 else parts[4]}"


def watch_member(ledger: Ledger) -> None:
    """Make steps of what producers and consumers do."""
    from aqua_client import CoordinatorClient
    from aqualib.channel import Channel
    from aqualib.transports.base import MappedSlab
    from aqualib.transports.host import HostCopier
    from aqualib.transports.memfd import MemfdTransport

    for method in ("send", "try_send"):
        ledger.watch(Channel, method, lambda _, message, *_a, **_o: f"send:{message.type}")
    ledger.watch_received(Channel, "receive")
    ledger.watch(CoordinatorClient, "send", lambda _, call: CALLS.get(_shape(call)))
    ledger.watch(MemfdTransport, "create", _named("slab:create"))
    ledger.watch(MemfdTransport, "open", _named("slab:map"))
    ledger.watch(MappedSlab, "close", lambda slab: f"slab:close-{type(slab).__name__}")
    for method in ("copy", "copy_bytes"):
        ledger.watch(HostCopier, method, _named("copy"))


def watch_coordinator(ledger: Ledger) -> None:
    """Make steps of the scripts that a coordinator runs over the books."""
    from aqua_coordinator.embedded import EmbeddedValkey
    from aqua_coordinator.store.pipeline import Pipeline

    script = Pipeline.script

    @functools.wraps(script)
    def stepping(pipeline: Pipeline, name: str, *arguments: Argument) -> Future[Answer]:
        step = f"script:{name}"
        number = ledger.begin(step)
        future = script(pipeline, name, *arguments)
        # After: the books have changed, and nobody has been told yet.
        future.add_done_callback(lambda _: ledger.end(step, number))
        return future

    Pipeline.script = stepping  # type: ignore[method-assign,assignment] # from the outside
    start = EmbeddedValkey.start

    @functools.wraps(start)
    def starting(store: EmbeddedValkey) -> None:
        start(store)
        ledger.store_pid = lambda: store.pid
        ledger.store_data = store.data_dir

    EmbeddedValkey.start = starting  # type: ignore[method-assign,assignment] # from the outside


def _named(name: str) -> Callable[..., str]:
    return lambda *_args, **_options: name
