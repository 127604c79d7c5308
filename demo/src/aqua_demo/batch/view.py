"""What is seen while the batch demo runs, and at its end."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from aqua_demo.batch.report import BatchReport
from aqua_demo.engines.report import online_rows
from aqua_demo.view import BAR_WIDTH, FIGURES_REMARK, verdict
from aqua_protocol import format_bytes


def picture(
    title: str,
    *,
    online: tuple[int, int],
    offline: tuple[int, int],
    memory: tuple[int, int],
    dead: Iterable[str],
) -> RenderableType:
    """Draw how a run stands: requests answered and in all, bytes lent and on offer, who died."""
    table = Table.grid(padding=(0, 1))
    table.add_column(width=14)
    table.add_column(width=BAR_WIDTH)
    table.add_column(justify="right")
    for name, (done, total), shown in (
        ("online", online, f"{online[0]} of {online[1]}"),
        ("offline", offline, f"{offline[0]} of {offline[1]}"),
        ("memory lent", memory, f"{format_bytes(memory[0])} of {format_bytes(memory[1])}"),
    ):
        table.add_row(name, ProgressBar(max(1, total), done, BAR_WIDTH), shown)
    rows: list[RenderableType] = [Text(title, "bold"), table]
    rows += [Text(f"  ✗ {name} was killed", "red") for name in sorted(dead)]
    return Panel(Group(*rows), title="[bold]Batch[/]", title_align="left", border_style="blue")


def summary(report: BatchReport) -> RenderableType:
    """Draw the claims and the figures at the end."""
    found = report.figures
    table = online_rows(found)
    table.add_row(
        "Order",
        f"{found.ordered_s:.0f} s in BlendServe's, {found.file_order_s:.0f} s in that of the file:"
        f" {times(found.order_gain)}",
    )
    table.add_row(
        "Co-serving",
        f"the first {found.undisturbed_answers} answers {times(found.co_serving_gain)} as fast as"
        f" on the engine for them alone; all in {found.co_serving_s:.0f} s",
    )
    for measure in found.reclaims:
        table.add_row("Reclaim", f"{measure}; {format_bytes(found.drained_bytes)} moved in all")
    table.add_row(
        "Killed",
        f"a dispatcher over {found.dispatcher_held} requests, an engine over {found.engine_held}",
    )
    table.add_row("Answers", f"{report.offline_requests} offline, {report.online_requests} online")
    return verdict(report.claims, table, FIGURES_REMARK)


def times(gain: float | None) -> str:
    """A gain, or that it is unknown."""
    return "- x" if gain is None else f"{gain:.2f} x"
