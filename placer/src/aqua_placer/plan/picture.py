"""A picture of a plan: servers as columns, producers above, consumers below, matches joined.

One box per shard; its height is its GB, so that an overhanging consumer is seen at once. Large
clusters are drawn a page at a time: beyond a few dozen servers nobody sees single matches.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Final

from aqua_placer.errors import PlanInvalidError
from aqua_placer.plan.explanation import Explainer
from aqua_protocol.plan import Plan

MAX_COLUMNS: Final = 48
"""Servers in one picture: a column of eight shards stays legible on a wide page."""

PRODUCER, CONSUMER, NEUTRAL, LINE = "#2a9d8f", "#e76f51", "#adb5bd", "#264653"


def render(explainer: Explainer, path: Path, *, first: int = 0, count: int = MAX_COLUMNS) -> int:
    """Draw `count` servers from number `first` on; returns how many were drawn.

    Raises:
        PlanInvalidError: Neither SVG nor PNG, no such servers, or the folder is not writable.
    """
    if path.suffix not in (".svg", ".png"):
        raise PlanInvalidError(
            f"cannot draw {path.name}", remedy="Choose a name that ends in .svg or .png."
        )
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    servers = explainer.instance.servers
    shown = range(first, min(first + min(count, MAX_COLUMNS), servers.count))
    if not shown:
        raise PlanInvalidError(
            f"the problem has servers 0 to {servers.count - 1}, not {first}",
            remedy="Choose --first within them.",
        )
    # The same plan gives the same file, byte for byte.
    with mpl.rc_context({"svg.hashsalt": "aqua", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(max(6.0, 1.5 * len(shown)), 6.5))
        tallest = _draw(explainer, axes, shown)
        axes.set_xlim(-0.6, len(shown) - 0.4)
        axes.set_ylim(-tallest * 1.15 - 1, tallest * 1.15 + 1)
        axes.set_xticks(range(len(shown)), [servers.name(index) for index in shown], rotation=30)
        axes.axhline(0, color=LINE, linewidth=0.8)
        axes.set_ylabel("GB per shard: spare above, need below")
        axes.set_title(_title(explainer.plan, len(shown), servers.count), fontsize=10)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.tight_layout()
        metadata = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        try:
            figure.savefig(path, dpi=110, metadata=metadata)
        except OSError as error:
            raise PlanInvalidError(
                f"cannot write {path}: {error}", remedy="Choose a folder that exists."
            ) from error
        finally:
            plt.close(figure)
    return len(shown)


def _title(plan: Plan, shown: int, total: int) -> str:
    part = "" if shown == total else f", servers {shown} of {total}"
    return (
        f"{plan.problem or 'plan'}: {plan.coverage_gb:g} of {plan.demand_gb:g} GB covered, "
        f"gap {plan.gap:.2%}{part}"
    )


def _draw(explainer: Explainer, axes: object, shown: range) -> float:  # noqa: C901 - one drawing
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle

    assert isinstance(axes, Axes), type(axes)
    servers = explainer.instance.servers
    tallest = 1.0
    for column, server in enumerate(shown):
        name = servers.name(server)
        above: list[tuple[str, int]] = []
        below: list[tuple[str, int]] = []
        neutral = 0
        for group in explainer.on_server[name]:
            size = explainer.size_gb(group)
            side = above if size > 0 else below
            if size:
                side += [(group, shard) for shard in range(explainer.shards(group))]
            else:
                neutral += explainer.shards(group)
        above.sort(key=lambda item: (-explainer.size_gb(item[0]), item))
        order = {item: place for place, item in enumerate(above)}
        partner = {
            (match.consumer, match.consumer_shard): order.get(
                (match.producer, match.producer_shard), 0
            )
            for group in {group for group, _ in below}
            for match in explainer.of_consumer.get(group, [])
        }
        below.sort(key=lambda item: (partner.get(item, len(above)), item))
        spots: dict[tuple[str, int], float] = {}
        for row, sign in ((above, 1.0), (below, -1.0)):
            width = 0.84 / max(len(row), 1)
            for place, item in enumerate(row):
                height = abs(explainer.size_gb(item[0]))
                left = column - 0.42 + place * width
                tallest = max(tallest, height)
                axes.add_patch(
                    Rectangle(
                        (left, 0 if sign > 0 else -height),
                        width * 0.88,
                        height,
                        facecolor=PRODUCER if sign > 0 else CONSUMER,
                        alpha=1.0 if _matched(explainer, item, sign) else 0.45,
                    )
                )
                spots[item] = left + width * 0.44
        joined: dict[str, list[float]] = defaultdict(list)
        for item in below:
            for match in explainer.of_consumer.get(item[0], []):
                if match.consumer_shard == item[1]:
                    producer = (match.producer, match.producer_shard)
                    height = explainer.size_gb(match.producer)
                    need = -explainer.size_gb(item[0])
                    axes.plot(
                        [spots[producer], spots[item]],
                        [height * 0.5, -need * 0.5],
                        color=LINE,
                        linewidth=1.0,
                        marker="o",
                        markersize=2.0,
                    )
                    joined[item[0]].append(spots[item])
        for places in joined.values():
            if len(places) > 1:
                axes.plot([min(places), max(places)], [-0.8, -0.8], color=CONSUMER, linewidth=2.5)
        if neutral:
            axes.text(column, 0.5, f"{neutral} neutral", ha="center", color=NEUTRAL, fontsize=7)
    return tallest


def _matched(explainer: Explainer, item: tuple[str, int], sign: float) -> bool:
    group, shard = item
    if sign > 0:
        matches = explainer.of_producer.get(group, [])
        return any(match.producer_shard == shard for match in matches)
    return bool(explainer.of_consumer.get(group))
