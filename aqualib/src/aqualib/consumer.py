"""Aqua: one consumer, put together. The object that engines hold.

    with Aqua("llm-0", transport=..., link=..., identity=..., host_bytes=8 * GIB) as aqua:
        t = aqua.offload(kv)
        blocks = aqua.block_store(block_bytes=2 << 20, capacity_blocks=4096)

A handful of daemon threads serve it: they move frames, listen to producers, report, and ask for
leases; none of them runs engine code. Engine threads only ever wait for a frame that is on its
way, which takes milliseconds.

Bytes in an Aqua live as long as the Aqua: `close`, which the interpreter's exit calls too, drops
them, gives every slab back and says goodbye. A forked child has no use of its parent's Aqua: its
mappings, threads and channels are not inherited, every call raises, and the child connects anew.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Self, TypeVar

import torch

# Registers what happens when the interpreter ends before this module does; see there.
import aqua_client.tracing
from aqua_protocol import DEFAULT_SLAB_BYTES, AquaError, CapacityError, ConfigError
from aqua_protocol.supervision import failing_loops
from aqualib.blocks import BlockStore
from aqualib.leasing.client import LeaseClient
from aqualib.memory.frame_store import FrameStore
from aqualib.memory.migrator import Migrator
from aqualib.memory.transfers import Transfers
from aqualib.metrics import ConsumerMetrics, Direction, Stats
from aqualib.reporter import MAX_HEARTBEAT_S
from aqualib.tensor import AquaTensor, TensorAllocator
from aqualib.traced_leases import PageOutTrace

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from aqua_client import CoordinatorClient
    from aqua_protocol.leases import LeaseGrant
    from aqualib.leasing.attachment import Attachment
    from aqualib.reporter import Identity
    from aqualib.transports.base import Transport

NEVER_SEEN: Final = -1
"""Version of a store before its first look; fixed, since versions count from 0."""

DRAIN_TIMEOUT_S: Final = 2.0
"""Seconds that `close` waits for frames that are pinned or moving; a drain takes milliseconds.
Doubled, a program with a forgotten view ends two seconds later."""

FORKED: Final = "this Aqua belongs to the parent process"
CLOSED: Final = "this Aqua is closed"

MadeT = TypeVar("MadeT", AquaTensor, BlockStore)

_alive: weakref.WeakSet[Aqua] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class StepChanges:
    """What has changed since the last `step`; sizes in bytes.

    Attributes:
        drained_bytes: Moved away from peers: paging them in is slower now.
        promoted_bytes: Moved to peers: faster.
        lost_bytes: Cannot be read any more; `load` and `page_in` name what.
    """

    drained_bytes: int
    promoted_bytes: int
    lost_bytes: int


class Aqua:
    """One consumer; see the module.

    Args:
        consumer_id: Name in the books.
        transport: How slabs are shared, and where this side's tensors are.
        link: To the coordinator, owned from now on; None keeps everything in host memory, unless
            `attach` is called.
        identity: Where this runs.
        host_bytes: Bound of the host memory taken, and so of all that can be stored: a byte on a
            peer has its landing place in host memory.
        wanted_bytes: Peer memory to hold ahead of need. What is stored is asked for anyway.
        slab_bytes: Size of a frame; must be that of the producers.
        is_checking: Sum what is stored and compare what comes back.
        registry: For metrics; None makes a private one.
        heartbeat_s: Longest silence towards the coordinator.
        lease_ttl_s: Life of a lease without a report.
        allowed_uids: Users whose producers may hold pages, beside this process's own and root.
        tracer: Draws page-outs and leases; None where tracing is off.
        leases_from_first_step: Ask for no lease before the first `step`. An engine that captures
            graphs or measures its memory when it starts is not to be disturbed at that.
        writes_behind: Copy what is written on peers to host memory ahead of reclaims, which then
            only unmap. By default on a GPU, whose copy engines do it; on a CPU it takes a
            core from the engine.

    Raises:
        ConfigError: No room for a single slab or for what is wanted, or a registry in use.
        TransportError: Slabs of this size cannot be made here.
    """

    def __init__(  # noqa: PLR0913 - one by one, by keyword: a consumer's whole configuration
        self,
        consumer_id: str,
        *,
        transport: Transport,
        link: CoordinatorClient | None,
        identity: Identity,
        host_bytes: int,
        wanted_bytes: int = 0,
        slab_bytes: int = DEFAULT_SLAB_BYTES,
        is_checking: bool = False,
        registry: CollectorRegistry | None = None,
        heartbeat_s: float = MAX_HEARTBEAT_S,
        lease_ttl_s: float = 30.0,
        allowed_uids: Iterable[int] | None = None,
        leases_from_first_step: bool = False,
        writes_behind: bool | None = None,
        tracer: aqua_client.tracing.Tracer | None = None,
    ) -> None:
        if wanted_bytes > host_bytes:
            raise ConfigError(
                f"wanted_bytes={wanted_bytes} exceeds host_bytes={host_bytes}",
                remedy="Raise host_bytes: what is on a peer needs a landing place in host memory.",
            )
        self.consumer_id: Final = consumer_id
        self.transport: Final = transport
        self._link = link
        if writes_behind is None:
            writes_behind = transport.device.type == "cuda"
        self._store = FrameStore(
            transport, slab_bytes=slab_bytes, host_bytes=host_bytes, writes_behind=writes_behind
        )
        self.metrics: Final = ConsumerMetrics(transport.kind, identity, registry)
        try:
            # The first host slab now: a size that cannot be had is the caller's error, not a
            # later surprise of a background thread.
            self._store.reserve(1)
        except BaseException:
            self.metrics.close()
            raise
        page_outs = None if tracer is None else PageOutTrace(tracer, lambda: self.attachments)
        self._transfers = Transfers(
            self._store, transport, self.metrics, is_checking=is_checking, page_outs=page_outs
        )
        self._allocator = TensorAllocator(self._store)
        self._migrator = Migrator(self._store, transport)
        self._lease_client = LeaseClient(
            consumer_id,
            store=self._store,
            transport=transport,
            link=link,
            identity=identity,
            wished_bytes=wanted_bytes,
            heartbeat_s=heartbeat_s,
            lease_ttl_s=lease_ttl_s,
            allowed_uids=allowed_uids,
            waits_for_engine=leases_from_first_step,
            page_outs=page_outs,
        )
        self._seen_version = NEVER_SEEN if leases_from_first_step else 0
        self._seen = self._store.snapshot()
        self._is_closed = False
        self.metrics.read_from(self.stats)
        self._migrator.start()
        self._lease_client.start()
        _alive.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self.attachments)} leases"
        return f"<Aqua {self.consumer_id}: {state}, {self._store!r}>"

    # --- What engines do ------------------------------------------------------------------

    def empty(self, shape: Sequence[int] | int, dtype: torch.dtype | None = None) -> AquaTensor:
        """A tensor in the store with undefined values, by default of torch's default dtype.

        Raises:
            CapacityError: The store is full.
        """
        dims = (shape,) if isinstance(shape, int) else tuple(shape)
        chosen = dtype or torch.get_default_dtype()
        return self._made(lambda: AquaTensor(self._transfers, self._allocator, dims, chosen))

    def offload(self, tensor: torch.Tensor) -> AquaTensor:
        """A tensor in the store with the values of `tensor`, which stays as it is.

        Raises:
            CapacityError: The store is full.
            TransportError: The copy failed.
        """
        stored = self.empty(tensor.shape, tensor.dtype)
        try:
            stored.store(tensor)
        except BaseException:
            stored.release()
            raise
        return stored

    def block_store(self, block_bytes: int, capacity_blocks: int) -> BlockStore:
        """Room for fixed-size blocks; see `aqualib.blocks`. Takes its time: memory is faulted in.

        Raises:
            ConfigError: A block does not fit into a slab.
            CapacityError: The host memory that the blocks would need is not free.
        """
        sizes = {"block_bytes": block_bytes, "capacity_blocks": capacity_blocks}
        return self._made(lambda: BlockStore(self._transfers, **sizes))

    @property
    def has_changed(self) -> bool:
        """Whether `step` has changes to tell."""
        return self._store.version != self._seen_version

    def step(self) -> StepChanges | None:
        """Call it once per iteration: what has changed since, or None, in under a microsecond."""
        if not self.has_changed:
            return None
        if self._seen_version == NEVER_SEEN:
            self._lease_client.engine_has_begun()
        self._seen_version = self._store.version
        before, self._seen = self._seen, self._store.snapshot()
        return StepChanges(
            drained_bytes=self._seen.drained_bytes - before.drained_bytes,
            promoted_bytes=self._seen.promoted_bytes - before.promoted_bytes,
            lost_bytes=self._seen.lost_bytes,
        )

    def audit(self) -> None:
        """Recount the store and assert that its sums agree, at one instant; for tests."""
        self._store.audit()

    def stats(self) -> Stats:
        """Everything that is counted, as of now."""
        self._store.sweep()
        store = self._store.snapshot()
        paged = self.metrics.paged_bytes
        attachments = self.attachments
        return Stats(
            **asdict(store),
            paged_out_bytes=paged[Direction.OUT],
            paged_in_bytes=paged[Direction.IN],
            leased_bytes=sum(attachment.mapped_bytes for attachment in attachments),
            reclaims=tuple(self._lease_client.reclaims),
            links=tuple(a.link for a in attachments if a.link is not None),
        )

    @property
    def is_closed(self) -> bool:
        """Whether it has been closed, or belongs to the parent of this process."""
        return self._is_closed

    # --- Leases ---------------------------------------------------------------------------

    @property
    def attachments(self) -> list[Attachment]:
        """Leases in use."""
        return self._lease_client.attachments

    @property
    def coordinator_error(self) -> AquaError | None:
        """Why the last report failed; None while the coordinator answers."""
        return self._lease_client.coordinator_error

    @property
    def failing_loops(self) -> tuple[str, ...]:
        """Names of this process's loops that crash again and again; empty while all is well."""
        return failing_loops()

    @property
    def is_borrowing(self) -> bool:
        """Whether a lease is in use, or being asked for."""
        return self._lease_client.is_borrowing

    @property
    def may_borrow(self) -> bool:
        """Whether to hold leases. Set False, it gives all back: their bytes move to host memory.

        Nothing is lost or waited for; `is_borrowing` says when the last is gone. Set True, it asks
        for peer memory again.
        """
        return self._lease_client.may_borrow

    @may_borrow.setter
    def may_borrow(self, may_borrow: bool) -> None:
        self._lease_client.may_borrow = may_borrow

    def attach(self, grant: LeaseGrant) -> Attachment:
        """Use a lease that was granted by other means than this instance's own asking.

        Raises:
            ConfigError: This instance is closed.
            AquaError: As `aqualib.leasing.handshake.attach`.
        """
        if self._is_closed:
            raise ConfigError(CLOSED, remedy="Call aqualib.connect() again.")
        return self._lease_client.take_up(grant)

    # --- The end --------------------------------------------------------------------------

    def close(self) -> None:
        """Drop every byte, give every slab back and leave. Harmless when repeated.

        What is still pinned, or viewed by somebody, stays mapped until the process ends; its
        producer is not told otherwise.
        """
        if self._is_closed:
            return
        self._is_closed = True
        _alive.discard(self)
        self._lease_client.stop_asking()
        self._store.close(CLOSED, timeout_s=DRAIN_TIMEOUT_S)
        self._migrator.join(DRAIN_TIMEOUT_S)
        self._lease_client.close()
        self.metrics.close()
        if self._link is not None:
            self._link.close()

    # --- Inside ---------------------------------------------------------------------------

    def _made(self, make: Callable[[], MadeT]) -> MadeT:
        """What takes room of the store, which is full only once all finalizers' work is done."""
        self._store.sweep()
        try:
            made = make()
        except CapacityError:
            self._store.sweep(sys.maxsize)
            made = make()
        self._lease_client.changed()  # There may be peer memory for frames that were made.
        return made

    def _abandon(self) -> None:
        """In a forked child: refuse further use; the parent's threads do not run here."""
        self._is_closed = True
        self._store.forbid(FORKED)
        self._lease_client.events.abandon_descriptors()


def stored_bytes() -> int:
    """State that this process has in stores, wherever it is: swap, if it also lends."""
    return sum(aqua.stats().used_bytes for aqua in list(_alive))


def _close_all() -> None:
    for aqua in list(_alive):
        aqua.close()


def _abandon_all() -> None:
    for aqua in list(_alive):
        aqua._abandon()  # noqa: SLF001 - a hook of the class itself
    _alive.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_abandon_all)
