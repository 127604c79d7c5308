"""Deterministic simulation of a whole cluster: real decisions on a virtual clock, with faults.

A run is a seed and a number of steps. The seed draws a plan of faults, and the machine's every
choice: whose turn it is, how long a message takes, what engines and workloads do. After each step
the invariants are checked. When the faults are over and the workloads idle, everything must come to
rest; when the members have left, the books must be empty.

    failure = simulate(Run(seed=7, steps=5000)).failure     # None, or what went wrong
    shrink(failure)                                         # with as few faults as can be

A run repeats exactly, so `make simulate SEED=7 STEPS=5000` is all that a report has to say.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from structlog.testing import capture_logs

from aqua_coordinator.access.tokens import Role
from aqua_coordinator.store.keys import KEYS
from aqua_coordinator.store.scripts import Library
from aqua_protocol import AquaError
from aqua_protocol.leases import LeaseView
from aqua_protocol.members import ConsumerAck, HeldLease
from harness.members_on_paper import PaperProducer
from harness.simulated_faults import (
    BEGIN,
    CONSUMERS,
    LIAR,
    MEMBERS,
    PRODUCERS,
    UNEXCUSED,
    Fault,
    Kind,
    plan,
)
from harness.simulated_members import (
    DOMAIN,
    SLAB,
    Memory,
    SimulatedConsumer,
    SimulatedProducer,
)
from harness.simulated_store import Coordinator, Link, Network, Store, answer_of
from harness.virtual_machine import Machine, Process
from harness.virtual_modules import stand_ins

COORDINATORS: Final = 2

EXCUSE_S: Final = 45.0
"""How long after its end a fault may still cost a lease: the longest time to live, and some."""
RESTART_S: Final = 4.0
"""How soon a process that was killed is started anew."""
REST_S: Final = 90.0
"""Time to come to rest: longer than any backoff and time to live."""
CALM_S: Final = 10.0
"""Between two looks at whether all is at rest."""
EMPTY_S: Final = 200.0
"""Time for records that expire to be gone."""
RIGHTS_LOST: Final = frozenset(
    {"expired", "producer_lost", "consumer_lost", "unknown", "stale_epoch", "producer_restarted"}
)
"""Reasons for the end of a right that nobody has asked for."""


@dataclass(frozen=True)
class Run:
    """What makes a run the run that it is.

    Attributes:
        seed: Of everything.
        steps: For how many the faults are planned.
        only: Faults of the plan, by number, that happen; None for all.
        until: Steps before the cluster is let come to rest; None for all.
        kinds: Faults that may be planned.
    """

    seed: int
    steps: int
    only: tuple[int, ...] | None = None
    until: int | None = None
    kinds: tuple[Kind, ...] = tuple(Kind)

    def faults(self) -> dict[int, Fault]:
        """Those that happen, by number."""
        planned = dict(enumerate(plan(self.seed, self.steps, self.kinds)))
        return planned if self.only is None else {n: planned[n] for n in self.only}

    def __str__(self) -> str:
        words = [f"make simulate SEED={self.seed} STEPS={self.steps}"]
        if self.only is not None:
            words.append(f"ONLY={','.join(map(str, self.only)) or 'none'}")
        if self.until is not None:
            words.append(f"UNTIL={self.until}")
        return " ".join(words)


@dataclass(frozen=True)
class Failure:
    """What went wrong in a run.

    Attributes:
        run: How to see it again.
        what: The first invariant that did not hold.
        at_step: The step after which it did not.
        trace: The last events.
    """

    run: Run
    what: str
    at_step: int
    trace: tuple[str, ...] = field(repr=False)

    def __str__(self) -> str:
        faults = [f"    {number:2}: {fault}" for number, fault in self.run.faults().items()]
        return "\n".join(
            [
                f"after step {self.at_step}: {self.what}",
                f"  again: {self.run}",
                *("  faults:", *faults),
                *("  before it:", *(f"    {line}" for line in self.trace)),
            ]
        )


@dataclass(frozen=True)
class Outcome:
    """A run that has ended.

    Attributes:
        failure: None if all went well.
        digest: Of all that happened, to compare runs.
        counts: How often what happened: evidence that the run was about something.
    """

    steps: int
    failure: Failure | None
    digest: str
    counts: dict[str, int]


class ViolationError(Exception):
    """An invariant does not hold."""


class Cluster:
    """Everything in one run.

    Args:
        libraries: The Lua text that each coordinator has; None for the real one.
    """

    def __init__(self, machine: Machine, libraries: tuple[Library | None, ...] = (None,)) -> None:
        self.machine = machine
        self.problems: list[str] = []
        self.memory = Memory(self.problems.append)
        self.network = Network(machine)
        self.store = Store(machine)
        self.ledger = self.store.ledger()
        self._libraries = libraries
        self.trace: list[str] = []
        self.counts: dict[str, int] = {}
        self.granted: dict[str, LeaseView] = {}
        self._disturbed: list[tuple[float, str]] = []
        self.producers: dict[str, SimulatedProducer] = {}
        self.consumers: dict[str, SimulatedConsumer] = {}
        self.coordinators: dict[str, Coordinator] = {}
        self.liar: Process | None = None
        self._checked_writes = -1
        self.torn_until_s = -1.0
        self._started_s: dict[str, float] = {}
        self._is_resting = False
        self._is_leaving = False
        for index in range(COORDINATORS):
            self.start(f"coordinator-{index}")
        for name in MEMBERS:
            self.start(name)

    # --- Parts -----------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Start a process, or start it anew."""
        machine = self.machine
        self._started_s[name] = machine.now_s if machine.steps else -EXCUSE_S
        if name in PRODUCERS:
            link = Link(self.network, name, Role.PRODUCER)
            self.producers[name] = SimulatedProducer(machine, name, self.memory, link)
        elif name in CONSUMERS:
            link = Link(
                self.network,
                name,
                Role.CONSUMER,
                granted=self._note_grant,
                told=lambda ack: self._note_ended(name, ack),
            )
            consumer = SimulatedConsumer(machine, name, self.memory, link)
            consumer.is_idle = self._is_resting
            self.consumers[name] = consumer
        elif name == LIAR:
            self.liar = Process(machine, LIAR)
            self.liar.start(self._lie)
        else:
            library = self._libraries[int(name[-1]) % len(self._libraries)]
            self.coordinators[name] = Coordinator(
                self.network,
                name,
                self.store.ledger(library),
                failed=self.problems.append,
                swept=self._note_swept,
            )
            self.network.coordinators = list(self.coordinators.values())
            return
        if name != LIAR:
            # A producer may have killed it.
            self.process(name).on_death.append(
                lambda: machine.after(RESTART_S, lambda: self.start_again(name))
            )

    def start_again(self, name: str) -> None:
        """Start a process unless it runs, or all are leaving."""
        if not self._is_leaving and not self.process(name).is_alive:
            self.start(name)

    def process(self, name: str) -> Process:
        """Of this name, as it is now."""
        for parts in (self.producers, self.consumers, self.coordinators):
            if name in parts:
                return parts[name].process
        assert self.liar is not None
        return self.liar

    def count(self, what: str, number: int = 1) -> None:
        """Note that something has happened."""
        self.counts[what] = self.counts.get(what, 0) + number

    def _note_grant(self, lease: LeaseView) -> None:
        if lease.lease_id not in self.granted:
            self.count("grants")
        elif self.granted[lease.lease_id].consumer_id != lease.consumer_id:
            self.problems.append(f"{lease.lease_id} was granted to two consumers")
        self.granted[lease.lease_id] = lease
        self.note(f"{lease.lease_id}: {lease.producer_id} to {lease.consumer_id}")

    def _note_ended(self, name: str, ack: ConsumerAck) -> None:
        client = self.consumers[name].client
        assert client is not None
        kept = {a.lease_id for a in client.attachments if a.kept_bytes and not a.is_ending}
        for notice in ack.ended:
            self.note(f"{name} hears that {notice.lease_id} has ended: {notice.reason}")
            self.count(f"ended: {notice.reason}")
            granted = self.granted.get(notice.lease_id)
            is_lost = notice.reason in RIGHTS_LOST or notice.lease_id in kept
            if is_lost and granted and not self._is_excused(name, granted.producer_id):
                self.problems.append(
                    f"{name} lost {notice.lease_id} of {granted.producer_id} without a fault: "
                    f"{notice.reason}"
                )

    def _note_swept(self, ended: int) -> None:
        """A sweep has ended leases or members: none that is alive and heard."""
        if not ended or self._is_leaving:
            return
        rows = [row.producer_id for row in answer_of(self.ledger.producers(limit=1000))]
        rows += [row.consumer_id for row in answer_of(self.ledger.consumers(limit=1000))]
        for name in set(MEMBERS) - set(rows):
            if self.machine.now_s - self._started_s[name] > EXCUSE_S and not self._is_excused(name):
                self.problems.append(f"{name} is out of the books without a fault")

    def note(self, what: str) -> None:
        """Remember an event for the report."""
        self.trace.append(f"{self.machine.now_s:8.2f} s, step {self.machine.steps}: {what}")

    # --- Faults ----------------------------------------------------------------------

    def schedule(self, faults: tuple[Fault, ...]) -> None:
        """Have these happen."""
        for fault in faults:
            self.machine.after(fault.at_s, lambda fault=fault: self._begin(fault))  # type: ignore[misc] # its default is the fault

    def _begin(self, fault: Fault) -> None:
        self.note(f"fault: {fault}")
        self.count(fault.kind)
        undo = BEGIN[fault.kind](self, fault)
        if fault.kind not in UNEXCUSED:
            self._disturbed.append((float("inf"), fault.victim))

        def end() -> None:
            self.note(f"over: {fault}")
            undo()
            if fault.kind not in UNEXCUSED:
                self._disturbed.remove((float("inf"), fault.victim))
                self._disturbed.append((self.machine.now_s + EXCUSE_S, fault.victim))

        self.machine.after(fault.span_s, end)

    def _is_excused(self, *names: str) -> bool:
        """Whether a fault of late may have hurt one of these members."""
        now_s = self.machine.now_s
        return any(
            until_s >= now_s and (victim in names or victim not in MEMBERS)
            for until_s, victim in self._disturbed
        ) or any(now_s - self._started_s[name] < EXCUSE_S for name in names if name in MEMBERS)

    def _lie(self) -> None:
        """Report leases that were never granted, as they occur to somebody who wants to do harm."""
        chance = self.machine.random
        paper = PaperProducer(name=LIAR, slabs=4, domain=DOMAIN)
        link = Link(self.network, LIAR, Role.PRODUCER)
        while True:
            now_us = self.store.now_us()
            ids = [
                f"lease-{now_us + chance.randint(-5, 5_000_000)}",
                f"lease-{chance.getrandbits(64):016x}",
                *chance.sample(sorted(self.granted), min(1, len(self.granted))),
            ]
            held = HeldLease(
                lease_id=chance.choice(ids),
                epoch=now_us - chance.choice([0, 1, 1_000_000]),
                consumer_id=chance.choice([*CONSUMERS, "nobody"]),
                held_bytes=SLAB * chance.randint(1, 4),
                consumer_lost=chance.random() < 0.3,
                proof=chance.choice([None, f"{SLAB}.{chance.getrandbits(128):032x}"]),
            )
            paper.held = {} if chance.random() < 0.2 else {held.lease_id: held}
            try:
                ack = link.report_producer(paper.report())
                paper.books_id = ack.books_id
                self.count("lies taken")
            except AquaError:
                self.count("lies refused")
            self.machine.sleep(chance.uniform(0.1, 2.0))

    # --- Invariants ------------------------------------------------------------------

    def check(self) -> None:
        """What must hold after every step.

        Raises:
            ViolationError: It does not.
        """
        if not self.problems and self.store.redis.writes != self._checked_writes:
            self._check_books()
            self._checked_writes = self.store.redis.writes  # The audit itself writes.
        for simulated in self.producers.values():
            if simulated.producer is not None and simulated.process.is_alive:
                simulated.producer.audit()
        if self.problems:
            raise ViolationError(self.problems[0])

    def _check_books(self) -> None:
        if self.store.is_away or not self.store.redis.command("EXISTS", KEYS["books"]):
            return
        if self.machine.now_s > self.torn_until_s:
            self.problems += answer_of(self.ledger.audit())
        for lease in answer_of(self.ledger.leases(limit=1000))[0]:
            granted = self.granted.get(lease.lease_id)
            if lease.consumer_id in CONSUMERS and (
                granted is None or granted.consumer_id != lease.consumer_id
            ):
                self.problems.append(
                    f"{lease.lease_id} of {lease.producer_id} names {lease.consumer_id}, "
                    "which was never granted it"
                )

    # --- Rest ------------------------------------------------------------------------

    def rest(self) -> None:
        """Let workloads end, and wait until nothing is lent any more.

        Raises:
            ViolationError: Something goes wrong meanwhile, or never ends.
        """
        self._is_resting = True
        for consumer in self.consumers.values():
            consumer.is_idle = True
        end_s = self.machine.now_s + REST_S
        while self.machine.now_s < end_s:
            self._go_on(CALM_S)
            if self._is_at_rest():
                return
        held = [f"{lease}" for lease in answer_of(self.ledger.leases(limit=1000))[0]]
        self.problems.append(
            f"no rest: {self.memory.mapped()} slabs are mapped, booked: {'; '.join(held) or 'none'}"
        )
        self.check()

    def _go_on(self, seconds: float) -> None:
        end_s = self.machine.now_s + seconds
        while self.machine.now_s < end_s:
            self.step()

    def _is_at_rest(self) -> bool:
        return not self.memory.mapped() and not answer_of(self.ledger.leases(limit=1000))[0]

    def leave(self) -> None:
        """Let all members die, and time pass; the books must be empty after it.

        Raises:
            ViolationError: They are not.
        """
        self._is_leaving = True
        for name in MEMBERS:
            self.process(name).kill()
        self._go_on(EMPTY_S)
        left = set(self.store.redis.keys()) - {KEYS[name] for name in _FOR_EVER}
        if left:
            self.problems.append(f"keys stay: {', '.join(sorted(left))}")
        if self.memory.slabs:
            self.problems.append(f"slabs stay: {sorted(self.memory.slabs)}")
        self.check()

    def step(self) -> None:
        """One step, and the check after it."""
        self.machine.step()
        self.check()


_FOR_EVER: Final = (
    *("books", "events", "libraries", "quarantine"),
    *("reclaim_history", "samples"),
)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    gc.collect()
    try:
        with capture_logs():
            yield
    finally:
        logging.disable(before)


def simulate(run: Run, libraries: tuple[Library | None, ...] = (None,)) -> Outcome:
    """One run.

    Args:
        libraries: Lua texts, one for each coordinator in turn; None is the real one.
    """
    machine = Machine(f"run {run.seed}")
    faults = tuple(run.faults().values())
    steps = run.steps if run.until is None else run.until
    failure = None
    with _quietly(), stand_ins(machine):
        cluster = Cluster(machine, libraries)
        cluster.schedule(faults)
        over_s = max((fault.at_s + fault.span_s for fault in faults), default=0.0)
        try:
            while machine.steps < steps or machine.now_s <= over_s:
                cluster.step()
            cluster.rest()
            cluster.leave()
        except Exception as error:  # noqa: BLE001 - also what would have ended a member's thread
            what = str(error) if isinstance(error, ViolationError) else f"raised {error!r}"
            failure = Failure(run, what, machine.steps, tuple(cluster.trace[-25:]))
        finally:
            machine.close()
        cluster.count("slabs", cluster.memory.count)
    told = "\n".join([*cluster.trace, f"{machine.now_s} {machine.steps} {failure}"])
    digest = hashlib.sha256(told.encode()).hexdigest()
    return Outcome(machine.steps, failure, digest, cluster.counts)


def shrink(failure: Failure, libraries: tuple[Library | None, ...] = (None,)) -> Failure:
    """The failure, or one like it, with fewer faults and steps.

    Faults are left out by halves, quarters, and so on; then the run is cut by halves.
    """
    best = replace(failure, run=replace(failure.run, only=tuple(failure.run.faults())))

    def still(**changes: object) -> bool:
        nonlocal best
        found = simulate(replace(best.run, **changes), libraries).failure  # type: ignore[arg-type] # fields of a Run
        best = found or best
        return found is not None

    size = len(best.run.only or ())
    while size:
        at = 0
        while at < len(only := best.run.only or ()):
            if not still(only=only[:at] + only[at + size :]):
                at += size
        size //= 2
    low, high = 0, best.run.steps
    while high - low > best.run.steps // 20:
        middle = (low + high) // 2
        low, high = (low, middle) if still(until=middle) else (middle, high)
    return best
