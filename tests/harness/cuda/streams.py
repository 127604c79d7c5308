"""Streams that run late: queues of work which the stand-in empties when it must, or as a seed says.

A piece of work runs when someone waits for it, and otherwise whenever the generator of the seed
likes, with all that CUDA orders before it and nothing else. So a program that forgot an order meets
every order there is, and most often the one where nothing has happened yet.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from harness.cuda.violations import Stack

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.cuda.copy_ahead import CopyAhead
    from harness.cuda.memory import Mapping

Clock = dict[int, int]
"""How much of each stream is known to have happened before."""

LEGACY: Final = 0
"""Handle of the default stream, which waits for all blocking streams and they for it."""


@dataclass(eq=False, slots=True)
class Work:
    """Something queued on a stream."""

    what: str
    stream: Stream
    number: int
    clock: Clock
    run: Callable[[], object] | None
    after: list[Work]
    mappings: list[Mapping] = field(default_factory=list)
    host: list[tuple[int, int]] = field(default_factory=list)
    is_done: bool = False
    ahead: CopyAhead | None = None
    stack: Stack = field(default_factory=Stack)

    def is_after(self, other: Work) -> bool:
        """Whether `other` is sure to have ended before this begins."""
        return self.clock.get(other.stream.number, 0) >= other.number

    def __str__(self) -> str:
        return f"{self.what} on {self.stream}"


@dataclass(eq=False, slots=True)
class Stream:
    """A queue of work of one device.

    Attributes:
        is_blocking: Whether it and the legacy default stream wait for each other.
        is_held: Whether a test keeps it from running; waiting for it is a violation then.
        capture: The mode of the capture under way, or None.
    """

    handle: int
    number: int
    device: int
    is_blocking: bool
    priority: int = 0
    is_held: bool = False
    is_destroyed: bool = False
    capture: str | None = None
    queue: deque[Work] = field(default_factory=deque)
    clock: Clock = field(default_factory=dict)
    count: int = 0
    last: Work | None = None
    waits: list[Work] = field(default_factory=list)

    def __str__(self) -> str:
        name = "the default stream" if self.handle <= LEGACY else f"stream {self.handle:#x}"
        return f"{name} of cuda:{self.device}"


@dataclass(eq=False, slots=True)
class Event:
    """The last point of a stream that was recorded, if any."""

    handle: int
    device: int
    work: Work | None = None


def join(into: Clock, other: Clock) -> None:
    """Know all that both know."""
    for stream, number in other.items():
        if into.get(stream, 0) < number:
            into[stream] = number
