"""Thresholds out of sweeps: what they say for sure, and the default wherever they do not.

Two routes were measured at rising lengths, each with an interval. Where a threshold lies is known
only as far as the intervals keep apart: above the longest length at which packing surely wins, and
not above the shortest one from which copying directly surely wins. Any threshold between the two is
as good for all that was seen; the default stays if it is one of them, and else the upper end is
taken.

Lanes are the fewest that no larger number is surely better than, in one direction at least and
worse in none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aqua_protocol import KIB, format_bytes
from aqualib.transports.gpu_thresholds import CopyThresholds, ThresholdOrigin
from harness.gpu.sampling import Figure, digits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from harness.gpu.provenance import Origin


@dataclass(frozen=True)
class Compared:
    """Both routes at one length.

    Attributes:
        nbytes: Of a run.
        staged: GB/s by way of the staging buffer.
        direct: GB/s by the copy engines, where the rows lie.
    """

    nbytes: int
    staged: Figure
    direct: Figure


@dataclass(frozen=True)
class Choice:
    """A threshold, and why."""

    nbytes: int
    evidence: str


def choose(sweep: Sequence[Compared], default: int) -> Choice:
    """The threshold that a sweep speaks for: runs of that length and more are copied directly.

    Args:
        sweep: At least one length; a length may come more than once (two ways, two shapes).
        default: What holds where the sweep does not say.
    """
    ordered = sorted(sweep, key=lambda each: each.nbytes)
    packed = [each.nbytes for each in ordered if each.direct.surely_below(each.staged)]
    above = max(packed, default=0)
    direct = [
        each.nbytes
        for each in ordered
        if each.nbytes > above and each.staged.surely_below(each.direct)
    ]
    says = (
        f"packing surely wins up to {format_bytes(above)}" if above else "packing never surely wins"
    )
    if direct:
        says += f", copying directly from {format_bytes(direct[0])}"
        chosen = default if above < default <= direct[0] else direct[0]
    else:
        says += ", copying directly never above that"
        # Beyond the sweep nothing is known, but that the threshold is not within.
        chosen = default if default > above else 2 * above
    return Choice(chosen, f"{says}; {'the default stays' if chosen == default else 'chosen'}")


def sweep_of(figures: Mapping[str, float], side: str) -> list[Compared]:
    """What the step `rows` has measured of one side: `<side> <way> <route> <row>x<run> <part>`."""
    parts: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for name, value in figures.items():
        words = name.split()
        if len(words) == 5 and words[0] == side:
            _, way, route, shape, part = words
            parts.setdefault((way, shape), {}).setdefault(route, {})[part] = value
    found = []
    for (_, shape), routes in sorted(parts.items()):
        row_bytes, _, run = shape.partition("x")
        staged, direct = Figure(**routes["staged"]), Figure(**routes["direct"])
        found.append(Compared(int(row_bytes) * int(run), staged, direct))
    return found


def choose_lanes(sweep: Mapping[int, Sequence[Figure]], default: int) -> tuple[int, str]:
    """How many lanes a sweep speaks for, and why.

    Args:
        sweep: GB/s by the number of lanes, in directions that are the same for all.
        default: What holds where nothing was measured.
    """
    if not sweep:
        return default, "not measured; the default stays"
    chosen, *others = sorted(sweep)
    for count in others:
        pairs = list(zip(sweep[chosen], sweep[count], strict=True))
        is_better = any(few.surely_below(many) for few, many in pairs)
        if is_better and not any(many.surely_below(few) for few, many in pairs):
            chosen = count
    rates = " and ".join(digits(each.median) for each in sweep[chosen])
    return chosen, f"{chosen} of {max(sweep)} tried carry {rates} GB/s, more do not surely better"


def lanes_of(figures: Mapping[str, float], side: str) -> dict[int, list[Figure]]:
    """What the step `lanes` has measured of one side: `<side> <way> over <count> lanes <part>`."""
    found: dict[int, dict[str, dict[str, float]]] = {}
    for name, value in figures.items():
        words = name.split()
        if words[0] == side and words[2:3] == ["over"]:
            _, way, _, count, _, part = words
            found.setdefault(int(count), {}).setdefault(way, {})[part] = value
    return {count: [Figure(**ways[way]) for way in sorted(ways)] for count, ways in found.items()}


def thresholds(figures: Mapping[str, float], origin: Origin) -> CopyThresholds:
    """What the transports should use on this kind of GPU, with where it comes from."""
    default = CopyThresholds()
    choices = {
        "device_run_bytes": choose(sweep_of(figures, "device"), default.device_run_bytes),
        "host_run_bytes": choose(sweep_of(figures, "host"), default.host_run_bytes),
    }
    device_lanes, why_device = choose_lanes(lanes_of(figures, "device"), default.device_lanes)
    host_lanes, why_host = choose_lanes(lanes_of(figures, "host"), default.host_lanes)
    lane_evidence = {"device_lanes": why_device, "host_lanes": why_host}
    return CopyThresholds(
        device_run_bytes=choices["device_run_bytes"].nbytes,
        host_run_bytes=choices["host_run_bytes"].nbytes,
        device_lanes=device_lanes,
        host_lanes=host_lanes,
        provenance=ThresholdOrigin(
            gpu=origin.gpu,
            driver=origin.driver,
            torch=origin.torch,
            commit=origin.commit,
            measured_at=origin.measured_at,
            evidence={name: each.evidence for name, each in choices.items()} | lane_evidence,
        ),
    )


assert CopyThresholds().device_run_bytes == 256 * KIB
