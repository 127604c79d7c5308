"""The page, its plots and the thresholds, out of the records.

What the stand-in has recorded never reaches `docs/` or the package: it is written beside its
records, under a heading that says what it is.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Final

from aqua_cli.files import write_bytes, write_text
from aqualib.transports.gpu_thresholds import FILE, MEASURED, CopyThresholds, read_thresholds
from harness.gpu import predictions
from harness.gpu.choice import thresholds
from harness.gpu.outcome import State
from harness.gpu.plan import NEVER_HERE, STEPS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from harness.gpu.outcome import Curve, Outcome
    from harness.gpu.records import Record

PAGE: Final = "docs/measurements/gpu.md"
STAND_IN_WARNING: Final = (
    "**This is the stand-in: there was no GPU, and no figure here means anything.** It shows that"
    " the steps run."
)
HEAD: Final = """\
# On a GPU, measured

`make gpu` writes this page ([what it runs](../gpu.md)); do not edit it. Figures are medians, in
parentheses the interval that holds the true median with 95%. Ratios compare with a yardstick of the
same process and minute."""


def write_page(root: Path, folder: Path, records: Mapping[str, Record]) -> Path:
    """The page and its plots; on the stand-in beside its records."""
    is_stand_in = any(record.origin.is_stand_in for record in records.values())
    path = folder / "gpu.md" if is_stand_in else root / PAGE
    images = path.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    pictures = _draw(images, records)
    write_text(path, page(records, pictures))
    return path


def page(records: Mapping[str, Record], pictures: Mapping[str, str]) -> str:
    """The page as Markdown.

    Args:
        pictures: File names of plots, by their titles.
    """
    is_stand_in = any(record.origin.is_stand_in for record in records.values())
    lines = (
        ["# The steps of `make gpu` on the stand-in", "", STAND_IN_WARNING]
        if is_stand_in
        else [HEAD]
    )
    origins = sorted({(r.origin.hardware, r.origin.commit) for r in records.values()})
    lines += ["", *(f"- {hardware}; commit {commit}" for hardware, commit in origins), ""]
    lines += ["| step | outcome | seconds | when, UTC | what |", "|---|---|---|---|---|"]
    for step in STEPS:
        record = records.get(step.name)
        cells = ["not run yet", "", ""]
        if record is not None:
            outcome = f"{record.outcome.state} {record.outcome.why}".strip()
            cells = [_cell(outcome), f"{record.seconds:.0f}", record.origin.measured_at]
        lines.append(f"| {step.name} | {' | '.join(cells)} | {step.what} |")
    lines += ["", "Not tried by any step:", ""]
    lines += [f"- {what}: {why}." for what, why in NEVER_HERE.items()]
    if not is_stand_in:
        lines += ["", "## What was predicted", "", *predictions.as_table(records)]
    for step in STEPS:
        if (record := records.get(step.name)) is not None:
            lines += ["", f"## {step.name}: {step.what}", *_of_step(record.outcome, pictures)]
    return "\n".join(lines) + "\n"


def _of_step(outcome: Outcome, pictures: Mapping[str, str]) -> list[str]:
    lines = []
    if outcome.state is not State.PASSED:
        lines += ["", f"{outcome.state}: {outcome.why}" if outcome.why else str(outcome.state)]
    for check in outcome.checks:
        word = "yes" if check.is_met else "**NO**"
        lines += ["", f"- {check.what}: {word} ({_cell(check.found)})"]
    for table in outcome.tables:
        lines += ["", f"{table.title}:", "", f"| {' | '.join(table.columns)} |"]
        lines.append("|---" * len(table.columns) + "|")
        lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in table.rows]
    for title in dict.fromkeys(curve.plot for curve in outcome.curves):
        if title in pictures:
            lines += ["", f"![{title}](images/{pictures[title]})"]
    if outcome.notes:
        lines += ["", *(f"    {note}" for note in outcome.notes)]
    return lines


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())


def _draw(images: Path, records: Mapping[str, Record]) -> dict[str, str]:
    """Plots of what was swept, if matplotlib is there; file names by titles."""
    if importlib.util.find_spec("matplotlib") is None:
        return {}
    from aqua_cli.figures import figure

    drawn: dict[str, str] = {}
    for record in records.values():
        by_plot: dict[str, list[Curve]] = {}
        for curve in record.outcome.curves:
            by_plot.setdefault(curve.plot, []).append(curve)
        for number, (title, curves) in enumerate(by_plot.items(), 1):
            name = f"gpu-{record.step}-{number}.png"
            with figure(images / name, width=7) as drawing:
                axes = drawing.subplots()
                for curve in curves:
                    axes.plot(curve.x, curve.y, marker="o", markersize=3, label=curve.label)
                    axes.fill_between(curve.x, curve.low, curve.high, alpha=0.2)
                axes.set_xscale("log", base=2)
                axes.set_title(title)
                axes.set_xlabel("MiB" if record.step == "slabs" else "KiB")
                axes.legend()
            drawn[title] = name
    return drawn


def write_thresholds(root: Path, folder: Path, records: Mapping[str, Record]) -> Path | None:
    """The thresholds that the sweeps speak for; None where that over rows has not been run.

    On a GPU they go into the package's file, beside those of other kinds of GPU. On the stand-in
    the file is another, which no transport reads.
    """
    record = records.get("rows")
    if record is None or record.outcome.state is not State.PASSED:
        return None
    path = folder / "thresholds.json" if record.origin.is_stand_in else root / _in_tree(root)
    known: dict[str, CopyThresholds] = {}
    if path.exists():
        known = dict(read_thresholds(path))
    figures = dict(record.outcome.figures)
    over_lanes = records.get("lanes")
    if over_lanes is not None and over_lanes.outcome.state is State.PASSED:
        figures |= over_lanes.outcome.figures
    known[record.origin.gpu] = thresholds(figures, record.origin)
    content = MEASURED.dump_json(dict(sorted(known.items())), indent=2, exclude_none=True)
    write_bytes(path, content + b"\n")
    read_thresholds.cache_clear()
    return path


def _in_tree(root: Path) -> Path:
    """The package's file in the tree that is measured."""
    return root / "aqualib/src/aqualib/transports" / FILE.name
