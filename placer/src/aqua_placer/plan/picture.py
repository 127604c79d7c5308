"""A picture of a plan: servers as columns, producers above, consumers below, matches joined.

One box per shard; its height is its GB, so that an overhanging consumer is seen at once, and its
model is written along it. Large clusters are drawn a page at a time: beyond a few dozen servers
single matches are too small to see.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from aqua_cli.figures import AMBER, FAINT, INK, TEAL, figure
from aqua_placer.errors import PlanInvalidError
from aqua_placer.plan.explanation import Explainer

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Servers and shards side by side in one picture: twice as many make names illegible.
MAX_COLUMNS: Final = 48
MAX_BOXES: Final = 400

BOX_WIDTH: Final = 0.19
"""Inches of a shard: a name of 6 points along it has room. Doubled, half as much fits a screen."""

NAME_SIZE: Final = 6.0
"""Points of a model's name: legible on a screen. Doubled, names overlap."""

# Opacity of shards without a partner, chosen by hand; doubled, they look like all others.
UNMATCHED_ALPHA: Final = 0.4

PRODUCER, CONSUMER = TEAL, AMBER
STRIP: Final = 0.03
"""Half the height, of the largest box, of the strip around zero that joins matched shards."""

Shard: TypeAlias = tuple[str, int]
"""A group and the number of one of its shards."""


def render(explainer: Explainer, path: Path, *, first: int = 0, count: int = MAX_COLUMNS) -> int:
    """Draw `count` servers from number `first` on; returns how many were drawn.

    Raises:
        PlanInvalidError: No such servers.
        ConfigError: Neither SVG nor PNG, or the folder is not writable.
    """
    servers, plan = explainer.instance.servers, explainer.plan
    widest = int(servers.gpus.max())
    most = max(1, min(count, MAX_COLUMNS, MAX_BOXES // widest))
    shown = range(first, min(first + most, servers.count))
    if not shown:
        raise PlanInvalidError(
            f"the problem has servers 0 to {servers.count - 1}, not {first}",
            remedy="Choose --first within them.",
        )
    columns = [_column(explainer, servers.name(server)) for server in shown]
    boxes = max(max(len(column.above), len(column.below), 2) for column in columns)
    width = max(6.0, 1.0 + BOX_WIDTH * boxes * len(shown) / 0.84)
    with figure(path, width=width, height=6.5) as drawing:
        axes = drawing.subplots()
        tallest = max(
            _draw(explainer, axes, column, position) for position, column in enumerate(columns)
        )
        axes.set_xlim(-0.6, len(shown) - 0.4)
        axes.set_ylim(-tallest * 1.15 - 1, tallest * 1.15 + 1)
        axes.set_xticks(range(len(shown)), [servers.name(index) for index in shown], rotation=30)
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_ylabel("GB per shard: spare above, need below")
        page = "" if len(shown) == servers.count else f", servers {len(shown)} of {servers.count}"
        axes.set_title(
            f"{plan.problem or 'plan'}: {plan.coverage_gb:g} of {plan.demand_gb:g} GB covered, "
            f"gap {plan.gap:.2%}{page}"
        )
    return len(shown)


@dataclass(frozen=True)
class Column:
    """One server: producer shards by falling spare, consumer shards below their producers.

    Attributes:
        partner: The producer shard of each matched consumer shard.
        neutral: Shards that neither lend nor need.
    """

    above: list[Shard]
    below: list[Shard]
    partner: dict[Shard, Shard]
    neutral: int


def _column(explainer: Explainer, server: str) -> Column:
    shards = [
        (group, shard)
        for group in explainer.on_server[server]
        for shard in range(explainer.shards(group))
    ]
    partner = {
        (match.consumer, match.consumer_shard): (match.producer, match.producer_shard)
        for group in explainer.on_server[server]
        for match in explainer.of_consumer.get(group, [])
    }
    above = [item for item in shards if explainer.size_gb(item[0]) > 0]
    above.sort(key=lambda item: (-explainer.size_gb(item[0]), item))
    order = {item: place for place, item in enumerate(above)}
    below = [item for item in shards if explainer.size_gb(item[0]) < 0]
    below.sort(key=lambda item: (order[partner[item]] if item in partner else len(above), item))
    return Column(above, below, partner, len(shards) - len(above) - len(below))


def _draw(explainer: Explainer, axes: Axes, column: Column, position: int) -> float:
    """Draw one server; returns the height of its largest box."""
    from matplotlib.patches import Rectangle

    lent = set(column.partner.values())
    middle: dict[Shard, float] = {}
    tallest = 1.0
    strip = STRIP * float(np.abs(explainer.instance.r_gb).max())
    for row, sign, colour in ((column.above, 1.0, PRODUCER), (column.below, -1.0, CONSUMER)):
        width = 0.84 / max(len(row), 2)
        for place, item in enumerate(row):
            gb = abs(explainer.size_gb(item[0]))
            left = position - 0.42 + place * width
            middle[item] = left + width * 0.44
            tallest = max(tallest, gb)
            matched = item in lent if sign > 0 else item in column.partner
            corner = (left, 0 if sign > 0 else -gb)
            alpha = 1.0 if matched else UNMATCHED_ALPHA
            axes.add_patch(
                Rectangle(corner, width * 0.88, gb, facecolor=colour, alpha=alpha, linewidth=0)
            )
            axes.annotate(
                _name(explainer, item),
                (middle[item], sign * strip),
                xytext=(0, sign * 3),
                textcoords="offset points",
                rotation=90,
                ha="center",
                va="bottom" if sign > 0 else "top",
                fontsize=NAME_SIZE,
                color=INK,
            )
    for consumer, producer in column.partner.items():
        ends = [middle[producer], middle[consumer]]
        axes.plot(ends, [strip, -strip], color=INK, linewidth=1.0, marker="o", markersize=2.0)
    if column.neutral:
        axes.text(position, 0.5, f"{column.neutral} neutral", ha="center", color=FAINT, fontsize=7)
    return tallest


def _name(explainer: Explainer, item: Shard) -> str:
    """The group, and which of its shards where it has several."""
    group, shard = item
    shards = explainer.shards(group)
    return group if shards == 1 else f"{group} {shard + 1}/{shards}"
