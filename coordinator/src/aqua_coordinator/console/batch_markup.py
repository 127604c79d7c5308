"""HTML of the console's batch section: jobs, progress, rate, deadline risk, errors.

As in `markup`, every word that is not written here goes through `escape`. Times are told as spans
from now, by the batch service's clock, so that no two clocks are compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from aqua_protocol.batches import BatchSummary, JobView

HEADINGS: Final = (
    *(("Batch", ""), ("Tenant", ""), ("Model", ""), ("Progress", ""), ("Errors", "number")),
    *(("Rate", "number"), ("Ends", ""), ("Deadline", "")),
)
# Fixed: seconds of each.
MINUTE_S: Final = 60
HOUR_S: Final = 3600
DAY_S: Final = 86_400
_WORDS: Final = {
    "validating": "reading its input",
    "in_progress": "running",
    "finalizing": "writing its output",
    "cancelling": "being cancelled",
}
_OPEN: Final = frozenset(_WORDS)


def batches_markup(overview: BatchSummary) -> str:
    """The section, with a row for each batch."""
    rows = "".join(_row(batch, overview.at_s) for batch in overview.batches)
    table = (
        '<div class="scroll" tabindex="0" role="group" aria-label="Batches, by deadline" '
        f'id="batch-table"><table><thead><tr>{_head()}</tr></thead><tbody>{rows}</tbody></table>'
        "</div>"
        if rows
        else '<p class="empty">There is no batch yet.</p>'
    )
    return _section(_sums(overview), "".join(_notes(overview)) + table)


def no_batches_markup(why: str) -> str:
    """The section where the batch service does not tell."""
    return _section("", f'<ul class="notes"><li class="reclaiming">{escape(why)}</li></ul>')


def _section(sums: str, content: str) -> str:
    return (
        '<section id="batch-section" aria-labelledby="batches-title">'
        f'<header><h2 id="batches-title">Batches</h2><p>{escape(sums)}</p></header>'
        f"{content}</section>"
    )


def _sums(overview: BatchSummary) -> str:
    """What all of them make together."""
    parts = [
        f"{count:,} {_WORDS.get(status, status)}"
        for status, count in sorted(overview.counts.items())
        if status in _OPEN and count
    ]
    if overview.open_requests:
        plural = "" if overview.open_requests == 1 else "s"
        parts.append(f"{overview.open_requests:,} request{plural} to go")
    # Those that are shown: all, unless there are more than a hundred.
    if rate := sum(batch.requests_per_s or 0.0 for batch in overview.batches):
        parts.append(_rate(rate))
    return ", ".join(parts) or "none is open"


def _notes(overview: BatchSummary) -> Iterator[str]:
    """What an operator should know of first."""
    notes = []
    if overview.late_batches:
        verb = "es go" if overview.late_batches > 1 else " goes"
        notes.append(
            f"{overview.late_batches} batch{verb} first: at the pace so far, too little of the "
            "window would be left."
        )
    if overview.absent_engines:
        notes.append(
            f"{overview.absent_engines} of {overview.engines} engines cannot be reached, or have "
            "no room."
        )
    told = sum(batch.status in _OPEN for batch in overview.batches)
    every = sum(count for status, count in overview.counts.items() if status in _OPEN)
    if every > told:
        notes.append(f"{every - told:,} more are open than are listed here.")
    if notes:
        items = "".join(f'<li class="reclaiming">{escape(note)}</li>' for note in notes)
        yield f'<ul class="notes">{items}</ul>'


def _head() -> str:
    return "".join(f'<th scope="col" class="{name}">{title}</th>' for title, name in HEADINGS)


def _row(batch: JobView, at_s: float) -> str:
    ended = batch.completed + batch.failed
    share = 100 * ended / batch.total if batch.total else 0.0
    failed = 100 * batch.failed / batch.total if batch.total else 0.0
    good = f"{share - failed:.1f}%"
    bar = (
        f'<svg class="progress" aria-hidden="true"><rect class="leased" width="{good}" '
        f'height="100%"/><rect class="failed" x="{good}" width="{failed:.1f}%" height="100%"/>'
        "</svg>"
    )
    said = f"{ended:,} of {batch.total:,}" if batch.total else ""
    rate = "" if batch.requests_per_s is None else _rate(batch.requests_per_s)
    deadline, risk = _deadline(batch, at_s)
    cells = (
        f'<th scope="row">{escape(batch.batch_id)}</th>',
        f"<td>{escape(batch.tenant)}</td>",
        f"<td>{escape(batch.model or '')}</td>",
        f"<td>{bar}{escape(said)}</td>",
        f'<td class="number">{_errors(batch)}</td>',
        f'<td class="number">{escape(rate)}</td>',
        f"<td>{escape(_end(batch))}</td>",
        f'<td class="{risk}">{escape(deadline)}</td>',
    )
    return f'<tr id="batch.{escape(batch.batch_id)}">{"".join(cells)}</tr>'


def _errors(batch: JobView) -> str:
    count = f"{batch.failed:,}"
    return count if batch.fault is None else f"{count} ({escape(batch.fault)})"


def _end(batch: JobView) -> str:
    """When it will have ended, or how it did."""
    if batch.status != "in_progress":
        return _WORDS.get(batch.status, batch.status)
    if batch.seconds_left is not None:
        return f"in {span(batch.seconds_left)}"
    return "nothing ends now" if batch.requests_per_s == 0 else "not known yet"


def _deadline(batch: JobView, at_s: float) -> tuple[str, str]:
    """The deadline of an open batch with the risk to miss it, and the name of its style."""
    if batch.status not in _OPEN:
        return "", ""
    window_s = batch.expires_s - at_s
    if window_s <= 0:
        return "over", "risk"
    if batch.seconds_left is not None and batch.seconds_left > window_s:
        return f"in {span(window_s)}, missed by {span(batch.seconds_left - window_s)}", "risk"
    if batch.is_late:
        return f"in {span(window_s)}, at risk: goes first", "risk"
    return f"in {span(window_s)}", ""


def _rate(per_s: float) -> str:
    if per_s and per_s < 1:
        return f"{per_s * MINUTE_S:,.1f}/min"
    return f"{per_s:,.1f}/s"


def span(seconds: float) -> str:
    """A time as people say it, in two units at most."""
    whole = max(0, round(seconds))
    if whole < MINUTE_S:
        return f"{whole} s"
    if whole < HOUR_S:
        return f"{whole // MINUTE_S} min"
    if whole < DAY_S:
        return f"{whole // HOUR_S} h {whole % HOUR_S // MINUTE_S} min"
    return f"{whole // DAY_S} d {whole % DAY_S // HOUR_S} h"
