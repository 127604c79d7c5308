"""The picture of a run: bytes by place, tokens a second and the producer's queue, over time.

Source: Aqua Figure 12, which shows the producer's free memory above and the consumer's throughput
below. Ours adds where the consumer's bytes are, and what made the producer act.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aqua_demo.phases import GENERATING, Phase
from aqua_demo.timeline import Timeline
from aqua_protocol import MIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK: Final = "#1f2933"
FAINT: Final = "#7b8794"
DEVICE: Final = "#0b6e99"
PEER: Final = "#3fb8af"
HOST: Final = "#f2a541"
TOKENS: Final = "#5a4fcf"
QUEUE: Final = "#c0392b"
IMAGES: Final = "#7b8794"

SHADES: Final = {
    Phase.START: "#ffffff",
    Phase.PREFILL: "#f5f7fa",
    Phase.HARVEST: "#eaf7f5",
    Phase.BURST: "#fdf1e3",
    Phase.CALM: "#f5f7fa",
    Phase.AGAIN: "#eaf7f5",
}
NAMES: Final = {
    Phase.START: "start",
    Phase.PREFILL: "prefill",
    Phase.HARVEST: "memory\nborrowed",
    Phase.BURST: "twice the images:\ntaken back",
    Phase.CALM: "burst\nover",
    Phase.AGAIN: "borrowed\nagain",
}

LEAD_S: Final = 4.0
"""Seconds shown before the first key is stored: loading libraries is not the story."""


def draw(timeline: Timeline, path: Path, *, subtitle: str) -> None:
    """Write the plot as a PNG.

    Args:
        timeline: Of a finished run.
        path: Where to write it.
        subtitle: What ran, on what.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # No display, whatever the environment says.
    from matplotlib import pyplot as plt
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    style: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.edgecolor": FAINT,
        "axes.labelcolor": INK,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "legend.frameon": False,
    }
    layout = ConstrainedLayoutEngine(rect=(0, 0.035, 1, 0.965))  # Room for the last line.
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            3, 1, figsize=(11, 8.2), sharex=True, height_ratios=(3.2, 2, 2), layout=layout
        )
        _draw_bytes(axes[0], timeline)
        _draw_tokens(axes[1], timeline)
        _draw_producer(axes[2], timeline)
        for index, axis in enumerate(axes):
            _shade(axis, timeline, named=index == 0)
            axis.grid(visible=True, axis="y", color="#e4e7eb", linewidth=0.8)
            axis.set_axisbelow(True)
        axes[2].set_xlabel("seconds since the start")
        axes[2].set_xlim(_begin_s(timeline), _end_s(timeline))
        _title(figure, subtitle)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _title(figure: Figure, subtitle: str) -> None:
    figure.suptitle(
        "Borrowed, taken back and borrowed again: where the LLM's keys and values live",
        fontsize=13,
        fontweight="bold",
        x=0.01,
        ha="left",
    )
    figure.text(0.01, 0.008, subtitle, color=FAINT, fontsize=8.5, ha="left")


def _draw_bytes(axis: Axes, timeline: Timeline) -> None:
    samples = timeline.consumer
    at_s = [sample.at_s - timeline.started_s for sample in samples]
    axis.stackplot(
        at_s,
        [sample.device_bytes / MIB for sample in samples],
        [sample.peer_bytes / MIB for sample in samples],
        [sample.host_bytes / MIB for sample in samples],
        labels=["own device (budget)", "borrowed from the image service", "host memory"],
        colors=[DEVICE, PEER, HOST],
        linewidth=0,
    )
    producer = timeline.producer
    axis.plot(
        [sample.at_s - timeline.started_s for sample in producer],
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
    axis.legend(loc="upper left", ncols=2, fontsize=9, bbox_to_anchor=(0.0, 0.86))


def _draw_tokens(axis: Axes, timeline: Timeline) -> None:
    rates = timeline.token_rates()
    axis.plot([at for at, _ in rates], [value for _, value in rates], color=TOKENS, linewidth=1.8)
    axis.fill_between(
        [at for at, _ in rates], [value for _, value in rates], color=TOKENS, alpha=0.12
    )
    for span in timeline.spans:
        mean = timeline.mean_tokens_per_s(span.phase)
        if span.phase in GENERATING and mean is not None:
            assert span.until_s is not None
            axis.hlines(mean, span.since_s, span.until_s, color=TOKENS, linestyle=":", linewidth=1)
            axis.annotate(
                f"mean {mean:.1f}",
                ((span.since_s + span.until_s) / 2, 0),
                textcoords="offset points",
                xytext=(0, 6),
                ha="center",
                fontsize=9,
                color=TOKENS,
            )
    axis.set_ylabel("LLM: tokens / s")
    axis.set_ylim(0, 1.3 * max((value for _, value in rates), default=1.0))


def _draw_producer(axis: Axes, timeline: Timeline) -> None:
    samples = timeline.producer
    at_s = [sample.at_s - timeline.started_s for sample in samples]
    queue = axis.plot(
        at_s,
        [sample.queue_length for sample in samples],
        color=QUEUE,
        linewidth=1.5,
        label="requests waiting",
    )
    axis.set_ylabel("image service:\nrequests waiting")
    axis.set_ylim(0, 1.3 * max(5, *(sample.queue_length for sample in samples)))
    right = axis.twinx()
    right.spines["right"].set_visible(True)
    rates = timeline.image_rates()
    served = right.plot(
        [at for at, _ in rates],
        [value for _, value in rates],
        color=IMAGES,
        linewidth=1.5,
        label="images / s",
    )
    asked = right.step(
        at_s,
        [sample.arrivals_per_s for sample in samples],
        where="post",
        color=IMAGES,
        linewidth=1.0,
        linestyle=(0, (1, 1.5)),
        label="requests / s",
    )
    right.set_ylabel("images / s, requests / s")
    right.set_ylim(0, 1.3 * max([1.0, *(value for _, value in rates)]))
    axis.legend(handles=[*queue, *served, *asked], loc="upper left", ncols=3, fontsize=9)


def _shade(axis: Axes, timeline: Timeline, *, named: bool) -> None:
    begin_s, end_s = _begin_s(timeline), _end_s(timeline)
    for span in timeline.spans:
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


def _begin_s(timeline: Timeline) -> float:
    """A little before the first keys."""
    return max(0.0, timeline.consumer[0].at_s - timeline.started_s - LEAD_S)


def _end_s(timeline: Timeline) -> float:
    """End of the last phase that has samples."""
    return timeline.consumer[-1].at_s - timeline.started_s
