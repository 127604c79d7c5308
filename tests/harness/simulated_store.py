"""Coordinators of a simulated cluster, the books behind them, and the network before them.

The operations are the ones that the routes have, over a real `Ledger` with the real Lua library in
a `RedisOnPaper`. A request and its answer may each be lost, late, doubled or overtaken, and a
caller gives up after a while without knowing which.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, TypeVar, cast

from redis.exceptions import ResponseError

from aqua_coordinator.access.auth import Caller
from aqua_coordinator.access.quotas import Quotas
from aqua_coordinator.access.rates import CallerRates
from aqua_coordinator.access.tokens import Role
from aqua_coordinator.metrics import Metrics
from aqua_coordinator.routes import leases, members
from aqua_coordinator.services import CapabilitySigner, HeartbeatRate, Services
from aqua_coordinator.settings import CoordinatorSettings
from aqua_coordinator.store import Ledger, Pipeline
from aqua_coordinator.store.keys import KEYS
from aqua_coordinator.store.pipeline import SHARING, Argument, store_error
from aqua_coordinator.store.scripts import SWEEP_PERIOD_S, Library, load_library
from aqua_protocol import AquaError, UnavailableError
from aqua_protocol.errors import StoreUnavailableError
from aqua_protocol.leases import (
    AttachFailure,
    LeaseGrant,
    LeaseRelease,
    LeaseRequest,
    LeaseView,
)
from aqua_protocol.members import ConsumerAck, ConsumerReport, ProducerAck, ProducerReport
from harness.members_on_paper import ADOPTION
from harness.redis_on_paper import RedisOnPaper, Reply, ScriptError
from harness.virtual_machine import EPOCH_S, Machine, Process

AnswerT = TypeVar("AnswerT")
Operation = Callable[[Services], Coroutine[Any, Any, AnswerT]]

SETTINGS: Final = CoordinatorSettings(data_dir=Path("/nowhere"), silent_member_s=10.0)
ANSWER_WITHIN_S: Final = 2.0
"""How long a member waits for a coordinator."""
REFUSED_AFTER_S: Final = 0.01
LATE_S: Final = 8.0
"""How late a message may be that its sender has given up."""


def answer_of(operation: Awaitable[AnswerT]) -> AnswerT:
    """The answer of a coroutine that waits for nothing outside of this process."""
    steps = operation.__await__()
    try:
        while True:
            next(steps)
    except StopIteration as end:
        return cast("AnswerT", end.value)


class Store:
    """The server with the books.

    Attributes:
        is_away: It answers nobody.
        skew_s: How far its clock is ahead.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.is_away = False
        self.skew_s = 0.0
        self.redis = RedisOnPaper(self.now_us)

    def now_us(self) -> int:
        """Unix time by this server's clock, in microseconds."""
        return round((EPOCH_S + self._machine.now_s + self.skew_s) * 1e6)

    def ledger(self, library: Library | None = None) -> Ledger:
        """A ledger over these books, whose scripts are the real ones or these."""
        return Ledger(cast("Pipeline", _Connection(self, library or load_library())), ADOPTION)


class _Connection:
    """What a ledger needs of a `Pipeline`; every answer is there at once."""

    def __init__(self, store: Store, library: Library) -> None:
        self._store = store
        self._library = library
        self.library_name = library.name
        store.redis.load(library.source)

    async def script(self, name: str, *arguments: Argument) -> Reply:
        self._require()
        try:
            if name not in SHARING:
                return self._call(name, *arguments)
            several = self._call("run_several", name, len(arguments), *arguments)
            answer = several[1][0] if several[0] == b"ok" else several
            if isinstance(answer, ScriptError):
                raise answer
        except ScriptError as error:
            raise store_error(ResponseError(str(error))) from error
        return answer

    async def command(self, *words: Argument) -> Reply:
        self._require()
        return self._store.redis.command(*words)

    async def forget_libraries(self, names: list[str]) -> None:
        """A library costs nothing here."""

    async def close(self) -> None:
        """Nothing is open."""

    def _call(self, name: str, *arguments: Argument) -> Reply:
        return self._store.redis.call(self._library.function(name), KEYS["books"], *arguments)

    def _require(self) -> None:
        if self._store.is_away:
            raise StoreUnavailableError("the store does not answer", retry_after_s=1.0)


class Coordinator:
    """One coordinator: operations when asked, and the sweep.

    Args:
        failed: Told what went wrong that must never go wrong.
        swept: Told after each sweep how many leases and members it has ended.
    """

    def __init__(
        self,
        network: Network,
        name: str,
        ledger: Ledger,
        *,
        failed: Callable[[str], None],
        swept: Callable[[int], None],
    ) -> None:
        self.network = network
        self.process = Process(network.machine, name)
        self._failed = failed
        self._swept = swept
        # As much of the services as the operations of members work with.
        self._services = cast(
            "Services",
            SimpleNamespace(
                settings=SETTINGS,
                ledger=ledger,
                tracer=None,
                signer=CapabilitySigner(ledger, SETTINGS),
                metrics=_METRICS,
                heartbeats=HeartbeatRate(SETTINGS.heartbeat_s, clock=lambda: network.machine.now_s),
                rates=CallerRates(SETTINGS, Quotas(None), _METRICS.rate_refusals),
            ),
        )
        self._is_present = False
        self.process.start(self._live)

    def serve(self, operation: Operation[AnswerT]) -> AnswerT | AquaError:
        """What the operation answers."""
        try:
            return answer_of(operation(self._services))
        except AquaError as error:
            return error
        except AssertionError as error:
            self._failed(f"an operation of {self.process.name} failed: {error}")
            return AquaError("the coordinator made a mistake")

    def _live(self) -> None:
        while True:
            self.sweep()
            self.network.machine.sleep(SWEEP_PERIOD_S)

    def sweep(self) -> None:
        """One round of what `Service` does for ever: the books' clock, and expiry."""
        ended = self.serve(self._sweep)
        self._is_present = not isinstance(ended, AquaError)
        if not isinstance(ended, AquaError):
            self._swept(ended)
        elif not isinstance(ended, UnavailableError):
            self._failed(f"the sweep of {self.process.name} was refused: {ended}")

    async def _sweep(self, services: Services) -> int:
        heartbeats = services.heartbeats
        is_refusing, heartbeats.is_refusing = heartbeats.is_refusing, False
        heartbeats.spread_s, silent_s = await services.ledger.advance_clock(
            silent_s=SETTINGS.silent_member_s,
            max_stop_s=SETTINGS.max_clock_stop_s,
            is_refusing=int(is_refusing),
            is_present=int(self._is_present),
        )
        return await services.ledger.sweep(silent_s=silent_s)

    def refuse(self) -> UnavailableError:
        """There is no room for a request of a member: as `RequestLimits` does it."""
        self._services.heartbeats.is_refusing = True
        return UnavailableError("at the limit of requests", retry_after_s=1.0)


_METRICS: Final = Metrics()


class Network:
    """What happens to requests between members and coordinators.

    Attributes:
        coordinators: Those that take requests.
        loss, doubling, lateness, refusals: Shares of the messages that it happens to. The
            second copy of a doubled one may come seconds later.
        cut: Members that reach no coordinator.
        is_flooded: Strangers fill whatever room there is for them.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.coordinators: list[Coordinator] = []
        self.loss = self.doubling = self.lateness = self.refusals = 0.0
        self.cut: set[str] = set()
        self.is_flooded = False

    def ask(self, member: str, operation: Operation[AnswerT]) -> AnswerT:
        """Send a request on the calling thread, and wait for the answer.

        Raises:
            AquaError: The coordinator refuses, or no answer came.
        """
        machine, answers = self.machine, list[Any]()
        waiter = machine.park(ANSWER_WITHIN_S)
        coordinator = machine.random.choice(self.coordinators)

        def hear(answer: object) -> None:
            answers.append(answer)
            waiter.wake()

        def arrive() -> None:
            if not coordinator.process.is_alive:
                refusal = UnavailableError("nobody listens")
                self.machine.after(REFUSED_AFTER_S, lambda: hear(refusal))
            elif coordinator.process.is_stopped:
                coordinator.process.held_up.append(arrive)
            elif self.refuses(member):
                busy = coordinator.refuse()
                self._carry(member, lambda: hear(busy))
            else:
                answer = coordinator.serve(operation)
                self._carry(member, lambda: hear(answer))

        self._carry(member, arrive)
        if machine.random.random() < self.doubling:
            self.machine.after(machine.random.uniform(0.0, LATE_S), arrive)
        if not waiter.wait():
            raise UnavailableError("no coordinator answers")
        if isinstance(answers[0], AquaError):
            raise answers[0]
        return cast("AnswerT", answers[0])

    def refuses(self, member: str) -> bool:
        """Whether a coordinator has no room for a member's request now."""
        del member  # Room is kept for all who have a token, flood or not.
        return self.machine.random.random() < self.refusals

    def _carry(self, member: str, arrive: Callable[[], None]) -> None:
        chance = self.machine.random
        if member in self.cut or chance.random() < self.loss:
            return
        longest_s = LATE_S if chance.random() < self.lateness else self.machine.latency_s
        self.machine.after(chance.uniform(0.0, longest_s), arrive)


class Link:
    """What a member calls: `aqua_client.CoordinatorClient` over the network.

    Args:
        granted: Told of each grant as the books make it.
        told: Told of each answer to a consumer's report.
    """

    def __init__(
        self,
        network: Network,
        member: str,
        role: Role,
        granted: Callable[[LeaseView], None] = lambda _: None,
        told: Callable[[ConsumerAck], None] = lambda _: None,
    ) -> None:
        self._network = network
        self._member = member
        self._caller = Caller(frozenset({role}), member)
        self._granted = granted
        self._told = told

    def report_producer(self, report: ProducerReport) -> ProducerAck:
        """As the client's."""
        return self._ask(
            lambda services: members.report_producer(
                report.producer_id, report, self._caller, services
            )
        )

    def report_consumer(self, report: ConsumerReport) -> ConsumerAck:
        """As the client's."""
        ack = self._ask(
            lambda services: members.report_consumer(
                report.consumer_id, report, self._caller, services
            )
        )
        self._told(ack)
        return ack

    def grant_lease(self, request: LeaseRequest, *, idempotency_key: str) -> LeaseGrant:
        """As the client's."""

        async def grant(services: Services) -> LeaseGrant:
            made = await leases.grant_lease(request, self._caller, services, idempotency_key)
            self._granted(made.lease)
            return made

        return self._ask(grant)

    def release_lease(
        self, lease_id: str, epoch: int, failure: AttachFailure | None = None
    ) -> LeaseView:
        """As the client's."""
        action = LeaseRelease(epoch=epoch, failure=failure)
        return self._ask(
            lambda services: leases.release_lease(lease_id, action, self._caller, services)
        )

    def remove_producer(self, producer_id: str, incarnation: str) -> None:
        """As the client's."""
        return self._ask(
            lambda services: members.remove_producer(
                producer_id, incarnation, self._caller, services
            )
        )

    def remove_consumer(self, consumer_id: str, incarnation: str) -> None:
        """As the client's."""
        return self._ask(
            lambda services: members.remove_consumer(
                consumer_id, incarnation, self._caller, services
            )
        )

    def close(self) -> None:
        """As the client's."""

    def _ask(self, operation: Operation[AnswerT]) -> AnswerT:
        return self._network.ask(self._member, operation)
