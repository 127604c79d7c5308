"""Bounds of waits in tests. They decide nothing: each only catches what hangs.

A test waits for an event and fails when the event cannot come any more. How long that takes is the
machine's affair, and beside busy neighbours it takes several times longer; so no test has a bound
of its own, and the one here is far above what any wait needs and below pytest's limit for a test.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

HANG_S: Final = 240.0
"""Seconds after which a wait is a hang. pytest-timeout ends a test at 300."""


def stopwatch() -> Callable[[], float]:
    """Seconds since this call: what a bound has to allow for, because the machine took it."""
    began_s = time.monotonic()
    return lambda: time.monotonic() - began_s
