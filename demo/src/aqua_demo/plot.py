"""The picture of a run: bytes by place, tokens a second and the producer's queue, over time.

Source: Aqua Figure 12, which shows the producer's free memory above and the consumer's throughput
below. Ours adds where the consumer's bytes are, and what made the producer act.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from aqua_cli.figures import AMBER, BLUE, FAINT, INK, RED, TEAL, VIOLET, figure
from aqua_demo.phases import GENERATING, StoryPhase
from aqua_demo.record import RunRecord
from aqua_protocol import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SHADES: Final = {
    StoryPhase.START: "#ffffff",
    StoryPhase.PREFILL: "#f5f7fa",
    StoryPhase.HARVEST: "#eaf7f5",
    StoryPhase.BURST: "#fdf1e3",
    StoryPhase.CALM: "#f5f7fa",
    StoryPhase.AGAIN: "#eaf7f5",
}
NAMES: Final = {
    StoryPhase.START: "start",
    StoryPhase.PREFILL: "prefill",
    StoryPhase.HARVEST: "memory\nborrowed",
    StoryPhase.BURST: "twice the images:\ntaken back",
    StoryPhase.CALM: "burst\nover",
    StoryPhase.AGAIN: "borrowed\nagain",
}

LEAD_S: Final = 4.0
"""Seconds shown before the first key is stored: loading libraries is not the story."""


def draw(record: RunRecord, path: Path, *, subtitle: str) -> None:
    """Write the plot.

    Args:
        record: Of a finished run.
        path: Where to write it, a .png or .svg file.
        subtitle: What ran, on what.
    """
    begin_s = max(0.0, record.consumer[0].at_s - record.started_s - LEAD_S)
    end_s = record.consumer[-1].at_s - record.started_s
    with figure(path, width=11, height=8.2) as drawing:
        # Room for the last line.
        drawing.set_layout_engine("constrained", rect=(0, 0.035, 1, 0.965))
        above, middle, below = drawing.subplots(3, 1, sharex=True, height_ratios=(3.2, 2, 2))
        _draw_bytes(above, record)
        _draw_tokens(middle, record)
        _draw_producer(below, record)
        for axis in (above, middle, below):
            _shade(axis, record, begin_s, end_s, named=axis is above)
        below.set_xlabel("seconds since the start")
        below.set_xlim(begin_s, end_s)
        _title(drawing, subtitle)


def _title(figure: Figure, subtitle: str) -> None:
    figure.suptitle(
        "Borrowed, taken back and borrowed again: where the LLM's keys and values live",
        fontsize=13,
        fontweight="bold",
        x=0.01,
        ha="left",
    )
    figure.text(0.01, 0.008, subtitle, color=FAINT, fontsize=8.5, ha="left")


def _draw_bytes(axis: Axes, record: RunRecord) -> None:
    samples = record.consumer
    at_s = [sample.at_s - record.started_s for sample in samples]
    axis.stackplot(
        at_s,
        [sample.device_bytes / MIB for sample in samples],
        [sample.peer_bytes / MIB for sample in samples],
        [sample.host_bytes / MIB for sample in samples],
        labels=["own device (budget)", "borrowed from the image service", "host memory"],
        colors=[BLUE, TEAL, AMBER],
        linewidth=0,
    )
    producer = record.producer
    axis.plot(
        [sample.at_s - record.started_s for sample in producer],
        [sample.offered_bytes / MIB for sample in producer],
        color=INK,
        linewidth=1.3,
        linestyle=(0, (4, 2)),
        label="on offer by the image service",
    )
    axis.set_ylabel("MiB")
    top = max(
        [s.device_bytes + s.peer_bytes + s.host_bytes for s in samples]
        + [s.offered_bytes for s in producer]
    )
    # Head room for the names of the phases and the legend.
    axis.set_ylim(0, 1.5 * top / MIB)
    axis.legend(loc="upper left", ncols=2, bbox_to_anchor=(0.0, 0.86))


def _draw_tokens(axis: Axes, record: RunRecord) -> None:
    at_s, rates = zip(*record.token_rates(), strict=True)
    axis.plot(at_s, rates, color=VIOLET, linewidth=1.8)
    axis.fill_between(at_s, rates, color=VIOLET, alpha=0.12)
    for span in record.spans:
        mean = record.mean_tokens_per_s(span)
        if span.phase in GENERATING and mean is not None:
            assert span.until_s is not None
            axis.hlines(mean, span.since_s, span.until_s, color=VIOLET, linestyle=":", linewidth=1)
            axis.annotate(
                f"mean {mean:.1f}",
                ((span.since_s + span.until_s) / 2, 0),
                textcoords="offset points",
                xytext=(0, 6),
                ha="center",
                fontsize=9,
                color=VIOLET,
            )
    axis.set_ylabel("LLM: tokens / s")
    axis.set_ylim(0, 1.3 * max(rates))


def _draw_producer(axis: Axes, record: RunRecord) -> None:
    samples = record.producer
    at_s = [sample.at_s - record.started_s for sample in samples]
    queue = axis.plot(
        at_s,
        [sample.queue_length for sample in samples],
        color=RED,
        linewidth=1.5,
        label="requests waiting",
    )
    axis.set_ylabel("image service:\nrequests waiting")
    axis.set_ylim(0, 1.3 * max(5, *(sample.queue_length for sample in samples)))
    right = axis.twinx()
    right.spines["right"].set_visible(True)
    right.grid(visible=False)  # One grid is enough.
    rates = record.image_rates()
    served = right.plot(
        [at for at, _ in rates],
        [value for _, value in rates],
        color=FAINT,
        linewidth=1.5,
        label="images / s",
    )
    asked = right.step(
        at_s,
        [sample.arrivals_per_s for sample in samples],
        where="post",
        color=FAINT,
        linewidth=1.0,
        linestyle=(0, (1, 1.5)),
        label="requests / s",
    )
    right.set_ylabel("images / s, requests / s")
    right.set_ylim(0, 1.3 * max([1.0, *(value for _, value in rates)]))
    axis.legend(handles=[*queue, *served, *asked], loc="upper left", ncols=3)


def _shade(axis: Axes, record: RunRecord, begin_s: float, end_s: float, *, named: bool) -> None:
    for span in record.spans:
        if span.phase not in SHADES:
            continue
        since_s = max(begin_s, span.since_s)
        until_s = end_s if span.until_s is None else span.until_s
        if until_s <= since_s:
            continue
        axis.axvspan(since_s, until_s, color=SHADES[span.phase], zorder=-2, linewidth=0)
        axis.axvline(since_s, color="#cbd2d9", linewidth=0.8, zorder=-1)
        if named and until_s - since_s > 0.05 * (end_s - begin_s):
            axis.annotate(
                NAMES[span.phase],
                ((since_s + until_s) / 2, 0.985),
                xycoords=("data", "axes fraction"),
                ha="center",
                va="top",
                fontsize=9,
                fontweight="bold",
            )
