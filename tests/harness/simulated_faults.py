"""Faults of a simulated cluster: what can go wrong, plans of it, and how each begins and ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from aqua_coordinator.store.keys import KEYS

if TYPE_CHECKING:
    from harness.simulation import Cluster

PRODUCERS: Final = ("producer-0", "producer-1")
CONSUMERS: Final = ("consumer-0", "consumer-1", "consumer-2")
LIAR: Final = "liar"

STEPS_A_SECOND: Final = 40
"""About; faults are spread over the time that a run of so many steps takes."""
MAX_FAULTS: Final = 12
HEALED_WITHIN_S: Final = 15.0
"""How long books that lost records may disagree with themselves."""


class Kind(StrEnum):
    """What can go wrong."""

    CRASH = "crash"
    FREEZE = "freeze"
    PARTITION = "partition"
    LOSS = "loss"
    DOUBLING = "doubling"
    LATENESS = "lateness"
    SLOW_LINKS = "slow links"
    REFUSALS = "refusals for capacity"
    STORE_AWAY = "the store is away"
    BOOKS_LOST = "the books are lost"
    RECORDS_LOST = "some records are lost"
    STORE_CLOCK = "the store's clock jumps"
    MEMBER_CLOCK = "a member's clock jumps"
    SLOW_RETURN = "a consumer is slow to give back"
    FLOOD = "strangers flood the coordinators"
    KEEPS_MAPPING = "a consumer keeps what it gives back"
    LIES = "a producer invents leases"


MEMBERS: Final = (*PRODUCERS, *CONSUMERS)
_VICTIMS: Final = {
    Kind.CRASH: (*MEMBERS, "coordinator-0", "coordinator-1"),
    Kind.FREEZE: (*MEMBERS, "coordinator-0", "coordinator-1"),
    Kind.PARTITION: MEMBERS,
    Kind.MEMBER_CLOCK: PRODUCERS,
    Kind.SLOW_RETURN: CONSUMERS,
    Kind.KEEPS_MAPPING: CONSUMERS,
    Kind.LIES: (LIAR,),
}
UNEXCUSED: Final = frozenset({Kind.LIES, Kind.KEEPS_MAPPING, Kind.DOUBLING, Kind.FLOOD})
"""Faults for which no honest member may lose a lease."""


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong for a while; `amount` is a share, or seconds of a clock."""

    kind: Kind
    victim: str
    at_s: float
    span_s: float
    amount: float

    def __str__(self) -> str:
        return f"{self.at_s:7.1f} s for {self.span_s:4.1f} s: {self.kind} {self.victim}"


def plan(seed: int, steps: int, kinds: tuple[Kind, ...]) -> tuple[Fault, ...]:
    """Faults for a run: none in some, many in others, in the order of their time."""
    chance = random.Random(f"faults {seed}")
    # Few kinds in a run, so that some runs lack those that would excuse an error.
    chosen = chance.sample(kinds, min(len(kinds), chance.choice([1, 2, 4, 8, 16])))
    length_s = steps / STEPS_A_SECOND
    faults = []
    for _ in range(chance.randint(0, MAX_FAULTS) if chosen else 0):
        kind = chance.choice(chosen)
        faults.append(
            Fault(
                kind,
                chance.choice(_VICTIMS.get(kind, ("",))),
                at_s=round(chance.uniform(0.0, length_s), 1),
                span_s=round(chance.choice([0.5, 2.0, 8.0, 25.0]) * chance.uniform(0.5, 1.5), 1),
                amount=round(chance.choice([0.1, 0.3, 1.0]) * chance.uniform(0.2, 1.0), 2),
            )
        )
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def _crash(cluster: Cluster, fault: Fault) -> Callable[[], None]:
    cluster.process(fault.victim).kill()
    return lambda: cluster.start_again(fault.victim)


def _freeze(cluster: Cluster, fault: Fault) -> Callable[[], None]:
    process = cluster.process(fault.victim)
    process.stop()
    return process.go_on


def _cut(cluster: Cluster, fault: Fault) -> Callable[[], None]:
    cluster.network.cut.add(fault.victim)
    return lambda: cluster.network.cut.discard(fault.victim)


def _set(
    part: str, name: str, scale: float = 1.0
) -> Callable[[Cluster, Fault], Callable[[], None]]:
    """Set a number of a part for a while."""

    def begin(cluster: Cluster, fault: Fault) -> Callable[[], None]:
        target = getattr(cluster, part)
        usual = 0.001 if name == "latency_s" else 0.0
        setattr(target, name, fault.amount * scale)
        return lambda: setattr(target, name, usual)

    return begin


def _away(cluster: Cluster, fault: Fault) -> Callable[[], None]:
    del fault
    cluster.store.is_away = True

    def back() -> None:
        cluster.store.is_away = False

    return back


def _lose_books(cluster: Cluster, fault: Fault) -> Callable[[], None]:
    del fault
    cluster.store.redis.command("FLUSHALL")
    return lambda: None


def _lose_records(cluster: Cluster, fault: Fault) -> Callable[[], None]:
    keys = set(cluster.store.redis.keys()) - {KEYS["books"]}
    chance = cluster.machine.random
    cluster.torn_until_s = cluster.machine.now_s + HEALED_WITHIN_S
    cluster.store.redis.forget(key for key in sorted(keys) if chance.random() < fault.amount)
    return lambda: None


def _jump(cluster: Cluster, fault: Fault) -> Callable[[], None]:
    seconds = fault.amount * 60 * cluster.machine.random.choice([-1, 1])
    cluster.store.skew_s += seconds
    return lambda: setattr(cluster.store, "skew_s", cluster.store.skew_s - seconds)


def _skew(cluster: Cluster, fault: Fault) -> Callable[[], None]:
    process = cluster.process(fault.victim)
    process.skew_s = fault.amount * 60 * cluster.machine.random.choice([-1, 1])
    return lambda: setattr(process, "skew_s", 0.0)


def _slow(cluster: Cluster, fault: Fault) -> Callable[[], None]:
    frames = cluster.consumers[fault.victim].frames
    frames.slow_s = fault.amount * 20
    return lambda: setattr(frames, "slow_s", 0.2)


def _keep(cluster: Cluster, fault: Fault) -> Callable[[], None]:
    consumer = cluster.consumers[fault.victim]
    consumer.frames.keeps = True
    # What it has kept goes with its process.
    return lambda: cluster.process(fault.victim).kill()


def _flood(cluster: Cluster, fault: Fault) -> Callable[[], None]:
    # Until the run is over: the cluster must come to rest although they are there.
    del fault
    cluster.network.is_flooded = True
    return lambda: None


def _begin_to_lie(cluster: Cluster, fault: Fault) -> Callable[[], None]:
    if cluster.liar is None or not cluster.liar.is_alive:
        cluster.start(fault.victim)
    liar = cluster.liar
    assert liar is not None
    return liar.kill


BEGIN: Final[dict[Kind, Callable[[Cluster, Fault], Callable[[], None]]]] = {
    Kind.CRASH: _crash,
    Kind.FREEZE: _freeze,
    Kind.PARTITION: _cut,
    Kind.LOSS: _set("network", "loss"),
    Kind.DOUBLING: _set("network", "doubling"),
    Kind.LATENESS: _set("network", "lateness"),
    Kind.SLOW_LINKS: _set("machine", "latency_s"),
    Kind.REFUSALS: _set("network", "refusals"),
    Kind.STORE_AWAY: _away,
    Kind.BOOKS_LOST: _lose_books,
    Kind.RECORDS_LOST: _lose_records,
    Kind.STORE_CLOCK: _jump,
    Kind.MEMBER_CLOCK: _skew,
    Kind.SLOW_RETURN: _slow,
    Kind.FLOOD: _flood,
    Kind.KEEPS_MAPPING: _keep,
    Kind.LIES: _begin_to_lie,
}
"""How each fault begins; what it returns ends it."""
