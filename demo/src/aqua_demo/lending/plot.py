"""The picture of a run: bytes by place, tokens a second and the producer's queue, over time.

Source: Aqua Figure 12, which shows the producer's free memory above and the consumer's throughput
below. Ours adds where the consumer's bytes are, and what made the producer act.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aqua_cli.figures import AMBER, BLUE, FAINT, INK, RED, TEAL, VIOLET
from aqua_demo.lending.phases import DemoPhase
from aqua_demo.lending.record import RunRecord
from aqua_demo.panels import panels
from aqua_protocol import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHADES: Final = {
    DemoPhase.START: ("start", "#ffffff"),
    DemoPhase.PREFILL: ("prefill", "#f5f7fa"),
    DemoPhase.HARVEST: ("memory\nborrowed", "#eaf7f5"),
    DemoPhase.BURST: ("twice the images:\ntaken back", "#fdf1e3"),
    DemoPhase.CALM: ("burst\nover", "#f5f7fa"),
    DemoPhase.AGAIN: ("borrowed\nagain", "#eaf7f5"),
}
LEAD_S: Final = 4.0
"""Seconds shown before the first key is stored: loading libraries is not the story. Doubled, four
more seconds of it are shown."""


def draw(record: RunRecord, path: Path, *, subtitle: str) -> None:
    """Write the plot of a finished run, a .png or .svg file; `subtitle` says what ran, on what."""
    begin_s = max(0.0, record.consumer[0].at_s - record.started_s - LEAD_S)
    end_s = record.consumer[-1].at_s - record.started_s
    title = "Borrowed, taken back and borrowed again: where the LLM's keys and values live"
    with panels(path, title, subtitle, height=8.2, ratios=(3.2, 2, 2)) as (above, middle, below):
        _draw_bytes(above, record)
        _draw_tokens(middle, record)
        _draw_producer(below, record)
        for axis in (above, middle, below):
            _shade(axis, record, begin_s, end_s, named=axis is above)
        below.set_xlabel("seconds since the start")
        below.set_xlim(begin_s, end_s)


def _draw_bytes(axis: Axes, record: RunRecord) -> None:
    fields = ("device_bytes", "peer_bytes", "host_bytes")
    at_s, *places = record.columns(record.consumer, *fields)
    axis.stackplot(
        at_s,
        np.array(places) / MIB,
        labels=["own device (budget)", "borrowed from the image service", "host memory"],
        colors=[BLUE, TEAL, AMBER],
        linewidth=0,
    )
    at_s, offered = record.columns(record.producer, "offered_bytes")
    dashed: dict[str, Any] = {"color": INK, "linestyle": (0, (4, 2))}
    axis.plot(at_s, offered / MIB, label="on offer by the image service", **dashed)
    axis.set_ylabel("MiB")
    # Head room for the names of the phases and the legend.
    axis.set_ylim(0, 1.5 * max(np.sum(places, axis=0).max(), offered.max()) / MIB)
    axis.legend(loc="upper left", ncols=2, bbox_to_anchor=(0.0, 0.86))


def _draw_tokens(axis: Axes, record: RunRecord) -> None:
    at_s, rates = record.token_rates()
    axis.plot(at_s, rates, color=VIOLET, linewidth=1.8)
    axis.fill_between(at_s, rates, color=VIOLET, alpha=0.12)
    for span in record.spans:
        mean = record.mean_tokens_per_s(span)
        if mean is not None and span.until_s is not None:
            axis.hlines(mean, span.since_s, span.until_s, color=VIOLET, linestyle=":", linewidth=1)
            middle = (span.since_s + span.until_s) / 2, 0.02 * rates.max()
            axis.text(*middle, f"mean {mean:.1f}", ha="center", fontsize=9, color=VIOLET)
    axis.set_ylabel("LLM: tokens / s")
    axis.set_ylim(0, 1.3 * rates.max())


def _draw_producer(axis: Axes, record: RunRecord) -> None:
    at_s, waiting, asked = record.columns(record.producer, "queue_length", "arrivals_per_s")
    lines = axis.plot(at_s, waiting, color=RED, label="requests waiting")
    axis.set_ylabel("image service:\nrequests waiting")
    axis.set_ylim(0, 1.3 * max(5, waiting.max()))
    right = axis.twinx()
    right.spines["right"].set_visible(True)
    right.grid(visible=False)  # One grid is enough.
    _, served = record.image_rates()
    lines += right.plot(at_s, served, color=FAINT, label="images / s")
    dotted: dict[str, Any] = {"color": FAINT, "linewidth": 1.0, "linestyle": (0, (1, 1.5))}
    lines += right.step(at_s, asked, where="post", label="requests / s", **dotted)
    right.set_ylabel("images / s, requests / s")
    right.set_ylim(0, 1.3 * max(1.0, served.max()))
    axis.legend(handles=lines, loc="upper left", ncols=3)


def _shade(axis: Axes, record: RunRecord, begin_s: float, end_s: float, *, named: bool) -> None:
    for span in record.spans:
        if span.phase not in SHADES:
            continue
        since_s = max(begin_s, span.since_s)
        until_s = end_s if span.until_s is None else span.until_s
        if until_s <= since_s:
            continue
        name, shade = SHADES[span.phase]
        axis.axvspan(since_s, until_s, color=shade, zorder=-2, linewidth=0)
        axis.axvline(since_s, color="#cbd2d9", linewidth=0.8, zorder=-1)
        if named and until_s - since_s > 0.05 * (end_s - begin_s):
            middle, across = (since_s + until_s) / 2, axis.get_xaxis_transform()
            bold: dict[str, Any] = {"fontsize": 9, "fontweight": "bold"}
            axis.text(middle, 0.985, name, transform=across, ha="center", va="top", **bold)
