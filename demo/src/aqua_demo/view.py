"""What is seen while the demo runs: a live picture on a terminal, plain lines anywhere else.

Both draw the same record and decide nothing. Everything goes to standard error: standard output is
for the result.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from aqua_demo.messages import ConsumerSample, ProducerSample, ReclaimMeasure
from aqua_demo.phases import TITLES, Goal, Phase
from aqua_demo.report import DemoReport
from aqua_demo.timeline import Event, Timeline
from aqua_protocol import format_bytes

REFRESH_PER_S: Final = 8
PLAIN_INTERVAL_S: Final = 5.0
BAR_WIDTH: Final = 40
SHOWN_EVENTS: Final = 7


class View(Protocol):
    """Shows a timeline while it grows."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def show(self, timeline: Timeline, goals: list[Goal]) -> None:
        """Something has changed."""

    def tell(self, event: Event) -> None:
        """An event worth a line."""


class QuietView:
    """Shows nothing, for programs that only want the result."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        del kind, error, trace

    def show(self, timeline: Timeline, goals: list[Goal]) -> None:
        """Nothing."""

    def tell(self, event: Event) -> None:
        """Nothing."""


class PlainView(QuietView):
    """Lines for a log: every event, and the state every few seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown_s = 0.0

    def show(self, timeline: Timeline, goals: list[Goal]) -> None:
        """A line, if the last one is a while ago."""
        now_s = time.monotonic()
        if now_s - self._shown_s < PLAIN_INTERVAL_S or not timeline.spans:
            return
        self._shown_s = now_s
        at_s = now_s - timeline.started_s
        parts = [f"[{at_s:6.1f} s] {timeline.spans[-1].phase.value:8}"]
        if timeline.consumer:
            sample = timeline.consumer[-1]
            parts.append(
                f"LLM {sample.tokens} tokens, {timeline.tokens_per_s():.1f}/s; keys and values:"
                f" device {format_bytes(sample.device_bytes)},"
                f" borrowed {format_bytes(sample.peer_bytes)},"
                f" host {format_bytes(sample.host_bytes)};"
            )
        if timeline.producer:
            sample_p = timeline.producer[-1]
            parts.append(
                f"images {timeline.images_per_s():.1f}/s of {sample_p.arrivals_per_s:.1f}/s asked,"
                f" {sample_p.queue_length} waiting"
            )
        waiting = ", ".join(goal.text for goal in goals if not goal.is_met)
        self._print(" ".join(parts) + (f"; waiting for: {waiting}" if waiting else ""))

    def tell(self, event: Event) -> None:
        """A line."""
        self._print(f"[{event.at_s:6.1f} s] {event.source}: {event.text}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveView(QuietView):
    """One picture, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(
            Text("starting"), console=console, refresh_per_second=REFRESH_PER_S, transient=False
        )
        self._drawn_s = 0.0

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def show(self, timeline: Timeline, goals: list[Goal]) -> None:
        """Redraw, if the last picture is old enough to have been seen."""
        now_s = time.monotonic()
        if now_s - self._drawn_s >= 1 / REFRESH_PER_S:
            self._drawn_s = now_s
            self._live.update(picture(timeline, goals, now_s))


def picture(timeline: Timeline, goals: list[Goal], now_s: float) -> RenderableType:
    """The whole live view."""
    rows: list[RenderableType] = [_story(timeline, goals)]
    if timeline.consumer:
        rows += [Text(), _consumer(timeline, timeline.consumer[-1])]
    if timeline.producer:
        rows += [Text(), _producer(timeline, timeline.producer[-1])]
        rows += [_reclaim(measure) for measure in timeline.producer[-1].reclaims]
    rows.append(Text())
    rows += [
        Text.assemble((f"{event.at_s:6.1f} s  ", "dim"), (f"{event.source}  ", "cyan"), event.text)
        for event in list(timeline.events)[-SHOWN_EVENTS:]
    ]
    title = f"[bold]Aqua[/]  {now_s - timeline.started_s:.0f} s"
    return Panel(Group(*rows), title=title, title_align="left", border_style="blue")


def _story(timeline: Timeline, goals: list[Goal]) -> RenderableType:
    present = timeline.spans[-1].phase if timeline.spans else Phase.START
    steps = Text()
    order = list(Phase)
    for phase in order:
        if phase is present:
            steps.append(f" {phase.value} ", style="bold reverse")
        else:
            done = order.index(phase) < order.index(present)
            steps.append(f" {phase.value} ", style="green" if done else "dim")
        if phase is not order[-1]:
            steps.append("→", style="dim")
    conditions = Text("waiting for: ", style="dim")
    for goal in goals:
        mark, style = ("✓", "green") if goal.is_met else ("·", "yellow")
        conditions.append(f" {mark} {goal.text} ", style=style)
    return Group(steps, Text(TITLES[present], style="bold"), conditions)


def _consumer(timeline: Timeline, sample: ConsumerSample) -> RenderableType:
    total = max(1, *(s.device_bytes + s.peer_bytes + s.host_bytes for s in timeline.consumer))
    table = _bars("LLM: keys and values", total)
    _bar(table, "own device", sample.device_bytes, total, "blue")
    _bar(table, "borrowed", sample.peer_bytes, total, "cyan")
    _bar(table, "host memory", sample.host_bytes, total, "yellow")
    line = Text.assemble(
        "  ",
        (f"{timeline.tokens_per_s():.1f} tokens/s", "bold"),
        f", {sample.tokens} so far; paged out {format_bytes(sample.paged_out_bytes)},"
        f" in {format_bytes(sample.paged_in_bytes)}",
    )
    return Group(table, line)


def _producer(timeline: Timeline, sample: ProducerSample) -> RenderableType:
    total = max(sample.memory_total_bytes, 1)
    table = _bars("Image service: device memory", total)
    offered_free = sample.offered_bytes - sample.leased_bytes
    _bar(table, "own work", sample.memory_used_bytes, total, "magenta")
    _bar(table, "lent", sample.leased_bytes, total, "cyan")
    _bar(table, "on offer", offered_free, total, "green")
    line = Text.assemble(
        "  ",
        (f"{timeline.images_per_s():.1f} images/s", "bold"),
        f" of {sample.arrivals_per_s:.1f}/s asked, {sample.batch} at once,"
        f" {sample.queue_length} waiting",
    )
    return Group(table, line)


def _reclaim(measure: ReclaimMeasure) -> RenderableType:
    return Text(
        f"  reclaimed {format_bytes(measure.bytes)} in {measure.total_ms:.0f} ms,"
        f" the first slab after {measure.first_slab_ms:.1f} ms",
        style="green",
    )


def _bars(title: str, total: int) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=14)
    table.add_column(width=BAR_WIDTH)
    table.add_column(justify="right", width=10)
    table.title = f"{title} ({format_bytes(total)})"
    table.title_justify = "left"
    table.title_style = "bold"
    return table


def _bar(table: Table, name: str, size: int, total: int, style: str) -> None:
    filled = round(BAR_WIDTH * min(1.0, max(0, size) / total))
    bar = Text("█" * filled, style=style) + Text("░" * (BAR_WIDTH - filled), style="bright_black")
    table.add_row(f"  {name}", bar, format_bytes(max(0, size)))


def summary(report: DemoReport) -> RenderableType:
    """The table at the end."""
    claims = [
        Text.assemble(
            ("✓ ", "green") if claim.holds else ("✗ ", "red"),
            claim.text,
            "" if claim.holds else f": {claim.reason}",
        )
        for claim in report.claims
    ]
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    link = "" if report.link_gb_per_s is None else f", {report.link_gb_per_s:.1f} GB/s measured"
    figures = {
        "Tokens generated": f"{report.tokens}, about a text of {report.prompt_tokens}",
        "Keys and values": f"{format_bytes(report.kv_bytes)} within a budget of"
        f" {format_bytes(report.budget_bytes)}",
        "Paged": f"{format_bytes(report.paged_out_bytes)} out,"
        f" {format_bytes(report.paged_in_bytes)} in, over {report.transport}{link}",
        "Spilled at most": f"{format_bytes(report.spilled_bytes_peak)} in host memory",
        "Returned": f"{format_bytes(report.returned_bytes)} to borrowed memory",
        "Images": f"{report.images}",
    }
    for name, value in figures.items():
        table.add_row(name, value)
    for measure in report.reclaims:
        table.add_row(
            "Reclaim",
            f"{format_bytes(measure.bytes)} in {measure.total_ms:.0f} ms, first slab after"
            f" {measure.first_slab_ms:.1f} ms",
        )
    for phase in report.phases:
        if phase.tokens_per_s is not None:
            table.add_row(f"Tokens/s, {phase.name}", f"{phase.tokens_per_s:.1f}")
    table.add_row(
        "Tokens/s, uninterrupted",
        f"{report.reference_tokens_per_s:.1f}, all on the own device, nothing beside it",
    )
    return Group(Text("What the run showed", style="bold"), *claims, table, Text(report.remark))
