"""What is seen while the demo runs: a live picture on a terminal, plain lines anywhere else.

Both draw the same record and decide nothing. Everything goes to standard error: standard output is
for the result.
"""

from __future__ import annotations

import time
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from aqua_demo.messages import ConsumerSample, ProducerSample
from aqua_demo.phases import TITLES, DemoPhase, Goal
from aqua_demo.record import LogEntry, RunRecord
from aqua_demo.report import DemoReport
from aqua_protocol import format_bytes

REFRESH_PER_S: Final = 8
"""Pictures a second: fast enough to look alive. Doubled, drawing costs twice as much."""

PLAIN_INTERVAL_S: Final = 5.0
"""Seconds between lines of the state in a log. Doubled, a run of half a minute shows three."""

BAR_WIDTH: Final = 40
"""Characters; with names and sizes it fits a terminal of 80, and doubled no longer would."""


class RunView:
    """Shows a record while it grows; this one shows nothing, for those who want the result only."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the picture."""

    def show(self, record: RunRecord, goals: list[Goal]) -> None:
        """Something has changed."""

    def tell(self, entry: LogEntry) -> None:
        """Something is worth a line."""


def view_for(console: Console, *, quiet: bool) -> RunView:
    """The view that suits who is looking."""
    if quiet:
        return RunView()
    return LiveView(console) if console.is_terminal else PlainView(console)


class PlainView(RunView):
    """Lines for a log: every entry, and the state every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown_s = 0.0

    def show(self, record: RunRecord, goals: list[Goal]) -> None:
        """A line, if the last one is a while ago."""
        now_s = time.monotonic()
        if now_s - self._shown_s < PLAIN_INTERVAL_S or not record.spans:
            return
        self._shown_s = now_s
        parts = []
        if record.consumer:
            sample = record.consumer[-1]
            parts.append(
                f"LLM {sample.tokens} tokens, {record.tokens_per_s():.1f}/s"
                f"; keys and values: device {format_bytes(sample.device_bytes)},"
                f" borrowed {format_bytes(sample.peer_bytes)},"
                f" host {format_bytes(sample.host_bytes)}"
            )
        if record.producer:
            parts.append(_images(record, record.producer[-1]))
        waiting = ", ".join(goal.text for goal in goals if not goal.is_met)
        parts += [f"waiting for: {waiting}"] if waiting else []
        self._print(
            f"[{now_s - record.started_s:6.1f} s] {record.spans[-1].phase.value:8}"
            f" {'; '.join(parts)}"
        )

    def tell(self, entry: LogEntry) -> None:
        """Print it as a line."""
        self._print(f"[{entry.at_s:6.1f} s] {entry.source}: {entry.text}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveView(RunView):
    """One picture, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live("starting", console=console, refresh_per_second=REFRESH_PER_S)
        self._drawn_s = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, record: RunRecord, goals: list[Goal]) -> None:
        """Redraw, if the last picture is old enough to have been seen."""
        now_s = time.monotonic()
        if now_s - self._drawn_s >= 1 / REFRESH_PER_S:
            self._drawn_s = now_s
            self._live.update(picture(record, goals, now_s))


def picture(record: RunRecord, goals: list[Goal], now_s: float) -> RenderableType:
    """The whole live view."""
    rows: list[RenderableType] = [_story(record, goals)]
    if record.consumer:
        rows += ["", _consumer(record, record.consumer[-1])]
    if record.producer:
        rows += ["", _producer(record, record.producer[-1])]
        rows += [Text(f"  reclaimed {r}", "green") for r in record.producer[-1].reclaims]
    rows.append("")
    rows += [
        Text.assemble((f"{entry.at_s:6.1f} s  ", "dim"), (f"{entry.source}  ", "cyan"), entry.text)
        for entry in record.log
    ]
    title = f"[bold]Aqua[/]  {now_s - record.started_s:.0f} s"
    return Panel(Group(*rows), title=title, title_align="left", border_style="blue")


def _story(record: RunRecord, goals: list[Goal]) -> RenderableType:
    order = list(DemoPhase)
    present = record.spans[-1].phase if record.spans else order[0]
    at = order.index(present)
    styles = ["green"] * at + ["bold reverse"] + ["dim"] * (len(order) - at - 1)
    steps = Text("→", "dim").join(
        Text(f" {phase.value} ", style) for phase, style in zip(order, styles, strict=True)
    )
    conditions = Text("waiting for: ", style="dim")
    for goal in goals:
        mark, style = ("✓", "green") if goal.is_met else ("·", "yellow")
        conditions.append(f" {mark} {goal.text} ", style=style)
    return Group(steps, Text(TITLES[present], style="bold"), conditions)


def _consumer(record: RunRecord, sample: ConsumerSample) -> RenderableType:
    total = max(1, *(s.device_bytes + s.peer_bytes + s.host_bytes for s in record.consumer))
    sizes = [
        ("own device", sample.device_bytes, "blue"),
        ("borrowed", sample.peer_bytes, "cyan"),
        ("host memory", sample.host_bytes, "yellow"),
    ]
    line = (
        f"  {record.tokens_per_s():.1f} tokens/s, {sample.tokens} so far; paged out"
        f" {format_bytes(sample.paged_out_bytes)}, in {format_bytes(sample.paged_in_bytes)}"
    )
    return Group(_bars("LLM: keys and values", total, sizes), Text(line))


def _producer(record: RunRecord, sample: ProducerSample) -> RenderableType:
    sizes = [
        ("own work", sample.memory_used_bytes, "magenta"),
        ("lent", sample.leased_bytes, "cyan"),
        ("on offer", sample.offered_bytes - sample.leased_bytes, "green"),
    ]
    bars = _bars("Image service: device memory", max(sample.memory_total_bytes, 1), sizes)
    return Group(bars, Text(f"  {_images(record, sample)}"))


def _images(record: RunRecord, sample: ProducerSample) -> str:
    return (
        f"images {record.images_per_s():.1f}/s of {sample.arrivals_per_s:.1f}/s asked,"
        f" {sample.batch} at once, {sample.queue_length} waiting"
    )


def _bars(title: str, total: int, sizes: list[tuple[str, int, str]]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=14)
    table.add_column(width=BAR_WIDTH)
    table.add_column(justify="right", width=10)
    table.title = f"{title} ({format_bytes(total)})"
    table.title_justify = "left"
    table.title_style = "bold"
    for name, size, style in sizes:
        bar = ProgressBar(total, size, BAR_WIDTH, complete_style=style, finished_style=style)
        table.add_row(f"  {name}", bar, format_bytes(max(0, size)))
    return table


def summary(report: DemoReport) -> RenderableType:
    """Draw the claims and the table at the end."""
    claims = [
        Text.assemble(
            ("✓ ", "green") if claim.holds else ("✗ ", "red"),
            claim.text,
            "" if claim.holds else f": {claim.reason}",
        )
        for claim in report.claims
    ]
    link = "" if report.link_gb_per_s is None else f", {report.link_gb_per_s:.1f} GB/s measured"
    kv, budget = format_bytes(report.kv_bytes), format_bytes(report.budget_bytes)
    paged_out, paged_in = format_bytes(report.paged_out_bytes), format_bytes(report.paged_in_bytes)
    figures = [
        ("Tokens generated", f"{report.tokens}, about a text of {report.prompt_tokens}"),
        ("Keys and values", f"{kv} within a budget of {budget}"),
        ("Paged", f"{paged_out} out, {paged_in} in, over {report.transport}{link}"),
        ("Spilled at most", f"{format_bytes(report.spilled_bytes_peak)} in host memory"),
        ("Returned", f"{format_bytes(report.returned_bytes)} to borrowed memory"),
        ("Images", f"{report.images}"),
        *(("Reclaim", str(measure)) for measure in report.reclaims),
        *(
            (f"Tokens/s, {phase.name}", f"{phase.tokens_per_s:.1f}")
            for phase in report.phases
            if phase.tokens_per_s is not None
        ),
        (
            "Tokens/s, uninterrupted",
            f"{report.reference_tokens_per_s:.1f}, on the own device alone",
        ),
    ]
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in figures:
        table.add_row(name, value)
    return Group(Text("What the run showed", style="bold"), *claims, table, Text(report.remark))
