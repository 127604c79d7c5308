"""Consumers for tests: real ones with small slabs, and the grants that a coordinator would give.

They reach behind the interface on purpose: to wait for what the library only promises to do soon,
and to audit the books when a test is over.
"""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from aqua_protocol import LeaseState, TransportKind
from aqua_protocol.leases import LeaseGrant, LeaseView
from aqualib.consumer import Aqua
from aqualib.reporter import Identity
from aqualib.transports import select
from aqualib.transports.host import HostCopier
from aqualib.transports.memfd import MemfdTransport
from harness.bounds import HANG_S
from harness.producers import SLAB
from harness.raw_consumer import TokenIssuer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import torch

    from aqualib.memory.frame_store import FrameStore

IDENTITY = Identity(node="node", domain="domain", gpu_uuid="GPU-1")


@contextlib.contextmanager
def consuming(host_slabs: int = 64, slab_bytes: int = SLAB, **options: Any) -> Iterator[Aqua]:  # noqa: ANN401 - an Aqua's
    """A consumer of small slabs without a coordinator; audited, then closed."""
    settings = {
        "transport": select(TransportKind.MEMFD),
        "link": None,
        "identity": IDENTITY,
        "host_bytes": host_slabs * slab_bytes,
        "slab_bytes": slab_bytes,
        **options,
    }
    with Aqua("consumer", **settings) as aqua:
        yield aqua
        aqua.audit()


class LateCopier(HostCopier):
    """Copies when fenced and not before, as a GPU may; keeps the tensors until then."""

    def __init__(self, *, is_synchronous: bool) -> None:
        self.is_synchronous = is_synchronous
        self._waiting: list[Callable[[], None]] = []
        self.failure = ""
        self.fence_count = 0

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._waiting.append(partial(super().copy, dst, src))

    def copy_bytes(
        self, dst: torch.Tensor, dst_at: int, src: torch.Tensor, src_at: int, nbytes: int
    ) -> None:
        self._waiting.append(partial(super().copy_bytes, dst, dst_at, src, src_at, nbytes))

    def gather(self, dst: torch.Tensor, src: torch.Tensor, index: torch.Tensor) -> None:
        self._waiting.append(partial(super().gather, dst, src, index))

    def scatter(self, dst: torch.Tensor, src: torch.Tensor, index: torch.Tensor) -> None:
        self._waiting.append(partial(super().scatter, dst, src, index))

    def fence(self) -> None:
        if self.failure:
            raise RuntimeError(self.failure)
        while self._waiting:
            self._waiting.pop(0)()
        self.fence_count += 1


class LateTransport(MemfdTransport):
    """Its copies arrive late.

    Args:
        is_synchronous: Whether each is fenced by the call that starts it.

    Attributes:
        copiers: Every copier that it has made.
    """

    def __init__(self, *, is_synchronous: bool = False) -> None:
        self.copiers: list[LateCopier] = []
        self._is_synchronous = is_synchronous

    def copier(self, *, is_background: bool = False) -> LateCopier:
        del is_background
        self.copiers.append(LateCopier(is_synchronous=self._is_synchronous))
        return self.copiers[-1]


def grant(
    issuer: TokenIssuer,
    endpoint: Path,
    slab_count: int,
    *,
    slab_bytes: int = SLAB,
    producer_id: str = "producer",
    consumer_id: str = "consumer",
    transport: TransportKind = TransportKind.MEMFD,
) -> LeaseGrant:
    """A lease as the coordinator would grant it."""
    epoch = time.monotonic_ns() // 1000
    nbytes = slab_count * slab_bytes
    lease_id = f"lease-{epoch}"
    return LeaseGrant(
        lease=LeaseView(
            lease_id=lease_id,
            epoch=epoch,
            state=LeaseState.GRANTED,
            producer_id=producer_id,
            consumer_id=consumer_id,
            bytes=nbytes,
            expires_in_s=600.0,
        ),
        token=issuer.token(nbytes, consumer_id=consumer_id, epoch=epoch, lease_id=lease_id),
        endpoint=str(endpoint),
        transport=transport,
        slab_bytes=slab_bytes,
    )


def await_store(store: FrameStore, condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` about the store holds; fails with `what` after a generous bound."""
    assert store.wait_for(condition, HANG_S), f"still not so: {what}; {store!r}"


def await_rest(aqua: Aqua, *, is_saved: bool = False) -> None:
    """Wait until nothing moves, nothing is asked back and no spare slab could be filled.

    Args:
        is_saved: And until write-behind has copied everything to host memory.
    """
    store = aqua._store
    table = store._table

    def is_at_rest() -> bool:
        homes = [frame for frame in table.at_home if not frame.pins]
        moving = table.asked or table.moves_out or (table.spare_for() and homes)
        return not (moving or (is_saved and table.unsaved))

    await_store(store, is_at_rest, "the store is at rest")
