"""The faults of a soak: which, to whom, when and for how long, all drawn by a seed.

A plan says what is done; what it meets depends on the machine's timing, so a seed repeats the
faults and not the run. One service has at most one fault of a kind that stops or ends it at a time,
several services have theirs together.

Some services are *steady*: they are stopped and cut off, but never killed, so that what leaks in
one process over the whole time can be seen.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class FaultKind(StrEnum):
    """What is done to a service."""

    KILL = "kill"
    """SIGKILL; a successor starts when the fault ends."""
    STOP = "stop"
    """SIGSTOP until then."""
    STALL = "stall"
    """Its network holds bytes back."""
    DROP = "drop"
    """Its network swallows them."""
    RESET = "reset"
    """Its network resets connections and refuses more."""
    SLOW_DISK = "slow disk"
    """Each of the store's syncs takes up to 0.3 s."""
    PRESSURE = "memory pressure"
    """It gets hardly any more memory."""


STORE: Final = "redis"
COORDINATORS: Final = ("coordinator-steady", "coordinator-mortal")
PRODUCERS: Final = ("producer-steady", "producer-mortal")
CONSUMERS: Final = ("consumer-steady", "consumer-mortal-0", "consumer-mortal-1")
MEMBERS: Final = PRODUCERS + CONSUMERS
SERVICES: Final = (STORE, *COORDINATORS, *MEMBERS)
MORTALS: Final = tuple(name for name in SERVICES if not name.endswith("-steady"))

VICTIMS: Final[dict[FaultKind, tuple[str, ...]]] = {
    FaultKind.KILL: MORTALS,
    FaultKind.STOP: SERVICES,
    # A coordinator's network is that to its store; members have theirs to both coordinators.
    FaultKind.STALL: COORDINATORS + MEMBERS,
    FaultKind.DROP: COORDINATORS + MEMBERS,
    FaultKind.RESET: COORDINATORS + MEMBERS,
    FaultKind.SLOW_DISK: (STORE,),
    FaultKind.PRESSURE: MEMBERS,
}
WEIGHTS: Final[dict[FaultKind, int]] = {
    FaultKind.KILL: 4,
    FaultKind.STOP: 3,
    FaultKind.STALL: 1,
    FaultKind.DROP: 1,
    FaultKind.RESET: 1,
    FaultKind.SLOW_DISK: 1,
    FaultKind.PRESSURE: 1,
}
NETWORK: Final = frozenset({FaultKind.STALL, FaultKind.DROP, FaultKind.RESET})
GAP_S: Final = (0.1, 2.5)
"""Between the beginnings of two faults."""
LASTS_S: Final = (0.1, 6.0)


@dataclass(frozen=True)
class Fault:
    """One fault; times in seconds from the period's beginning."""

    kind: FaultKind
    victim: str
    begins_s: float
    ends_s: float
    amount: float
    """From 0 to 1: how bad, where that differs; also whether a successor takes its name."""

    @property
    def part(self) -> tuple[str, str]:
        """What of a service it keeps busy: its process, its network or its disk."""
        if self.kind in NETWORK:
            return self.victim, "network"
        return self.victim, "disk" if self.kind is FaultKind.SLOW_DISK else "process"


def plan(seed: int, period: int, duration_s: float) -> list[Fault]:
    """The faults of one period, by their beginnings; all of them end with it at the latest."""
    draw = random.Random(f"{seed} {period}")
    faults: list[Fault] = []
    busy_until_s: dict[tuple[str, str], float] = {}
    at_s = draw.uniform(*GAP_S)
    while at_s < duration_s:
        (kind,) = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
        ends_s = min(at_s + draw.uniform(*LASTS_S), duration_s)
        fault = Fault(kind, draw.choice(VICTIMS[kind]), at_s, ends_s, draw.random())
        if busy_until_s.get(fault.part, 0.0) <= at_s:
            busy_until_s[fault.part] = ends_s
            faults.append(fault)
        at_s += draw.uniform(*GAP_S)
    return faults
