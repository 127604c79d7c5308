"""The report as one HTML file: no script, no font, no picture from elsewhere; it prints on A4.

What a planner shows to others: the twin's errors first, then what is wrong with the input, then
numbers with their intervals, plots, and what they rest on. The same report gives the same bytes.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aqua_cli.figures import AMBER, BLUE, figure
from aqua_cli.files import write_text
from aqua_simulator.whatif.report import (
    NUMBERS,
    Interval,
    ReportTable,
    SavingsReport,
    check_table,
    contention_table,
    interval_text,
    latency_table,
    number_table,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE: Final = """
body { font: 10.5pt/1.45 "DejaVu Sans", Verdana, sans-serif; color: #1f2933; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6em; } h2 { font-size: 1.2em; margin-top: 2em; break-after: avoid; }
table { border-collapse: collapse; margin: .6em 0; width: 100%; font-size: .92em; }
th, td { border-bottom: 1px solid #e4e7eb; padding: .25em .6em; text-align: right; }
th:first-child, td:first-child { text-align: left; }
tr, svg { break-inside: avoid; } thead { display: table-header-group; }
svg { width: 100%; height: auto; } .faint { color: #616e7c; }
@page { size: A4; margin: 16mm; }
@media print { body { margin: 0; max-width: none; font-size: 9pt; } }
"""

BRACKETS: Final = (
    "Numbers in brackets: least to most over the recorded and the drawn days; of offline work also "
    "over what the recording leaves open of step times."
)


def write_report(path: Path, report: SavingsReport) -> None:
    """Write the file.

    Raises:
        ConfigError: It cannot be written there.
        UnavailableError: matplotlib is not installed.
    """
    rates, savings = _plot(_draw_rates, report), _plot(_draw_savings, report)
    sections = [
        "<h1>What Aqua would save</h1>",
        f"<p>{report.gpu_count} GPUs over {report.hours:.2f} recorded hours</p>",
        f"<p>Idle: {_text(report.idle_gpu_hours)} GPU hours. {BRACKETS}</p>",
        _section(check_table(report))
        if report.checks
        else "<h2>How far the simulation is off the recording</h2>\n"
        "<p>Unchecked: nothing was recorded that the simulation could be held to.</p>",
        "<h2>What is wrong with the input</h2>",
        _list(
            [f"{one.kind}: {one.where}: {one.message}" for one in report.findings] or ["Nothing."]
        ),
        "<h2>The recorded day</h2>",
        rates,
        _section(number_table(report), savings),
        _section(latency_table(report, lambda found: _text(found, 1e3))),
    ]
    if report.contention:
        curve = f"<p>On the recorded day. Beside kernels: {escape(report.interference or '')}.</p>"
        sections.append(_section(contention_table(report), curve))
    if report.swings:
        sections += [
            "<h2>Which assumption matters most</h2>",
            "<p>All parts together, one assumption moved at a time.</p>",
            _plot(_draw_swings, report),
        ]
    sections += [
        "<h2>What it rests on</h2>",
        _list(report.remarks),
        _table(
            ("model", "step, ms", "token, µs", "context token, µs", "before steps, ms", "from"),
            [
                (
                    name,
                    *(f"{times[key] * 1e3:.4g}" for key in ("step_s",)),
                    *(f"{times[key] * 1e6:.4g}" for key in ("token_s", "context_s")),
                    f"{times['front_s'] * 1e3:.4g}",
                    "the recording" if times["is_fitted"] else "the data sheet",
                )
                for name, times in report.step_times.items()
            ],
        ),
        _table(
            ("model", "TTFT of 99 in 100, s", "TPOT of 99 in 100, s"),
            [(name, *(f"{each:.3g}" for each in pair)) for name, pair in report.targets.items()],
        ),
    ]
    body = "\n".join(sections)
    write_text(
        path,
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>What Aqua would save'
        f"</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n",
    )


def _text(found: Interval | None, factor: float = 1.0) -> str:
    return interval_text(found, factor) or "-"


def _section(table: ReportTable, *above: str) -> str:
    """A table under its heading, and what stands between them."""
    parts = (f"<h2>{table.title}</h2>", *above, _table(table.columns, table.rows))
    return "\n".join(parts)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in columns)
    lines = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows)
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _list(texts: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in texts) + "</ul>"


def _plot(draw: Callable[[Figure, SavingsReport], None], report: SavingsReport) -> str:
    """A drawing as inline SVG, without the XML head that HTML does not have."""
    name = draw.__name__.strip("_")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plot.svg"
        with figure(path, width=9.0, height=3.2) as drawing:
            draw(drawing, report)
        text = path.read_text()
    # Several drawings share a page: ids must differ.
    text = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", text)
    return text[text.index("<svg") :]


def _draw_rates(drawing: Figure, report: SavingsReport) -> None:
    axes = drawing.add_subplot()
    for name, rates in report.rates.items():
        width = report.hours / len(rates)
        axes.stairs(rates, [index * width for index in range(len(rates) + 1)], label=name)
    axes.set(xlabel="hours", ylabel="requests/s")
    axes.set_ylim(bottom=0.0)
    axes.legend()


def _draw_savings(drawing: Figure, report: SavingsReport) -> None:
    shown = ("memory_gb_hours", "gpu_hours", "money_per_day")
    keys = [key for key in shown if any(key in each.numbers for each in report.outlooks)]
    for place, key in enumerate(keys, 1):
        axes: Axes = drawing.add_subplot(1, len(keys), place)
        rows = [
            (each.scenario, each.numbers[key]) for each in report.outlooks if key in each.numbers
        ]
        for height, (_, found) in enumerate(reversed(rows)):
            axes.barh(height, found.value, color=BLUE)
            axes.plot([found.low, found.high], [height, height], color=AMBER, linewidth=3)
        axes.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)], fontsize=8)
        axes.set_title(", ".join(filter(None, NUMBERS[key])))


def _draw_swings(drawing: Figure, report: SavingsReport) -> None:
    axes = drawing.add_subplot()
    rows = list(reversed(report.swings))
    for height, each in enumerate(rows):
        low, high = sorted(each.offline_gpu_hours)
        axes.barh(height, high - low, left=low, color=BLUE)
    axes.set_yticks(range(len(rows)), [each.assumption for each in rows], fontsize=8)
    axes.set_xlabel("offline work in GPU time of its own, GPU h")
