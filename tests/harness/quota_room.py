"""Books on paper with tenants and quotas: what they may have, and what they have by the records."""

from __future__ import annotations

import itertools
import json
from collections.abc import Coroutine, Iterator
from types import SimpleNamespace
from typing import Any, Final, TypeVar, cast

from aqua_coordinator.access.quotas import QuotasFile
from aqua_protocol.leases import LeaseView, QuotaView
from harness.ledger_room import MAX_STOP_S, SILENT_S
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer
from harness.simulated_store import Store, answer_of
from harness.virtual_machine import Machine

AnswerT = TypeVar("AnswerT")
STEP_S: Final = 2.0
"""Between two sweeps: below the gap that would count as absence."""


class QuotaRoom:
    """A producer, and consumers of tenants by name (`tenant-number`).

    Attributes:
        ledger: Real scripts over a Redis on paper.
        quotas: In force.
    """

    def __init__(self, slabs: int) -> None:
        self._clock = SimpleNamespace(now_s=0.0)
        self.store = Store(cast("Machine", self._clock))
        self.ledger = self.store.ledger()
        self.run(self.ledger.open())
        self.producer = PaperProducer(slabs=slabs)
        self.consumers: dict[str, PaperConsumer] = {}
        self.quotas = QuotasFile()
        self.leases: dict[str, LeaseView] = {}
        self._keys = itertools.count()
        self.report()
        self.report()

    def run(self, work: Coroutine[Any, Any, AnswerT]) -> AnswerT:
        """What a coroutine answers that waits for nothing."""
        return answer_of(work)

    def put(self, **tenants: object) -> None:
        """Replace the quotas; sizes are slabs."""
        self.put_file(QuotasFile.model_validate({"tenants": tenants}))

    def put_file(self, quotas: QuotasFile) -> None:
        """Replace the quotas."""
        words = [*quotas.fields()]
        self.quotas = quotas
        self.run(self.ledger.put_quotas(json.dumps(words), "version" if words else ""))

    def join(self, tenant: str, *names: str) -> None:
        """Consumers of a tenant report."""
        for name in names:
            consumer = self.consumers[name] = PaperConsumer(name=name)
            self.hear(tenant, consumer)

    def lend(self, tenant: str, producer: PaperProducer) -> None:
        """A producer of a tenant reports."""
        self.run(self.ledger.report_producer(producer.report(), as_tenant=tenant))

    def hear(self, tenant: str, consumer: PaperConsumer) -> int:
        """A consumer's next report; gives the bytes that it could lease."""
        report = consumer.report()
        return self.run(self.ledger.report_consumer(report, as_tenant=tenant)).available_bytes

    def grant(self, tenant: str, name: str, slabs: int, least: int | None = None) -> LeaseView:
        """A lease that is attached at once.

        Raises:
            AquaError: It is refused.
        """
        bounds = {} if least is None else {"min_bytes": least * SLAB}
        grant = self.run(
            self.ledger.grant_lease(
                self.consumers[name].request(slabs, **bounds),
                idempotency_key=f"key-{next(self._keys)}",
                attach_window_s=10.0,
                as_tenant=tenant,
            )
        )
        lease = self.leases[grant.lease.lease_id] = grant.lease
        self.producer.hand_out(lease)
        self.consumers[name].use(lease)
        self.report()
        return lease

    def give_back(self, lease_id: str) -> None:
        """All slabs of a lease are back."""
        lease = self.leases.pop(lease_id)
        self.consumers[lease.consumer_id].used.pop(lease_id, None)
        self.producer.held.pop(lease_id, None)

    def report(self) -> None:
        """The producer reports, and takes back what has ended; twice, so that the books know."""
        for _ in range(2):
            booked = self.run(self.ledger.report_producer(self.producer.report()))
            self.producer.books_id = booked.books_id
            for notice in booked.ended:
                self.give_back(notice.lease_id)

    def let_pass(self, seconds: float, tenants: dict[str, str]) -> None:
        """Let time pass, with members that report."""
        for _ in range(round(seconds / STEP_S)):
            self._clock.now_s += STEP_S
            self.run(
                self.ledger.advance_clock(
                    silent_s=SILENT_S, max_stop_s=MAX_STOP_S, is_refusing=0, is_present=1
                )
            )
            self.report()
            for name, consumer in self.consumers.items():
                self.hear(tenants.get(name, ""), consumer)
            self.run(self.ledger.sweep(silent_s=SILENT_S))

    def leased(self, tenant: str) -> int:
        """Slabs on lease by the records of the leases."""
        views, _ = self.run(self.ledger.leases(limit=1000, as_tenant=tenant))
        return sum(view.bytes for view in views) // SLAB

    def views(self) -> Iterator[QuotaView]:
        """Each tenant as the books show it."""
        yield from self.run(self.ledger.quotas())

    def faults(self) -> list[str]:
        """What the audit finds."""
        return self.run(self.ledger.audit())
