"""HTML and SVG of the console.

Every word that is not written here goes through `escape`, whatever its grammar: a plan's reasons
are free text, and what the books hold may come from a later version. Bars are drawn in shares of
one scale, so that any two on the page compare; SVG attributes place them, because the page's policy
allows no styles of its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html import escape
from typing import Final

from aqua_coordinator.console import reasons
from aqua_coordinator.console.snapshot import Snapshot
from aqua_coordinator.store.rows import ProducerRow
from aqua_protocol import LeaseState, format_bytes
from aqua_protocol.leases import Event, EventKind, LeaseView
from aqua_protocol.members import ConsumerView

ROW: Final = 46
"""Pixels from one GPU to the next, as in `console.css`; doubled, half as many fit on a screen."""
BAR_AT: Final = 32.5
"""Pixels from the top of a row to the middle of its bar, as there; doubled, arrows miss it."""
LINK_WIDTH: Final = 88
"""Pixels between lenders and borrowers, as there. Doubled, arrows are flatter."""
HEAD: Final = 7
"""Pixels of an arrow's head; doubled, it hides the end of a thin line."""
MAX_STROKE: Final = 5.0
"""Pixels of the arrow for the largest match. Doubled, arrows cover each other."""
SHORT_S: Final = 5.0
"""A reclaim's deadline by default: one that took less is told once. Doubled, so is one that was
late."""
_CALM: Final = frozenset({LeaseState.ACTIVE, LeaseState.GRANTED})


@dataclass(slots=True)
class _Domain:
    """Members of one scale-up domain, as they are drawn; lenders that a tenant may not see too."""

    producers: list[ProducerRow | str] = field(default_factory=list)
    consumers: list[ConsumerView] = field(default_factory=list)
    leases: list[LeaseView] = field(default_factory=list)


def cluster_markup(snapshot: Snapshot) -> Iterator[str]:
    """The figures, then one part for each domain."""
    domains = _by_domain(snapshot)
    scale = _scale(snapshot)
    largest = max((lease.bytes for lease in snapshot.leases), default=1)
    yield f'<h2 class="hidden">Cluster</h2>{_figures(snapshot)}'
    if not domains:
        yield (
            '<p class="empty">No member is here yet. Producers and consumers appear with their '
            "first report.</p>"
        )
    if snapshot.is_cut:
        yield (
            '<p class="empty">There is more than is drawn here; listings of the API have all.</p>'
        )
    yield '<div class="domains">'
    for index, name in enumerate(sorted(domains)):
        yield _domain(index, name, domains[name], snapshot, scale, largest)
    yield "</div>"


def _by_domain(snapshot: Snapshot) -> dict[str, _Domain]:
    domains: dict[str, _Domain] = defaultdict(_Domain)
    home: dict[str, str] = {}
    seen = set()
    for row in snapshot.producers:
        domains[row.domain].producers.append(row)
        seen.add(row.producer_id)
    for view in snapshot.consumers:
        domains[view.domain].consumers.append(view)
        home[view.consumer_id] = view.domain
    for lease in snapshot.leases:
        domain = home.get(lease.consumer_id)
        if domain is not None:
            domains[domain].leases.append(lease)
            if lease.producer_id not in seen:
                domains[domain].producers.append(lease.producer_id)
                seen.add(lease.producer_id)
    return domains


def _scale(snapshot: Snapshot) -> int:
    """Bytes of the longest bar."""
    lent = (max(row.memory_total_bytes or 0, row.offered_bytes) for row in snapshot.producers)
    used = (row.leased_bytes + row.spilled_bytes + row.wanted_bytes for row in snapshot.consumers)
    return max(1, max(lent, default=1), max(used, default=1))


def _figures(snapshot: Snapshot) -> str:
    offered = sum(row.offered_bytes for row in snapshot.producers)
    lent = sum(row.leased_bytes for row in snapshot.producers)
    if snapshot.tenant:
        lent = sum(row.leased_bytes for row in snapshot.consumers)
    spilled = sum(row.spilled_bytes for row in snapshot.consumers)
    wanted = sum(row.wanted_bytes for row in snapshot.consumers)
    gpus = {row.gpu_uuid for row in snapshot.producers}
    gpus |= {row.gpu_uuid for row in snapshot.consumers}
    figures = (
        ("GPUs", str(len(gpus)), ""),
        ("Offered", format_bytes(offered), "offered"),
        ("Lent" if not snapshot.tenant else "Borrowed", format_bytes(lent), "leased"),
        ("Spilled to host", format_bytes(spilled), "spilled"),
        ("Still wanted", format_bytes(wanted), "wanted"),
    )
    parts = (
        f'<div class="{name}"><dt>{label}</dt><dd>{_figure(value)}</dd></div>'
        for label, value, name in figures
    )
    return f'<dl class="figures">{"".join(parts)}</dl>'


def _figure(text: str) -> str:
    number, _, unit = text.partition(" ")
    return f"{number} <small>{unit}</small>" if unit else number


def _domain(
    index: int, name: str, domain: _Domain, snapshot: Snapshot, scale: int, largest: int
) -> str:
    lenders = {
        row if isinstance(row, str) else row.producer_id: at
        for at, row in enumerate(domain.producers)
    }
    borrowers = {row.consumer_id: at for at, row in enumerate(domain.consumers)}
    height = ROW * max(len(lenders), len(borrowers))
    arrows = "".join(_arrows(domain.leases, lenders, borrowers, largest))
    short = [reasons.why_not_more(snapshot, row) for row in domain.consumers]
    under_way = [
        reasons.reclaim_under_way(one) for one in snapshot.reclaims if one.producer_id in lenders
    ]
    notes = "".join(_note(text, "reclaiming") for text in under_way)
    notes += "".join(_note(text, "wanted") for text in _first(text for text in short if text))
    heading = f"domain-{index}"
    free = snapshot.free_by_domain[name]
    return (
        f'<section class="domain" aria-labelledby="{heading}"><header>'
        f'<h3 id="{heading}">{escape(name)}</h3>'
        f"<p>{escape(format_bytes(free))} free</p></header>"
        '<div class="match">'
        f"{_list('Lenders', (_producer(row, scale) for row in domain.producers))}"
        f'<svg class="links" width="{LINK_WIDTH}" height="{height}" aria-hidden="true">'
        f"{arrows}</svg>"
        f"{_list('Borrowers', (_consumer(row, scale) for row in domain.consumers))}</div>"
        f"{f'<ul class=notes>{notes}</ul>' if notes else ''}</section>"
    )


def _first(texts: Iterable[str]) -> Iterator[str]:
    """A few, then how many more."""
    every = list(texts)
    yield from every[: reasons.NAMED]
    if len(every) > reasons.NAMED:
        yield f"{len(every) - reasons.NAMED} more would take memory as well."


def _note(text: str, name: str) -> str:
    return f'<li class="{name}">{escape(text)}</li>'


def _list(title: str, rows: Iterable[str]) -> str:
    items = "".join(f"<li>{row}</li>" for row in rows)
    empty = f'<p class="none">No {title.lower()}</p>'
    return f"<div><h4>{title}</h4>{f'<ul>{items}</ul>' if items else empty}</div>"


def _producer(row: ProducerRow | str, scale: int) -> str:
    if isinstance(row, str):
        return (
            f'<div class="gpu lender"><span class="name">{escape(row)}</span>'
            '<span class="figure">of another tenant</span></div>'
        )
    own = max(0, (row.memory_total_bytes or 0) - row.offered_bytes)
    bar = (("own", own), ("offered", row.free_bytes), ("leased", row.leased_bytes))
    figure = f"{format_bytes(row.leased_bytes)} of {format_bytes(row.offered_bytes)} lent"
    if not row.offered_bytes:
        figure = "offers nothing"
    elif not row.leased_bytes:
        figure = f"{format_bytes(row.offered_bytes)} free"
    return _gpu("producers", row.producer_id, row.model, figure, _bar(bar, scale, from_right=True))


def _consumer(row: ConsumerView, scale: int) -> str:
    bar = (
        ("leased", row.leased_bytes),
        ("spilled", row.spilled_bytes),
        ("wanted", row.wanted_bytes),
    )
    figure = f"{format_bytes(row.leased_bytes)} borrowed" if row.leased_bytes else "borrows nothing"
    if row.spilled_bytes:
        figure += f", {format_bytes(row.spilled_bytes)} spilled"
    return _gpu("consumers", row.consumer_id, row.model, figure, _bar(bar, scale, from_right=False))


def _gpu(role: str, name: str, model: str | None, figure: str, bar: str) -> str:
    name = escape(name)
    kind = "lender" if role == "producers" else "borrower"
    shown = f' <span class="model">{escape(model)}</span>' if model else ""
    return (
        f'<button type="button" class="gpu {kind}" id="{role}.{name}" data-role="{role}" '
        f'data-name="{name}" tabindex="-1"><span class="name">{name}{shown}</span> '
        f'<span class="figure">{escape(figure)}</span>{bar}</button>'
    )


def _bar(parts: Sequence[tuple[str, int]], scale: int, *, from_right: bool) -> str:
    at = 100 - sum(100 * size / scale for _, size in parts) if from_right else 0.0
    rects = []
    for name, size in parts:
        width = 100 * size / scale
        if size:
            rects.append(f'<rect class="{name}" x="{at:.2f}%" width="{width:.2f}%" height="100%"/>')
        at += width
    return f'<svg class="bar" aria-hidden="true">{"".join(rects)}</svg>'


def _arrows(
    leases: Sequence[LeaseView], lenders: dict[str, int], borrowers: dict[str, int], largest: int
) -> Iterator[str]:
    """One for each pair: as thick as what is lent, in the state that asks for most attention."""
    pairs: dict[tuple[str, str], list[LeaseView]] = defaultdict(list)
    for lease in leases:
        if lease.producer_id in lenders and lease.consumer_id in borrowers:
            pairs[lease.producer_id, lease.consumer_id].append(lease)
    for (producer, consumer), held in pairs.items():
        states = {lease.state for lease in held}
        name = "leased" if states <= _CALM else "reclaiming"
        size = sum(lease.bytes for lease in held)
        stroke = 1 + (MAX_STROKE - 1) * min(1.0, size / largest)
        start, end = (ROW * row + BAR_AT for row in (lenders[producer], borrowers[consumer]))
        half, tip = LINK_WIDTH / 2, LINK_WIDTH - 2
        spread = HEAD / 2 + stroke / 2
        yield (
            f'<path class="link {name}" stroke-width="{stroke:.1f}" '
            f'd="M2,{start} C{half},{start} {half},{end} {tip - HEAD},{end}"/>'
            f'<path class="head {name}" '
            f'd="M{tip},{end} l-{HEAD},-{spread:.1f} v{2 * spread:.1f}z"/>'
        )


def happened_markup(events: Iterable[Event]) -> str:
    """Sentences, in the order of the events, latest first."""
    items = []
    ended_at_s: dict[str | None, float] = {}
    for event in events:
        text = reasons.event_sentence(event)
        if event.kind is EventKind.RECLAIM_CLOSED:
            ended_at_s[event.producer_id] = event.at_s
        elif event.kind is EventKind.RECLAIM_OPENED and (
            ended_at_s.pop(event.producer_id, math.inf) - event.at_s < SHORT_S
        ):
            continue  # The sentence of its end says it all.
        if text is not None:
            name = "reclaiming" if event.kind.startswith("reclaim") else event.kind
            items.append(
                f'<li id="e{event.event_id}" class="{name}">{_time(event.at_s)} {escape(text)}</li>'
            )
    if not items:
        return '<li class="empty">Nothing has happened yet.</li>'
    return "".join(items)


def member_markup(name: str, sentences: Iterable[str]) -> str:
    """Everything that is said of one member."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<h2 id="details-title">{escape(name)}</h2><ul>{items}</ul>'


def _time(at_s: float) -> str:
    """A time that the script writes in the reader's zone; as it stands, in UTC."""
    at = datetime.fromtimestamp(at_s, UTC)
    return f'<time datetime="{at.isoformat(timespec="milliseconds")}">{at:%H:%M:%S}</time>'
