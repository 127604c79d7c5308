"""Links and memory that several want at once: who gets how much, and what it costs kernels.

Copies and collectives share links fairly: all rates rise together, each by its weight, until a link
is full or a flow has what it wants; those bound by it stop there and the others go on (weighted
max-min fairness). So a flow's weight is a guarantee: of every link it gets at least its weight's
share, however much others want, and what one leaves goes to the rest.

What copies take of a GPU's memory bandwidth slows its kernels by a curve: measured points, from the
share of bandwidth that copies take to how much longer a step takes. Without a measurement it is
arithmetic, `FAIR_SHARE`: a step that waits for memory has what copies leave.

What is not modelled: that a switch or a memory controller loses capacity where flows meet.

Source: Bertsekas and Gallager, "Data Networks", section 6.5.2 (progressive filling). Aqua section
9.3: producers bound by memory lose up to 5 % while they lend, those bound by compute nothing.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, isfinite
from pathlib import Path
from typing import Final

import numpy as np

from aqua_protocol.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes on their way over some links.

    Attributes:
        links: By name; it needs the same rate of each.
        wanted_bytes_per_s: More is of no use to it.
        weight: Of its share where it has to share.
    """

    links: tuple[str, ...]
    wanted_bytes_per_s: float = inf
    weight: float = 1.0


def max_min_rates(capacity: Mapping[str, float], flows: Sequence[Flow]) -> list[float]:
    """The rate of each flow in bytes per second, in their order.

    Args:
        capacity: Bytes per second of each link.

    Raises:
        ConfigError: A flow has no link and no bound, an unknown link, or a weight of nothing.
    """
    for flow in flows:
        _check(flow, capacity)
    left = dict(capacity)
    rates = [0.0] * len(flows)
    rising = [index for index, flow in enumerate(flows) if flow.wanted_bytes_per_s > 0.0]
    while rising:
        weight_on = dict.fromkeys(left, 0.0)
        for index in rising:
            for link in flows[index].links:
                weight_on[link] += flows[index].weight
        level = min(
            [left[link] / weight for link, weight in weight_on.items() if weight > 0.0]
            + [
                (flows[index].wanted_bytes_per_s - rates[index]) / flows[index].weight
                for index in rising
            ]
        )
        full = set()
        for link, weight in weight_on.items():
            if weight > 0.0 and left[link] / weight <= level:
                full.add(link)
            left[link] = max(0.0, left[link] - level * weight)
        stopped = set()
        for index in rising:
            flow = flows[index]
            rates[index] += level * flow.weight
            is_served = rates[index] >= flow.wanted_bytes_per_s * (1.0 - 1e-12)
            if is_served or not full.isdisjoint(flow.links):
                stopped.add(index)
        rising = [index for index in rising if index not in stopped]
    return rates


def _check(flow: Flow, capacity: Mapping[str, float]) -> None:
    if unknown := [link for link in flow.links if link not in capacity]:
        raise ConfigError(f"no link {unknown[0]!r}", remedy=f"Known: {', '.join(capacity)}.")
    if not flow.weight > 0.0 or not (flow.links or isfinite(flow.wanted_bytes_per_s)):
        raise ConfigError(f"{flow} is not bounded", remedy="Give it a link, and a weight above 0.")


@dataclass(frozen=True, slots=True)
class Interference:
    """How much longer steps take while copies run.

    Attributes:
        points: Share of memory bandwidth that copies take, and the factor on a step's time;
            straight lines between them, ascending, from (0, 1) on.
        source: Where they are from.
    """

    points: tuple[tuple[float, float], ...]
    source: str

    def slowdown(self, copy_share: float) -> float:
        """The factor on a step's time; beyond the last point it stays."""
        shares, factors = zip(*self.points, strict=True)
        return float(np.interp(copy_share, shares, factors))


FAIR_SHARE: Final = Interference(
    tuple((share / 20.0, 1.0 / (1.0 - share / 20.0)) for share in range(19)),
    "arithmetic: a step that waits for memory has the bandwidth that copies leave; not measured",
)
"""The default, and an upper bound where bandwidth is shared fairly: kernels bound by compute lose
less. Up to nine tenths of the bandwidth, which no link reaches."""


def read_interference(path: Path) -> Interference:
    """A measured curve: CSV with columns `copy_share` and `slowdown`.

    Raises:
        ConfigError: No such file or columns, or points that cannot be.
    """
    remedy = "Columns: copy_share (0 to 1, ascending) and slowdown (1 or more)."
    try:
        with path.open(newline="") as text:
            table = csv.DictReader(text)
            rows = [(float(row["copy_share"]), float(row["slowdown"])) for row in table]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", remedy=remedy) from error
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is no interference curve: {error}", remedy=remedy) from error
    points = [(0.0, 1.0), *(row for row in rows if row != (0.0, 1.0))]
    if not rows or not all(
        0.0 <= before[0] < after[0] <= 1.0 and 1.0 <= after[1] < inf
        for before, after in pairwise(points)
    ):
        raise ConfigError(f"{path}: its points cannot be", remedy=remedy)
    return Interference(tuple(points), str(path))
