"""Bounds of waits in tests. They decide nothing: each only catches what hangs.

A test waits for an event and fails when the event cannot come any more. How long that takes is the
machine's affair, and beside busy neighbours it takes several times longer; so no test has a bound
of its own, and the one here is far above what any wait needs and below pytest's limit for a test.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, TypeVar

HANG_S: Final = 240.0
"""Seconds after which a wait is a hang. pytest-timeout ends a test at 300."""
PAUSE_S: Final = 0.002
"""Seconds between two looks. Doubled, tests wait that much longer."""


FoundT = TypeVar("FoundT")


def until(holds: Callable[[], FoundT], what: str | Callable[[], object]) -> FoundT:
    """Look again and again until something is so that no event tells of; what it then is.

    Args:
        what: What never came, for the failure; or tells it then, such as the end of a log.
    """
    elapsed = stopwatch()
    while not (found := holds()):
        assert elapsed() < HANG_S, f"still not so: {what if isinstance(what, str) else what()}"
        time.sleep(PAUSE_S)
    return found


async def async_until(holds: Callable[[], bool]) -> None:
    """Let the loop run until something is so that no event tells of."""
    async with asyncio.timeout(HANG_S):
        while not holds():  # noqa: ASYNC110 - as above
            await asyncio.sleep(PAUSE_S)


def stopwatch() -> Callable[[], float]:
    """Seconds since this call: what a bound has to allow for, because the machine took it."""
    began_s = time.monotonic()
    return lambda: time.monotonic() - began_s
