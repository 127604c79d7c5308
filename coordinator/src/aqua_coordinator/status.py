"""`aqua-coordinator status`: the books at a glance, over the public API.

Reads what any token may read, a few requests a look, and shows it as tables or as JSON. A
coordinator that goes away while it is being watched is waited for; one that is not there in the
first place is an error.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from aqua_protocol import (
    AquaError,
    ConfigError,
    ErrorBody,
    UnavailableError,
    error_from_body,
    format_bytes,
)
from aqua_protocol.leases import Health, LeaseView, ReclaimView
from aqua_protocol.members import ConsumerView, ProducerView
from aqua_protocol.pages import ConsumerPage, LeasePage, ProducerPage, ReclaimPage

TIMEOUT_S: Final = 5.0
PAGE: Final = 1000
MAX_ROWS: Final = 10_000
SHOWN_RECLAIMS: Final = 8
SHOWN_LEASES: Final = 20
STALE_S: Final = 3.0
"""A member silent for longer than this is shown in red: three default heartbeats."""

AnswerT = TypeVar("AnswerT", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Look:
    """The books at one moment, more or less."""

    health: Health
    producers: list[ProducerView]
    consumers: list[ConsumerView]
    leases: list[LeaseView]
    reclaims: list[ReclaimView]

    def to_json(self) -> str:
        """One JSON object, for programs."""
        content: dict[str, Any] = {
            "health": self.health.model_dump(mode="json"),
            "producers": [view.model_dump(mode="json") for view in self.producers],
            "consumers": [view.model_dump(mode="json") for view in self.consumers],
            "leases": [view.model_dump(mode="json") for view in self.leases],
            "reclaims": [view.model_dump(mode="json") for view in self.reclaims],
        }
        return json.dumps(content)

    def render(self, url: str) -> RenderableType:
        """Tables, for people."""
        states = Counter(lease.state for lease in self.leases)
        summary = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        return Group(
            Text.assemble(
                ("Aqua ", "bold"),
                f"{self.health.version} at {url}, {self.health.books_id}, ",
                f"up {self.health.uptime_s:.0f} s; leases: {summary or 'none'}",
            ),
            _producer_table(self.producers),
            _consumer_table(self.consumers),
            _lease_table(self.leases),
            _reclaim_table(self.reclaims),
        )


class Watcher:
    """Looks at one coordinator. A context manager.

    Args:
        url: `http://host:port`.
        token: Bearer token, if the coordinator wants one.

    Raises:
        ConfigError: Not an address.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self._url = url.rstrip("/")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            self._client = httpx.Client(
                base_url=self._url, headers=headers, timeout=TIMEOUT_S, trust_env=False
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(f"{url!r} is not an address: {error}") from error
        self._console = Console()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._client.close()

    def look(self) -> Look:
        """Read everything.

        Raises:
            AquaError: Refused, or no answer.
        """
        producers: list[ProducerView] = []
        consumers: list[ConsumerView] = []
        leases: list[LeaseView] = []
        reclaims: list[ReclaimView] = []
        health = self._get("/readyz", Health)
        for page in self._pages("/v1/producers", ProducerPage):
            producers += page.producers
        for consumer_page in self._pages("/v1/consumers", ConsumerPage):
            consumers += consumer_page.consumers
        for lease_page in self._pages("/v1/leases", LeasePage):
            leases += lease_page.leases
        for reclaim_page in self._pages("/v1/reclaims", ReclaimPage):
            reclaims += reclaim_page.reclaims
        return Look(health, producers, consumers, leases, reclaims)

    def print_once(self) -> None:
        """Show one look."""
        self._console.print(self.look().render(self._url))

    def watch(self, interval_s: float) -> None:
        """Show the books until interrupted."""
        shown = self.look().render(self._url)
        with Live(shown, console=self._console, auto_refresh=False, screen=False) as live:
            while True:
                try:
                    shown = self.look().render(self._url)
                    live.update(shown, refresh=True)
                except UnavailableError as error:
                    live.update(Group(Text(error.message, "bold red"), shown), refresh=True)
                try:
                    time.sleep(interval_s)
                except KeyboardInterrupt:
                    return

    def _pages(self, path: str, kind: type[AnswerT]) -> list[AnswerT]:
        pages: list[AnswerT] = []
        cursor: str | None = ""
        while cursor is not None and len(pages) * PAGE < MAX_ROWS:
            query = f"?limit={PAGE}" + (f"&cursor={cursor}" if cursor else "")
            page = self._get(path + query, kind)
            pages.append(page)
            cursor = getattr(page, "next_cursor", None)
        return pages

    def _get(self, path: str, kind: type[AnswerT]) -> AnswerT:
        try:
            response = self._client.get(path)
        except httpx.HTTPError as error:
            raise UnavailableError(
                f"no answer from {self._url}: {error}",
                remedy="Start a coordinator, or set AQUA_COORDINATOR_URL.",
            ) from error
        try:
            if response.is_success:
                return kind.model_validate_json(response.content)
            refusal: AquaError = error_from_body(ErrorBody.model_validate_json(response.content))
        except ValidationError as error:
            raise UnavailableError(
                f"{self._url} is not an Aqua coordinator of this version",
                remedy="Correct AQUA_COORDINATOR_URL.",
            ) from error
        raise refusal


def _producer_table(views: list[ProducerView]) -> Table:
    table = Table(title="Producers", title_justify="left", expand=True)
    for name in ("producer", "domain", "model", "offered", "leased", "free", "state"):
        table.add_column(name, justify="right" if name in {"offered", "leased", "free"} else "left")
    for view in views:
        table.add_row(
            view.producer_id,
            view.domain,
            view.model or "",
            format_bytes(view.offered_bytes),
            format_bytes(view.leased_bytes),
            format_bytes(view.free_bytes),
            _presence(view.silent_s) if view.grantable else Text("confirming books", "yellow"),
        )
    return table


def _consumer_table(views: list[ConsumerView]) -> Table:
    table = Table(title="Consumers", title_justify="left", expand=True)
    for name in ("consumer", "domain", "model", "leased", "spilled", "wanted", "state"):
        table.add_column(
            name, justify="right" if name in {"leased", "spilled", "wanted"} else "left"
        )
    for view in views:
        table.add_row(
            view.consumer_id,
            view.domain,
            view.model or "",
            format_bytes(view.leased_bytes),
            format_bytes(view.spilled_bytes),
            format_bytes(view.wanted_bytes),
            _presence(view.silent_s),
        )
    return table


def _lease_table(views: list[LeaseView]) -> Table:
    table = Table(title=f"Leases ({len(views)})", title_justify="left", expand=True)
    for name in ("lease", "state", "producer", "consumer", "bytes", "expires in"):
        table.add_column(name, justify="right" if name in {"bytes", "expires in"} else "left")
    for view in views[-SHOWN_LEASES:]:
        table.add_row(
            view.lease_id,
            view.state,
            view.producer_id,
            view.consumer_id,
            format_bytes(view.bytes),
            f"{view.expires_in_s:.0f} s",
        )
    return table


def _reclaim_table(views: list[ReclaimView]) -> Table:
    table = Table(title=f"Reclaims ({len(views)})", title_justify="left", expand=True)
    for name in ("reclaim", "producer", "by", "returned", "first slab", "total", "state"):
        table.add_column(
            name, justify="right" if name in {"returned", "first slab", "total"} else "left"
        )
    for view in views[-SHOWN_RECLAIMS:]:
        state = "done" if view.done else "under way"
        table.add_row(
            view.reclaim_id,
            view.producer_id,
            view.origin,
            f"{format_bytes(view.returned_bytes)} of {format_bytes(view.requested_bytes)}",
            "" if view.first_slab_ms is None else f"{view.first_slab_ms:.1f} ms",
            "" if view.total_ms is None else f"{view.total_ms:.1f} ms",
            Text(f"{state}, past its deadline", "red") if view.escalated else state,
        )
    return table


def _presence(silent_s: float) -> Text:
    if silent_s > STALE_S:
        return Text(f"silent for {silent_s:.0f} s", "red")
    return Text("present", "green")
