"""An event loop whose clock jumps: what waits for a time is there at once, in the right order.

Where nothing is left to do at one moment, the clock moves to the next timer, so an hour of sleeping
takes no time and a busy machine makes nothing late. Sockets work, if what is sent has arrived at
once: Unix sockets of this process, with both ends on the loop.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable
from typing import Final

STEP_S: Final = 1e-6
"""Virtual seconds of one step of the loop: far below any time measured."""

STUCK_S: Final = 30.0
"""Real seconds without an event and without a timer: nothing will ever happen."""


class _JumpingSelector(selectors.DefaultSelector):
    """Polls; instead of waiting it moves the clock."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # A step of the loop takes a moment, or one that sleeps for less than a float can tell from
        # now would sleep for ever.
        self.now_s += STEP_S
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is None:
            events = super().select(STUCK_S)
            assert events, "nothing is scheduled and nothing comes"
            return events
        self.now_s += timeout
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop on a virtual clock, which starts at zero."""

    def __init__(self) -> None:
        self._virtual = _JumpingSelector()
        super().__init__(self._virtual)
        self._on_close: list[Callable[[], None]] = []

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual.now_s

    def before_closing(self, act: Callable[[], None]) -> None:
        """Do this, too, when the loop is closed."""
        self._on_close.append(act)

    def close(self) -> None:
        """Close what was opened for the loop, then the loop."""
        while self._on_close:
            self._on_close.pop()()
            self.run_until_complete(asyncio.sleep(0))
        super().close()


class VirtualTimePolicy(asyncio.DefaultEventLoopPolicy):
    """Makes every new event loop a virtual one, with something on it from the start.

    Args:
        start: Run on each new loop before anything else.
    """

    def __init__(self, start: Callable[[VirtualTimeLoop], Awaitable[None]]) -> None:
        super().__init__()
        self._start = start

    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        """A virtual loop."""
        loop = VirtualTimeLoop()
        loop.run_until_complete(self._start(loop))
        return loop
