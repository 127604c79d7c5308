"""How long a solve may take, and who hears about it.

A budget joins the three ways a solve ends early: the time limit, an interrupt (Ctrl-C, a closed
connection) and having nothing left to gain. Solvers ask `expired()` between rounds and return the
best plan and bound they have; they never raise for it. The clock arrives as a parameter.

Work inside solvers is counted in rounds, not in seconds: as long as the limit is not reached, the
same seed gives the same plan on any machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from aqua_protocol import ConfigError

MAX_TIME_LIMIT_S = 86_400.0
"""A day, in seconds: more is a slip of the unit. Doubled, a slip is found later."""


@dataclass(frozen=True)
class Progress:
    """One line of live progress: the best value and bound so far, in the objective's unit."""

    stage: str
    value: float | None
    bound: float | None
    elapsed_s: float

    @property
    def gap(self) -> float | None:
        """Relative distance of value and bound; None until both are known."""
        if self.value is None or self.bound is None:
            return None
        return relative_gap(self.value, self.bound)


def relative_gap(value: float, bound: float) -> float:
    """Distance of value and bound relative to the larger of both, 0 when they meet."""
    scale = max(abs(value), abs(bound))
    distance = abs(value - bound)
    return 0.0 if distance <= 1e-9 * max(scale, 1.0) else distance / scale


@dataclass
class Budget:
    """Time limit, interrupt and progress of one solve.

    Args:
        limit_s: Seconds from construction; finite and above 0.
        listener: Called from the solving thread for each `Progress`; must return quickly.
        interrupt: Set from any thread to end the solve with what it has.
    """

    limit_s: float = 60.0
    listener: Callable[[Progress], None] | None = None
    interrupt: threading.Event = field(default_factory=threading.Event)
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        if not 0 < self.limit_s <= MAX_TIME_LIMIT_S:
            raise ConfigError(
                f"the time limit is {self.limit_s} s",
                remedy=f"Choose a number of seconds above 0 and up to {MAX_TIME_LIMIT_S:.0f}.",
            )
        self._started_s = self.clock()

    def elapsed_s(self) -> float:
        """Seconds since the solve began."""
        return self.clock() - self._started_s

    def remaining_s(self) -> float:
        """Seconds until the limit; 0 after an interrupt."""
        return 0.0 if self.interrupt.is_set() else max(0.0, self.limit_s - self.elapsed_s())

    def expired(self) -> bool:
        """Whether to stop now."""
        return self.remaining_s() <= 0

    def report(self, stage: str, value: float | None = None, bound: float | None = None) -> None:
        """Tell the listener, if there is one, what is known now."""
        if self.listener is not None:
            self.listener(Progress(stage, value, bound, self.elapsed_s()))
