"""What is seen while the demo of lent memory runs, both its programs, and at its end."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from aqua_demo.lending.phases import TITLES, DemoPhase, Goal
from aqua_demo.lending.record import RunRecord
from aqua_demo.lending.report import DemoReport
from aqua_demo.view import BAR_WIDTH, verdict
from aqua_protocol import format_bytes


def picture(record: RunRecord, goals: list[Goal]) -> RenderableType:
    """Draw the phases, what the present one waits for, and both programs."""
    present = record.spans[-1].phase if record.spans else DemoPhase.START
    order = list(DemoPhase)
    at = order.index(present)
    styles = ["green"] * at + ["bold reverse"] + ["dim"] * (len(order) - at - 1)
    names = [Text(f" {phase} ", style) for phase, style in zip(order, styles, strict=True)]
    waiting = Text("waiting for: ", "dim")
    for goal in goals:
        mark, style = ("✓", "green") if goal.is_met else ("·", "yellow")
        waiting.append(f" {mark} {goal.text} ", style)
    rows: list[RenderableType] = [Text("→", "dim").join(names), Text(TITLES[present], "bold")]
    rows += [waiting, *_consumer(record), *_producer(record)]
    return Panel(Group(*rows), title="[bold]Aqua[/]", title_align="left", border_style="blue")


def _consumer(record: RunRecord) -> list[RenderableType]:
    if not record.consumer:
        return []
    sample = record.consumer[-1]
    sizes = [
        ("own device", sample.device_bytes, "blue"),
        ("borrowed", sample.peer_bytes, "cyan"),
        ("host memory", sample.host_bytes, "yellow"),
    ]
    most = max(s.device_bytes + s.peer_bytes + s.host_bytes for s in record.consumer)
    line = (
        f"  {record.token_rates()[1, -1]:.1f} tokens/s, {sample.tokens} so far; paged out"
        f" {format_bytes(sample.paged_out_bytes)}, in {format_bytes(sample.paged_in_bytes)}"
    )
    return [_bars("LLM: keys and values", most, sizes), Text(line)]


def _producer(record: RunRecord) -> list[RenderableType]:
    if not record.producer:
        return []
    sample = record.producer[-1]
    sizes = [
        ("own work", sample.memory_used_bytes, "magenta"),
        ("lent", sample.leased_bytes, "cyan"),
        ("on offer", sample.offered_bytes - sample.leased_bytes, "green"),
    ]
    line = (
        f"  images {record.image_rates()[1, -1]:.1f}/s of {sample.arrivals_per_s:.1f}/s asked,"
        f" {sample.batch} at once, {sample.queue_length} waiting"
    )
    bars = _bars("Image service: device memory", sample.memory_total_bytes, sizes)
    return [bars, Text(line), *(Text(f"  reclaimed {each}", "green") for each in sample.reclaims)]


def _bars(title: str, total: int, sizes: list[tuple[str, int, str]]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(width=14)
    table.add_column(width=BAR_WIDTH)
    table.add_column(justify="right", width=10)
    table.title = f"\n{title} ({format_bytes(total)})"
    table.title_justify = "left"
    table.title_style = "bold"
    for name, size, style in sizes:
        bar = ProgressBar(max(1, total), size, BAR_WIDTH, complete_style=style)
        table.add_row(f"  {name}", bar, format_bytes(max(0, size)))
    return table


def summary(report: DemoReport) -> RenderableType:
    """Draw the claims and the table at the end."""
    table = Table(show_header=False)
    link = "" if report.link_gb_per_s is None else f", {report.link_gb_per_s:.1f} GB/s measured"
    kv, budget = format_bytes(report.kv_bytes), format_bytes(report.budget_bytes)
    paged_out, paged_in = format_bytes(report.paged_out_bytes), format_bytes(report.paged_in_bytes)
    spilled = f"{format_bytes(report.spilled_bytes_peak)} spilled at most"
    rates = [f"{p.name} {p.tokens_per_s:.1f}" for p in report.phases if p.tokens_per_s is not None]
    table.add_row("Tokens generated", f"{report.tokens}, about a text of {report.prompt_tokens}")
    table.add_row("Keys and values", f"{kv} within a budget of {budget}; {spilled}")
    table.add_row("Paged", f"{paged_out} out, {paged_in} in, over {report.transport}{link}")
    table.add_row("Returned", f"{format_bytes(report.returned_bytes)} to borrowed memory")
    for measure in report.reclaims:
        table.add_row("Reclaim", str(measure))
    table.add_row("Images", str(report.images))
    table.add_row("Tokens/s", ", ".join(rates))
    table.add_row("Uninterrupted", f"{report.reference_tokens_per_s:.1f}, on the own device alone")
    return verdict(report.claims, table, report.remark)
