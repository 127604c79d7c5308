"""A cluster of members that exist only as reports, in any size, told to a real coordinator.

For what looks at the books from outside: a console, a dashboard. Its members never fall silent
where the coordinator is told to wait long enough (`AQUA_SILENT_MEMBER_S`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import httpx

from aqua_protocol.leases import LeaseGrant
from aqua_protocol.members import HeartbeatAck, LoadReport, ReclaimReport
from harness.asgi import as_json
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer

PER_DOMAIN: Final = 4
"""Lenders, and as many borrowers: a server of eight GPUs."""
SLABS: Final = 16
"""Offered by a lender, a fifth of its GPU."""
AT_ONCE: Final = 100


class PaperCluster:
    """Half lenders, half borrowers; every other borrower holds half of what a lender offers."""

    def __init__(self, http: httpx.Client, gpu_count: int) -> None:
        self._http = http
        self._numbers = itertools.count()
        names = [f"{k // PER_DOMAIN:03d}-{k % PER_DOMAIN}" for k in range(gpu_count // 2)]
        self.producers = [PaperProducer(f"sdxl-{n}", SLABS, f"nvl-{n[:3]}") for n in names]
        self.consumers = [PaperConsumer(f"llm-{n}", f"nvl-{n[:3]}") for n in names]
        for _ in range(2):
            self.report(self.producers)
        self.hear()
        for consumer in self.consumers[::2]:
            self.borrow(consumer)
        self.report(self.producers)

    def report(self, producers: Sequence[PaperProducer]) -> None:
        """Send the next report of each, many at once."""
        load = LoadReport(queue_length=0, memory_used_bytes=0, memory_total_bytes=5 * SLABS * SLAB)
        for first in range(0, len(producers), AT_ONCE):
            part = producers[first : first + AT_ONCE]
            reports = [as_json(one.report(load=load, model="sdxl")) for one in part]
            acks = HeartbeatAck.model_validate_json(self._post(producers=reports)).producers
            for producer, ack in zip(part, acks, strict=True):
                producer.books_id = getattr(ack, "books_id", None)
                assert producer.books_id is not None, ack

    def hear(self) -> None:
        """Send the next report of every consumer; each fourth has spilled something."""
        for first in range(0, len(self.consumers), AT_ONCE):
            reports = [
                as_json(one.report(model="llama", spilled_bytes=0 if k % 4 else 3 * SLAB))
                for k, one in enumerate(self.consumers[first : first + AT_ONCE])
            ]
            self._post(consumers=reports)

    def borrow(self, consumer: PaperConsumer) -> None:
        """Let a consumer lease half of what a producer offers."""
        answer = self._http.post(
            "/v1/leases",
            json=as_json(consumer.request(SLABS // 2)),
            headers={"Idempotency-Key": f"key-{next(self._numbers)}"},
        ).raise_for_status()
        lease = LeaseGrant.model_validate_json(answer.content).lease
        next(one for one in self.producers if one.name == lease.producer_id).hand_out(lease)

    def reclaim(self, producer: PaperProducer, total_ms: float) -> str:
        """Let a producer tell of a reclaim that has ended; gives its name."""
        name = f"reclaim-{next(self._numbers)}"
        producer.reclaims = [
            ReclaimReport(
                reclaim_id=name,
                requested_bytes=SLAB,
                returned_bytes=SLAB,
                deadline_s=5.0,
                age_s=0.1,
                first_slab_ms=total_ms / 4,
                total_ms=total_ms,
            )
        ]
        self.report([producer])
        producer.reclaims = []
        return name

    def _post(self, **reports: list[dict[str, Any]]) -> bytes:
        return self._http.post("/v1/heartbeats", json=reports).raise_for_status().content
