"""What is seen while the co-serving demo runs, a line for each engine, and at its end."""

from __future__ import annotations

from typing import Final

from rich.console import RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from aqua_demo.co_serving.report import CoServingReport
from aqua_demo.engines.race import Engines
from aqua_demo.engines.report import online_rows
from aqua_demo.view import BAR_WIDTH, FIGURES_REMARK, verdict

WHAT: Final = {
    "online": "online alone",
    "control": "the same again",
    "ours": "co-serving",
    "offline": "offline alone",
}


def picture(engines: Engines, online_count: int) -> RenderableType:
    """Draw how each engine stands, by what it said last."""
    table = Table(show_edge=False, box=None)
    for name in ("engine", "online answered", "", "offline answered", "tokens", "gave way"):
        table.add_column(name, justify="left" if name in {"engine", ""} else "right")
    for name, engine in engines.items():
        if not engine.samples:
            continue
        sample = engine.samples[-1]
        has_online = name != "offline"
        bar = ProgressBar(online_count, sample["online_answered"], BAR_WIDTH // 2)
        table.add_row(
            WHAT[name],
            f"{sample['online_answered']:.0f} of {sample['online_come']:.0f}" if has_online else "",
            bar if has_online else "",
            f"{sample['offline_answered']:.0f} of {sample['offline_begun']:.0f}",
            f"{sample['offline_tokens']:.0f}",
            f"{sample['preemptions']:.0f}",
        )
    return Panel(table, title="[bold]Co-serving[/]", title_align="left", border_style="blue")


def summary(report: CoServingReport) -> RenderableType:
    """Draw the claims and the figures at the end."""
    found = report.figures
    table = online_rows(found)
    share = found.offline_share_of_ideal
    table.add_row(
        "Offline",
        f"{found.offline_tokens} tokens; no time was left without an online request"
        if share is None
        else f"{found.offline_tokens} tokens, {share:.0%} of what an ideal filler computes in the"
        f" {1 - found.online_busy_share:.0%} of the time without an online request",
    )
    table.add_row(
        "Answers",
        f"{report.compared_answers} compared with stock vLLM's, {report.online_requests} online",
    )
    return verdict(report.claims, table, FIGURES_REMARK)
