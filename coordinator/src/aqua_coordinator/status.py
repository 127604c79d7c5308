"""`aqua-coordinator status`: the books at a glance, over the public API.

Reads what any token may read, a few requests a look, and shows it as tables or as JSON. A
coordinator that goes away while it is being watched is waited for; one that is not there in the
first place is an error.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aqua_client import CoordinatorClient
from aqua_protocol import UnavailableError, format_bytes
from aqua_protocol.leases import Health, LeaseView, QuotaView, ReclaimView
from aqua_protocol.members import ConsumerView, ProducerView

TIMEOUT_S: Final = 5.0
"""Bound of one request: a listing of thousands takes longer than what members ask for. Doubled, a
hung coordinator is told of after 10 s."""
MAX_ROWS: Final = 10_000
"""Rows read of each listing; doubled, a look at a huge ledger takes seconds."""
# The latest are shown, so that all tables fit on a screen; doubled, they do not.
SHOWN_RECLAIMS: Final = 8
SHOWN_LEASES: Final = 20
STALE_HEARTBEATS: Final = 3
"""A member silent for more of what the coordinator asks for is shown in red. Doubled, a dead member
looks alive for three heartbeats more."""

NUMBERS: Final = frozenset({"leased", "offered", "free", "spilled", "wanted", "bytes"}) | {
    *("expires in", "returned", "first slab", "total")
}
"""Columns that are set to the right."""


class Status(BaseModel):
    """The books at one moment, more or less."""

    health: Health
    producers: list[ProducerView]
    consumers: list[ConsumerView]
    leases: list[LeaseView]
    reclaims: list[ReclaimView]

    @classmethod
    def read(cls, client: CoordinatorClient) -> Status:
        """Read everything that is shown.

        Raises:
            AquaError: Refused, or no answer.
        """
        return cls(
            health=client.readyz(),
            producers=list(islice(client.list_producers(), MAX_ROWS)),
            consumers=list(islice(client.list_consumers(), MAX_ROWS)),
            leases=list(islice(client.list_leases(), MAX_ROWS)),
            reclaims=list(islice(client.list_reclaims(), MAX_ROWS)),
        )

    def render(self, url: str) -> RenderableType:
        """Tables, for people."""
        states = Counter(lease.state for lease in self.leases)
        stale_s = STALE_HEARTBEATS * self.health.heartbeat_s
        summary = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        return Group(
            Text.assemble(
                ("Aqua ", "bold"),
                f"{self.health.version} at {url}, {self.health.books_id}, ",
                f"up {self.health.uptime_s:.0f} s; leases: {summary or 'none'}",
            ),
            _table(
                "Producers",
                ("producer", "domain", "model", "offered", "leased", "free", "state"),
                [_producer(view, stale_s) for view in self.producers],
            ),
            _table(
                "Consumers",
                ("consumer", "domain", "model", "leased", "spilled", "wanted", "state"),
                [_consumer(view, stale_s) for view in self.consumers],
            ),
            _table(
                f"Leases ({len(self.leases)})",
                ("lease", "state", "producer", "consumer", "bytes", "expires in"),
                map(_lease, self.leases[-SHOWN_LEASES:]),
            ),
            _table(
                f"Reclaims ({len(self.reclaims)})",
                ("reclaim", "producer", "by", "returned", "first slab", "total", "state"),
                map(_reclaim, self.reclaims[-SHOWN_RECLAIMS:]),
            ),
        )


def watch(client: CoordinatorClient, interval_s: float) -> None:
    """Show the books until interrupted."""
    shown = Status.read(client).render(client.url)
    with Live(shown, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval_s)
                try:
                    shown = Status.read(client).render(client.url)
                    live.update(shown, refresh=True)
                except UnavailableError as error:
                    live.update(Group(Text(error.message, "bold red"), shown), refresh=True)
        except KeyboardInterrupt:
            return


def quota_row(view: QuotaView) -> Sequence[str]:
    """A tenant, for people; what has no limit is empty."""
    limits = (view.nominal_bytes, view.borrowing_limit_bytes, view.available_bytes)
    return (
        *(view.tenant, view.cohort or "", format_bytes(view.leased_bytes)),
        format_bytes(view.borrowed_bytes) if view.borrowed_bytes else "",
        *("" if limit is None else format_bytes(limit) for limit in limits),
    )


def _table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    table = Table(title=title, title_justify="left", expand=True)
    for name in columns:
        table.add_column(name, justify="right" if name in NUMBERS else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _producer(view: ProducerView, stale_s: float) -> Sequence[str | Text]:
    sizes = map(format_bytes, (view.offered_bytes, view.leased_bytes, view.free_bytes))
    state = (
        _presence(view.silent_s, stale_s) if view.grantable else Text("confirming books", "yellow")
    )
    return view.producer_id, view.domain, view.model or "", *sizes, state


def _consumer(view: ConsumerView, stale_s: float) -> Sequence[str | Text]:
    sizes = map(format_bytes, (view.leased_bytes, view.spilled_bytes, view.wanted_bytes))
    return (
        view.consumer_id,
        view.domain,
        view.model or "",
        *sizes,
        _presence(view.silent_s, stale_s),
    )


def _lease(view: LeaseView) -> Sequence[str | Text]:
    names = view.lease_id, view.state, view.producer_id, view.consumer_id
    return *names, format_bytes(view.bytes), f"{view.expires_in_s:.0f} s"


def _reclaim(view: ReclaimView) -> Sequence[str | Text]:
    state = "done" if view.done else "under way"
    return (
        view.reclaim_id,
        view.producer_id,
        view.origin,
        f"{format_bytes(view.returned_bytes)} of {format_bytes(view.requested_bytes)}",
        "" if view.first_slab_ms is None else f"{view.first_slab_ms:.1f} ms",
        "" if view.total_ms is None else f"{view.total_ms:.1f} ms",
        Text(f"{state}, past its deadline", "red") if view.escalated else state,
    )


def _presence(silent_s: float, stale_s: float) -> Text:
    if silent_s > stale_s:
        return Text(f"silent for {silent_s:.0f} s", "red")
    return Text("present", "green")
