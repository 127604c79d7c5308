"""Paths of the model, walked by the real parts: books, lending state, admission, signed tokens.

Each step of `LeaseProtocol` is carried out by the code it stands for, over a `Ledger`, and what can
be seen is compared with the model's state after it: who is booked under which right with how many
slabs, and which slabs the producer has out for whom. The model's clock is "a right ends now", so
that a step moves the deadline of that one lease.

Not replayed: what a producer invents (`LEFT_OUT`), and bytes. Floods and upgrades change nothing
in these parts, and must not.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, cast

from aqua_coordinator.services import CapabilitySigner
from aqua_coordinator.settings import CoordinatorSettings
from aqua_coordinator.store import Ledger
from aqua_coordinator.store.keys import KEYS
from aqua_coordinator.store.rows import Grant, ProducerBooked
from aqua_coordinator.store.scripts import RIGHTFUL_STATES
from aqua_protocol import AquaError, UnknownResourceError
from aqua_protocol.errors import BooksRebuildingError
from aqua_protocol.ids import LeaseId, ProducerId
from aqua_protocol.lease import BOOKED_STATES, LeaseState
from aqua_protocol.leases import LeaseView
from aqua_protocol.members import ProducerReport
from aqualib.peers import ProcessIdentity
from aqualib.producer.admission import Admission
from aqualib.producer.escalation import Escalation
from aqualib.producer.lending_state import LendingState
from aqualib.producer.pool import LentSlab
from aqualib.transports.base import OwnedSlab
from harness.lease_state import CONSUMERS, SLABS, Right, State
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer

LEFT_OUT: Final = re.compile("invents")
"""Steps that honest parts do not have."""
SILENT_S: Final = 3600.0
DEADLINE_S: Final = 5.0
ATTACH_WINDOW_S: Final = 100.0
_RIGHTS: Final = {
    LeaseState.GRANTED: Right.GRANTED,
    LeaseState.ACTIVE: Right.ACTIVE,
    LeaseState.RECLAIMING: Right.ACTIVE,
    LeaseState.FENCED: Right.FENCED,
}


class _Memory:
    nbytes = SLAB


class Replay:
    """The real parts, as the steps of one path leave them.

    Args:
        ledger: Over empty books.
        command: A plain command to its server.
    """

    def __init__(self, ledger: Ledger, command: Callable[..., Awaitable[Any]]) -> None:
        self._ledger = ledger
        self._command = command
        self._signer = CapabilitySigner(ledger, CoordinatorSettings())
        self._producer = PaperProducer(slabs=SLABS)
        self._consumers = [PaperConsumer(f"consumer-{c}") for c in CONSUMERS]
        self._leases: dict[int, LeaseView] = {}
        self._tokens: dict[int, str] = {}
        self._loans: dict[int, list[LentSlab]] = {}
        self._late: ProducerReport | None = None
        self._processes = 0
        self._start_producer()

    async def begin(self) -> None:
        """What the model's first state is: members that have reported."""
        for consumer in self._consumers:
            await self._ledger.report_consumer(consumer.report())
        await self.report()

    async def follow(self, step: str, before: State, after: State) -> None:
        """Carry one step out."""
        if found := re.match(r"consumer (\d) (.*)", step):
            await self._of_consumer(int(found[1]), found[2], before, after)
        elif found := re.match(r"(?:the books lose lease|lease) (\d)(?: is forgotten)?$", step):
            await self._command("DEL", KEYS["lease"] + self._leases[int(found[1])].lease_id)
        elif step == "the books are lost":
            await self._command("FLUSHALL")
        elif "the grant's answer" not in step and not await self._of_producer(step, after):
            await self._end_rights(before, after)

    async def _of_producer(self, step: str, after: State) -> bool:
        """Carry the step out if it is the producer's."""
        if step == "the producer reports":
            await self.report()
        elif step == "the producer restarts":
            self._producer.restart()
            self._start_producer()
        elif step == "a report sets out":
            self._late = self._build()
        elif step.startswith("the late report arrives"):
            await self._arrive_late(after)
        elif found := re.match(r"the producer sees consumer (\d) dead", step):
            for view in self._leases.values():
                if view.consumer_id == f"consumer-{found[1]}":
                    self._lending.dead(LeaseId(view.lease_id))
                    self._replace()
        else:
            return False
        return True

    async def differences(self, state: State) -> list[str]:
        """Where the parts are not as the model says."""
        found = []
        told = {held.lease_id for held in self._lending.held_leases()}
        for lease, entry in enumerate(state.books):
            view = self._leases.get(lease)
            real: object = None
            if view is not None:
                try:
                    now = await self._ledger.lease(view.lease_id)
                    right = _RIGHTS.get(now.state, Right.ENDED)
                    slabs = now.bytes // SLAB if now.state in BOOKED_STATES else None
                    real = (right, now.consumer_id, slabs)
                except UnknownResourceError:
                    real = None
            model = entry and (
                entry.right,
                f"consumer-{entry.consumer}",
                None if entry.right is Right.ENDED else entry.slabs,
            )
            model_slabs = sum(slab.lease == lease for slab in state.slabs)
            real_slabs = (
                0 if view is None else len(self._lending.pool.held_by(LeaseId(view.lease_id)))
            )
            is_gone = view is not None and view.lease_id in told and not real_slabs
            if not _agree(model, real, is_gone=is_gone):
                found.append(f"lease {lease}: the books have {real}, the model {model}")
            if real_slabs != model_slabs:
                found.append(f"lease {lease}: {real_slabs} slabs are out, not {model_slabs}")
        return found

    # --- Inside ----------------------------------------------------------------------

    def _start_producer(self) -> None:
        self._lending = LendingState(SLAB, Escalation.WAIT, grace_s=1.0)
        self._admission = Admission(ProducerId(self._producer.name))
        for _ in range(SLABS):
            self._lending.pool.add(cast("OwnedSlab", _Memory()))

    def _replace(self) -> None:
        while self._lending.deliver(cast("OwnedSlab", _Memory())):
            pass

    def _build(self) -> ProducerReport:
        self._producer.held = {held.lease_id: held for held in self._lending.held_leases()}
        return self._producer.report()

    async def report(self) -> None:
        """Report until nothing is left to tell: one step of the model.

        New books want to be confirmed, and a lease that came and went is told once as held.
        """
        while True:
            report = self._build()
            booked = await self._ledger.report_producer(report)
            await self._trust(booked, report)
            for notice in booked.ended:
                self._lending.end(LeaseId(notice.lease_id), notice.epoch, DEADLINE_S, 0.0)
            self._lending.acknowledged(report)
            is_known, self._producer.books_id = (
                self._producer.books_id == booked.books_id,
                booked.books_id,
            )
            if is_known and self._lending.held_leases() == report.leases:
                return

    async def _trust(self, booked: ProducerBooked, report: ProducerReport) -> None:
        """Have the producer hear which books there are, and refuse what those before granted."""
        key = await self._signer.checking_key(
            booked.books_id, report.producer_id, report.incarnation
        )
        self._admission.trust(base64.b64decode(key), booked.min_epoch)

    async def _arrive_late(self, after: State) -> None:
        assert self._late is not None
        try:
            booked = await self._ledger.report_producer(self._late)
        except AquaError:
            pass  # The books hold newer ones.
        else:
            # What the model books in one step takes the echo of the books' name here.
            # A life that is over echoes nothing.
            is_mine = self._late.incarnation == self._producer.incarnation
            if is_mine and (self._producer.books_id is None or after.confirmed):
                self._producer.revision += 1
                news = {"books_id": booked.books_id, "revision": self._producer.revision}
                echo = self._late.model_copy(update=news)
                await self._trust(await self._ledger.report_producer(echo), echo)
        if after.late is None:
            self._late = None

    async def _of_consumer(self, c: int, does: str, before: State, after: State) -> None:
        me = before.consumers[c]
        if found := re.match(r"is granted (\d)", does):
            lease = after.consumers[c].lease
            assert lease is not None
            consumer = self._consumers[c]
            if await self._is_unknown(consumer.name):
                await self._ledger.report_consumer(consumer.report())
            grant = await self._grant(consumer, int(found[1]), f"key-{lease}")
            self._leases[lease] = grant.lease
            self._tokens[lease] = await self._signer.capability(grant)
        elif does == "attaches":
            assert me.lease is not None
            self._attach(me.lease, c)
        elif does.startswith("gives back"):
            assert me.lease is not None
            for loan in self._loans.pop(me.lease, []):
                lease_id = LeaseId(self._leases[me.lease].lease_id)
                self._lending.released(lease_id, loan.slab.slab_id, loan.generation)
                self._replace()
        elif does == "renews" and me.lease is not None:
            consumer = self._consumers[c]
            consumer.used.clear()
            consumer.use(self._leases[me.lease])
            await self._ledger.report_consumer(consumer.report())
        elif does == "sees its producer gone" and me.lease is not None:
            self._loans.pop(me.lease, None)

    async def _grant(self, consumer: PaperConsumer, slabs: int, key: str) -> Grant:
        request = consumer.request(slabs)
        try:
            return await self._ledger.grant_lease(
                request, idempotency_key=key, attach_window_s=ATTACH_WINDOW_S
            )
        except BooksRebuildingError:
            # They wait for the echo of their name, which the model's books do not.
            await self.report()
            return await self._ledger.grant_lease(
                request, idempotency_key=key, attach_window_s=ATTACH_WINDOW_S
            )

    def _attach(self, lease: int, c: int) -> None:
        view = self._leases[lease]
        try:
            claims = self._admission.admit(self._tokens[lease], view.consumer_id, 0.0)
            self._processes += 1
            process = ProcessIdentity(1, c, self._processes)
            self._loans[lease] = self._lending.lend(claims, process)
        except AquaError:
            return
        if len(self._loans[lease]) * SLAB < view.bytes:
            # The model's consumers take all or nothing.
            for loan in self._loans.pop(lease):
                self._lending.released(LeaseId(view.lease_id), loan.slab.slab_id, loan.generation)

    async def _is_unknown(self, name: str) -> bool:
        try:
            await self._ledger.consumer(name)
        except UnknownResourceError:
            return True
        return False

    async def _end_rights(self, before: State, after: State) -> None:
        """Let the clock pass the leases whose right has ended in this step."""
        for lease, (was, now) in enumerate(zip(before.books, after.books, strict=True)):
            if was and now and was.right is not now.right and lease in self._leases:
                name = self._leases[lease].lease_id
                if (await self._ledger.lease(name)).state in RIGHTFUL_STATES:
                    await self._command("ZADD", KEYS["deadlines"], "1", name)
        await self._ledger.sweep(silent_s=SILENT_S)


def _agree(model: Any, real: Any, *, is_gone: bool) -> bool:  # noqa: ANN401 - right, name, slabs
    """Whether the books are as the model says, or more careful.

    An ended lease and a forgotten one differ by a record that expires. A grant that nothing is lent
    under may end before its time: it was used up before any report. While the producer has yet to
    tell that a lease came and went (`is_gone`), a report that arrives late has it still held.
    """
    if is_gone and real is not None and real[0] in (Right.ACTIVE, Right.FENCED):
        return model is None or (real[1] == model[1] and real[2] <= (model[2] or SLABS))
    is_over = real is None or real[0] is Right.ENDED
    if model is None or model[0] is Right.ENDED:
        return is_over
    return bool(model == real or (is_over and model[0] is Right.GRANTED))


async def replay(
    ledger: Ledger,
    command: Callable[..., Awaitable[Any]],
    path: Sequence[tuple[str, State]],
    initial: State,
) -> list[str]:
    """Walk a path of (step, the state after it); where the parts leave the model, if they do."""
    parts, before = Replay(ledger, command), initial
    await command("FLUSHALL")
    await parts.begin()
    for number, (step, after) in enumerate(path):
        try:
            await parts.follow(step, before, after)
        except AquaError as error:
            return [f"step {number} ({step}): {error}"]
        if found := await parts.differences(after):
            return [f"step {number} ({step}): {difference}" for difference in found]
        before = after
    return []
