"""Members that exist only as the reports they send: for tests of the books.

A `PaperProducer` or `PaperConsumer` keeps what a real one would know (incarnation, revision, the
books it has confirmed, what is held) and writes the next report from it. Nothing here lends memory.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Final

from aqua_coordinator.store.adoption import AdoptionKeys
from aqua_coordinator.store.rows import Grant
from aqua_protocol import PROTOCOL_VERSION, TransportKind
from aqua_protocol.leases import LeaseRequest, LeaseView
from aqua_protocol.members import (
    ConsumerReport,
    HeldLease,
    ProducerReport,
    ReclaimReport,
    UsedLease,
)

ADOPTION_KEY: Final = b"the adoption key of every test's coordinators"
ADOPTION: Final = AdoptionKeys([ADOPTION_KEY])
SLAB: Final = 65_536
DOMAIN: Final = "domain-0"

_numbers = itertools.count()


@dataclass
class PaperProducer:
    """A producer's side of its reports; `held` is what it has lent, by lease."""

    name: str = "producer"
    slabs: int = 16
    domain: str = DOMAIN
    incarnation: str = "life-1"
    revision: int = -1
    books_id: str | None = None
    held: dict[str, HeldLease] = field(default_factory=dict)
    reclaims: list[ReclaimReport] = field(default_factory=list)

    def report(self, **changes: object) -> ProducerReport:
        """The next report."""
        self.revision += 1
        fields: dict[str, object] = {
            "producer_id": self.name,
            "incarnation": self.incarnation,
            "revision": self.revision,
            "books_id": self.books_id,
            "protocol_version": PROTOCOL_VERSION,
            "aqualib_version": "0.1.0",
            "node": "node-0",
            "domain": self.domain,
            "gpu_uuid": f"GPU-{self.name}",
            "pid": 1,
            "endpoint": f"/run/aqua/{self.name}.sock",
            "transport": TransportKind.MEMFD,
            "slab_bytes": SLAB,
            "offered_bytes": self.slabs * SLAB,
            "leases": list(self.held.values()),
            "reclaims": self.reclaims,
        }
        return ProducerReport.model_validate(fields | changes)

    def hand_out(self, lease: LeaseView, slabs: int | None = None, **changes: object) -> None:
        """The consumer of `lease` has attached: it holds these slabs now."""
        nbytes = lease.bytes if slabs is None else slabs * SLAB
        fields: dict[str, object] = {
            "lease_id": lease.lease_id,
            "epoch": lease.epoch,
            "consumer_id": lease.consumer_id,
            "held_bytes": nbytes,
            "proof": self._proof_of(lease),
        }
        self.held[lease.lease_id] = HeldLease.model_validate(fields | changes)

    def _proof_of(self, lease: LeaseView) -> str | None:
        """What came with the token: of the bytes that were granted, however few are left."""
        if lease.lease_id in self.held:
            return self.held[lease.lease_id].proof
        return ADOPTION.prove(
            Grant(lease, "", self.incarnation, 0.0, "", TransportKind.MEMFD, SLAB)
        )

    def take_back(self, lease: LeaseView) -> None:
        """Every slab of `lease` is back."""
        del self.held[lease.lease_id]

    def restart(self) -> None:
        """A new life of the process, which knows nothing."""
        self.incarnation = f"life-{next(_numbers) + 100}"
        self.revision = -1
        self.books_id = None
        self.held = {}
        self.reclaims = []


@dataclass
class PaperConsumer:
    """A consumer's side of its reports; `used` are the leases it wants to keep."""

    name: str = "consumer"
    domain: str = DOMAIN
    incarnation: str = "life-1"
    revision: int = -1
    used: dict[str, UsedLease] = field(default_factory=dict)

    def report(self, **changes: object) -> ConsumerReport:
        """The next report."""
        self.revision += 1
        fields: dict[str, object] = {
            "consumer_id": self.name,
            "incarnation": self.incarnation,
            "revision": self.revision,
            "protocol_version": PROTOCOL_VERSION,
            "aqualib_version": "0.1.0",
            "node": "node-0",
            "domain": self.domain,
            "gpu_uuid": f"GPU-{self.name}",
            "pid": 2,
            "leases": list(self.used.values()),
        }
        return ConsumerReport.model_validate(fields | changes)

    def use(self, lease: LeaseView) -> None:
        """Name `lease` in reports from now on."""
        self.used[lease.lease_id] = UsedLease(
            lease_id=lease.lease_id, epoch=lease.epoch, mapped_bytes=lease.bytes
        )

    def request(self, slabs: int = 1, **changes: object) -> LeaseRequest:
        """A wish for so many slabs."""
        fields: dict[str, object] = {"consumer_id": self.name, "bytes": slabs * SLAB}
        return LeaseRequest.model_validate(fields | changes)


Pair = tuple[PaperProducer, PaperConsumer]
"""One to lend from and one that may ask."""
