"""The producer: lends this process's spare memory, and takes it back at any moment.

A facade over four parts: the lending state decides, the server talks to consumers, the slab memory
frees and makes slabs, the reporter tells the coordinator. None of them waits for another, and no
reclaim waits for the coordinator: without one, what is lent can be taken back as ever, and what is
missing is only new leases.

One lock guards the lending state and the peers. Under it nothing blocks: packets are sent without
waiting, memory is handed to the slab memory, reports are only asked for. Outside it: creating,
zeroing and closing memory, HTTP, and every callback. `offer` has a second lock, taken before the
first, so that two growing threads do not make the same slabs twice.
"""

from __future__ import annotations

import base64
import logging
import os
import secrets
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Self

from aqua_protocol import (
    DEFAULT_SLAB_BYTES,
    PROTOCOL_VERSION,
    AquaError,
    ConfigError,
    RequestInvalidError,
    UnavailableError,
    channel,
    require_protocol_version,
)
from aqua_protocol.ids import BooksId, LeaseId, ProducerId, ReclaimId, Revision
from aqua_protocol.members import LoadReport, ProducerAck, ProducerReport
from aqua_protocol.slab import SlabState
from aqua_protocol.supervision import failing_loops
from aqua_protocol.units import MIN_SLAB_BYTES
from aqualib.channel import ChannelClosedError, require_short_path
from aqualib.peers import trusted_uids
from aqualib.producer.admission import Admission
from aqualib.producer.copy_limit import HARM_SHARE
from aqualib.producer.copy_pacer import CopyPacer
from aqualib.producer.escalation import Escalation, KillRefusedError, kill_process, require_harmless
from aqualib.producer.handout import Handout, Handouts
from aqualib.producer.host import Host
from aqualib.producer.lending_state import MIN_DEADLINE_S, LendingState, require_deadline
from aqualib.producer.server import LeaseServer, Peer, Stage
from aqualib.producer.slab_memory import SlabMemory
from aqualib.reporter import MAX_HEARTBEAT_S, Reporter
from aqualib.settings import DEFAULT_DEADLINE_S, DEFAULT_GRACE_S, require_name
from aqualib.traced_leases import LeaseTrace, SpanQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from aqua_client import CoordinatorClient
    from aqua_client.tracing import Tracer
    from aqua_protocol.capability import Claims
    from aqua_protocol.profile import ModelProfile
    from aqualib.producer.device import EmulatedMemory
    from aqualib.producer.lending_state import Effects, ReclaimNotice
    from aqualib.producer.offer_rule import Pressure
    from aqualib.producer.pool import LentSlab
    from aqualib.producer.profile_follower import ProfileFollower
    from aqualib.producer.reclaims import ReclaimTicket, ReclaimTotals
    from aqualib.reporter import Identity
    from aqualib.transports.base import Transport

logger: Final = logging.getLogger("aqualib")


class Producer:
    """Lends slabs to consumers of this host; a context manager.

    Args:
        producer_id: Name in the books.
        transport: How slabs are shared.
        link: To the coordinator; None lends nothing new, but everything else works.
        endpoint: Path of the lease channel's socket; its directory exists.
        identity: Where this runs.
        slab_bytes: Unit of offers and of reclaims.
        policy: What to do about consumers that overrun a deadline.
        deadline_s: Time that consumers get to give memory back, unless a reclaim says otherwise.
        grace_s: Time between a passed deadline and a kill, under `Escalation.KILL`.
        device: Budget that slabs are taken from; None where the driver accounts.
        allowed_uids: Users whose processes may attach, beside this process's own and root.
        heartbeat_s: Longest silence towards the coordinator.
        tracer: Draws what is lent and asked back; None where tracing is off.
        harm_share: Of the engine's time, how much consumers' copies in the background may cost.

    Attributes:
        pacer: Tells consumers how fast they may copy.
        step_ended: Call it with the seconds of each step (`CopyPacer.step_ended`).
        load: The engine's load as last reported; sent along with the next report.
        pressures: How often the engine's load has had memory taken back, by what it was.
        profile_follower: Reads what the books say of the model, if anything does.
        on_returned: Called after reclaimed memory is back, without locks, on a thread of ours.

    Raises:
        ConfigError: A wrong slab size, deadline or name, or others can replace `endpoint`.
        SocketPathTooLongError: `endpoint` does not fit into a Unix address.
        TransportError: `endpoint` cannot be listened on.
    """

    def __init__(  # noqa: PLR0913 - one by one, by keyword: a producer's whole configuration
        self,
        producer_id: str,
        *,
        transport: Transport,
        link: CoordinatorClient | None,
        endpoint: Path,
        identity: Identity,
        slab_bytes: int = DEFAULT_SLAB_BYTES,
        policy: Escalation = Escalation.WAIT,
        deadline_s: float = DEFAULT_DEADLINE_S,
        grace_s: float = DEFAULT_GRACE_S,
        device: EmulatedMemory | None = None,
        allowed_uids: Iterable[int] | None = None,
        heartbeat_s: float = MAX_HEARTBEAT_S,
        tracer: Tracer | None = None,
        harm_share: float = HARM_SHARE,
    ) -> None:
        if slab_bytes < MIN_SLAB_BYTES:
            raise ConfigError(f"a slab has at least {MIN_SLAB_BYTES} bytes, not {slab_bytes}")
        require_harmless(policy, transport.device)
        for what in ("node", "domain", "gpu_uuid"):
            require_name(what, getattr(identity, what))
        self.producer_id: Final = ProducerId(require_name("producer_id", producer_id))
        self.endpoint: Final = endpoint.absolute()  # Consumers run elsewhere in the file system.
        self.slab_bytes: Final = slab_bytes
        self.load: LoadReport | None = None
        self.pressures: Final[Counter[Pressure]] = Counter()
        self.profile_follower: ProfileFollower | None = None
        self.on_returned: Callable[[], None] | None = None
        self.grantable = False
        self._deadline_s = require_deadline(deadline_s)
        self._transport = transport
        self._memory = SlabMemory(transport, slab_bytes, device)
        self.identity: Final = identity
        self._closed = False
        self._pid = os.getpid()
        self._offer_lock = threading.Lock()
        self._lock = threading.Lock()
        self._lending = LendingState(slab_bytes, policy, grace_s)
        self._admission = Admission(self.producer_id)
        self._peers: dict[LeaseId, Peer] = {}
        self._span_queue = SpanQueue(tracer)
        self.pacer: Final = CopyPacer(self._lock, self._peers, harm_share)
        self.step_ended: Final = self.pacer.step_ended
        self._handouts = Handouts(self._lock, self._handed_out)
        require_short_path(self.endpoint)
        host = Host(self._attach, self._released, self._silent, self._dead, self._tick)
        trusted = trusted_uids(allowed_uids)
        self._server = LeaseServer(self.endpoint, host, self._lock, trusted=trusted)
        self._link = link
        self._reporter = Reporter(
            self._build_report,
            None if link is None else link.report_producer,
            self._take_answer,
            heartbeat_s=heartbeat_s,
            name=producer_id,
        )
        self._memory.start(self._lending, self._lock, self._reporter.changed, self._returned)
        self._reporter.start()

    def __repr__(self) -> str:
        return f"Producer({self.producer_id}, {self.endpoint}, {self._lending.pool!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- What the engine does -------------------------------------------------------------

    def offer(self, nbytes: int) -> int:
        """Grow the offer to `nbytes`, rounded down to slabs, slab by slab; it never shrinks here.

        Raises:
            TransportError: Memory ran out; what was made stays offered.
            UnavailableError: The producer is closed.
        """
        with self._offer_lock:
            with self._lock:
                count = self._lending.shortfall(nbytes)
            for _ in range(count):
                if self._closed:
                    raise UnavailableError(f"producer {self.producer_id} is closed")
                memory = self._memory.create()
                with self._lock:
                    self._lending.pool.add(memory)
                self._reporter.changed()
        return self.offered_bytes

    def reclaim(self, nbytes: int, deadline_s: float | None = None) -> ReclaimTicket:
        """Take `nbytes`, rounded up to slabs, back from the offer; does not wait.

        Free slabs go first, then lent ones, newest lease first. Asking for more than is offered
        takes all of it. The ticket tells when memory is back; `on_returned` is called as well.

        Args:
            nbytes: How much; positive.
            deadline_s: Time for consumers before the policy applies.

        Raises:
            RequestInvalidError: Not a positive count of bytes.
            ConfigError: A deadline out of bounds.
        """
        if nbytes <= 0:
            raise RequestInvalidError(f"cannot reclaim {nbytes} bytes")
        within_s = self._deadline_s if deadline_s is None else require_deadline(deadline_s)
        reclaim_id = ReclaimId(f"reclaim-{secrets.token_hex(8)}")
        with self._lock:
            reclaim, effects = self._lending.reclaim(reclaim_id, nbytes, within_s, time.monotonic())
            self._carry_out(effects)
        self._server.wake()
        return reclaim

    def close(self, deadline_s: float | None = None) -> None:
        """Reclaim everything, wait for it up to the deadline, and leave. Harmless when repeated.

        In a forked child it does nothing: socket, slabs and place in the books are the parent's.

        No consumer attaches from the first moment on, and nothing lost is replaced. What a consumer
        still holds after the deadline stays readable there.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._lending.stop_replacing()
        with self._offer_lock:  # An offer under way has seen the flag and ended.
            offered = self.offered_bytes
        if offered:
            within_s = self._deadline_s if deadline_s is None else max(deadline_s, MIN_DEADLINE_S)
            self.reclaim(offered, within_s).wait(within_s)
        self._reporter.leave(self._remove, last_report=True)
        self._handouts.stop()
        self._server.close()
        self._memory.close()
        with self._lock:
            self._span_queue.draw()
            holders = self._lending.pool.leases()
            remaining = self._lending.pool.drain()
        if remaining:
            logger.warning("closing with %d slabs still held by %s", len(remaining), holders)
        for slab in remaining:
            self._memory.destroy(slab.memory)

    # --- What can be seen -----------------------------------------------------------------

    @property
    def offered_bytes(self) -> int:
        """Every slab under the offer: free, leased, reclaiming and quarantined."""
        with self._lock:
            return self._lending.pool.offered_count * self.slab_bytes

    @property
    def free_bytes(self) -> int:
        """Offered and not lent."""
        return self._bytes_in(SlabState.FREE)

    @property
    def leased_bytes(self) -> int:
        """Lent, whether asked back or not."""
        return self._bytes_in(SlabState.LEASED, SlabState.RECLAIMING)

    @property
    def quarantined_bytes(self) -> int:
        """Held by consumers that overran a deadline or vanished; never lent again."""
        return self._bytes_in(SlabState.QUARANTINED)

    @property
    def committed_bytes(self) -> int:
        """Memory that slabs have or will have: more than the offer while some are being closed."""
        with self._lock:
            return (self._memory.physical_count + self._lending.owed_count) * self.slab_bytes

    @property
    def open_reclaim_bytes(self) -> int:
        """The part of the offer that open reclaims are about to take out of it."""
        with self._lock:
            return self._lending.missing_count * self.slab_bytes

    @property
    def lasting_bytes(self) -> int:
        """What is offered when open reclaims are complete and lost slabs have been replaced."""
        with self._lock:
            return self._lending.lasting_count * self.slab_bytes

    @property
    def ended_reclaims(self) -> ReclaimTotals:
        """Reclaims that are complete, asked for by the engine or an operator."""
        return self._lending.ended_reclaims

    @property
    def measured_profile(self) -> ModelProfile | None:
        """What the books say of the model, where it can be gone by."""
        return None if self.profile_follower is None else self.profile_follower.profile

    @property
    def coordinator_error(self) -> AquaError | None:
        """Why the last report failed; None while the coordinator answers."""
        return self._reporter.error

    @property
    def failing_loops(self) -> tuple[str, ...]:
        """Names of this process's loops that crash again and again; empty while all is well."""
        return failing_loops()

    def flush_report(self, timeout_s: float) -> bool:
        """Wait until the books know the state of this moment; False without a coordinator."""
        return self._reporter.flush(timeout_s)

    # --- The coordinator ------------------------------------------------------------------

    def audit(self) -> None:
        """Recount the pool and assert that its sums agree, at one instant; for tests."""
        with self._lock:
            self._lending.pool.audit()

    def acknowledge(self, ack: ProducerAck) -> None:
        """Act on the coordinator's answer: trust its key, end leases, carry out orders.

        The reporter calls this. A program that signs tokens without a coordinator may call it, too.

        Raises:
            UnavailableError: The answer's key is not base64.
        """
        try:
            key = base64.b64decode(ack.capability_key, validate=True)
        except ValueError as error:  # Of other than ASCII it is no `binascii.Error`.
            raise UnavailableError("the coordinator sent a key that is not base64") from error
        now_s = time.monotonic()
        with self._lock:
            self._admission.trust(key, ack.min_epoch)
            for notice in ack.ended:
                lease_id = LeaseId(notice.lease_id)
                self._carry_out(self._lending.end(lease_id, notice.epoch, self._deadline_s, now_s))
            for order in ack.reclaims:
                self._carry_out(self._lending.order(order, now_s))
            self.grantable = ack.grantable
        if ack.ended or ack.reclaims:
            self._server.wake()

    def _take_answer(self, report: ProducerReport, ack: ProducerAck) -> None:
        self.acknowledge(ack)
        with self._lock:
            self._lending.acknowledged(report)

    def _remove(self) -> None:
        if self._link is not None and not self.offered_bytes:
            self._link.remove_producer(self.producer_id, self.identity.incarnation)

    def _build_report(self, revision: Revision, books_id: BooksId | None) -> ProducerReport:
        now_s = time.monotonic()
        with self._lock:
            return ProducerReport(
                **self.identity.stamp(revision, books_id),
                producer_id=self.producer_id,
                endpoint=str(self.endpoint),
                transport=self._transport.kind,
                slab_bytes=self.slab_bytes,
                offered_bytes=self._lending.pool.offered_count * self.slab_bytes,
                leases=self._lending.held_leases(),
                reclaims=self._lending.reclaim_reports(now_s),
                load=self.load,
            )

    # --- Inside: acting on decisions ------------------------------------------------------

    def _bytes_in(self, *states: SlabState) -> int:
        with self._lock:
            return sum(map(self._lending.pool.count, states)) * self.slab_bytes

    def _carry_out(self, effects: Effects) -> None:
        """Act on a decision; under the lock, and nothing here blocks.

        Each effect is carried out, whatever becomes of the others: the state has them behind it.
        """
        with ExitStack() as each:
            each.callback(self._reporter.changed)
            for lease_id in effects.finished:
                each.callback(self._finish, lease_id)
            for lease_id in effects.kills:
                each.callback(self._kill, lease_id)
            for notice in effects.notices:
                each.callback(self._send_notice, notice)
            for slab in effects.retired:
                self._memory.retire(slab)

    def _finish(self, lease_id: LeaseId) -> None:
        peer = self._peers.pop(lease_id)
        peer.lease_id = None
        peer.leave(channel.Goodbye())

    def _kill(self, lease_id: LeaseId) -> None:
        peer = self._peers[lease_id]
        try:
            kill_process(peer.pidfd, pid=peer.credentials.pid, lease_id=lease_id)
        except KillRefusedError as error:
            logger.warning("lease %s stays quarantined: %s", lease_id, error)

    def _send_notice(self, notice: ReclaimNotice) -> None:
        refs = [channel.SlabRef(slab_id=i, generation=g) for i, g in notice.slabs]
        peer = self._peers[notice.lease_id]
        peer.trace.asked(notice)
        for start in range(0, len(refs), channel.MAX_SLABS_PER_PACKET):
            peer.post(
                channel.Reclaim(
                    reclaim_id=notice.reclaim_id,
                    slabs=refs[start : start + channel.MAX_SLABS_PER_PACKET],
                    deadline_s=notice.deadline_s,
                )
            )

    # --- Inside: what the server tells, under the lock -------------------------------------

    def _attach(self, peer: Peer, hello: channel.Hello) -> None:
        if self._closed:
            raise UnavailableError(f"producer {self.producer_id} is leaving")
        require_protocol_version(hello.protocol_version, who=f"consumer {hello.consumer_id}")
        claims = self._admission.admit(hello.token, hello.consumer_id, time.time())
        peer.knows(hello.aqualib_version)
        loans = self._lending.lend(claims, peer.process)
        try:
            peer.trace = LeaseTrace(self._span_queue, claims.lease_id, hello.traceparent)
            self._hand_out(peer, claims, loans)
        except BaseException:
            effects = self._lending.hand_back(LeaseId(claims.lease_id), loans)
            self._carry_out(replace(effects, finished=[]))  # The server refuses the peer.
            self._peers.pop(LeaseId(claims.lease_id), None)
            peer.lease_id, peer.stage = None, Stage.GREETING
            raise

    def _hand_out(self, peer: Peer, claims: Claims, loans: list[LentSlab]) -> None:
        peer.lease_id = LeaseId(claims.lease_id)
        peer.stage = Stage.HANDING
        self._peers[peer.lease_id] = peer
        welcome = channel.Welcome(
            protocol_version=PROTOCOL_VERSION,
            producer_id=self.producer_id,
            lease_id=claims.lease_id,
            epoch=claims.epoch,
            transport=self._transport.kind,
            slab_bytes=self.slab_bytes,
            slab_count=len(loans),
        )
        self._handouts.start(peer, Handout(self._memory, welcome, loans))
        self._reporter.changed()

    def _handed_out(self, peer: Peer, handout: Handout, failure: AquaError | None) -> None:
        peer.trace.handed_out(failure)
        if failure is None and not handout.unsent():
            return
        lease_id = LeaseId(handout.welcome.lease_id)
        effects = self._lending.hand_back(lease_id, handout.unsent())
        if failure is not None:
            logger.warning("handing out lease %s failed: %s", lease_id, failure)
            if isinstance(failure, ChannelClosedError):
                peer.drop()
            else:
                self._server.refuse(peer, failure)
        self._carry_out(effects)

    def _released(self, peer: Peer, message: channel.Released) -> None:
        if peer.lease_id is None:
            return  # Everything is back already: an answer that was repeated.
        self._carry_out(self._lending.released(peer.lease_id, message.slab_id, message.generation))
        peer.trace.released(message.slab_id)

    def _silent(self, peer: Peer) -> None:
        if peer.lease_id is not None:
            self._carry_out(self._lending.silent(peer.lease_id))

    def _dead(self, peer: Peer) -> None:
        if peer.lease_id is not None:
            self._carry_out(self._lending.dead(peer.lease_id))
        peer.trace.ended()

    def _tick(self, now_s: float) -> float:
        if self._lending.due_at_s() <= now_s:
            self._carry_out(self._lending.tick(now_s))
        return min(self._lending.due_at_s(), self._span_queue.tick(now_s))

    def _returned(self) -> None:
        """The slab memory has freed a slab for a reclaim; without the lock."""
        self._reporter.changed()
        if self.on_returned is not None:
            self.on_returned()
