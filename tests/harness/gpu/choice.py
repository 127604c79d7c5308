"""Thresholds out of a sweep: what it says for sure, and the default wherever it does not.

Two routes were measured at rising lengths, each with an interval. Where a threshold lies is known
only as far as the intervals keep apart: above the longest length at which packing surely wins, and
not above the shortest one from which copying directly surely wins. Any threshold between the two is
as good for all that was seen; the default stays if it is one of them, and else the upper end is
taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from aqua_protocol import KIB, format_bytes
from aqualib.transports.gpu_thresholds import CopyThresholds, ThresholdOrigin
from harness.gpu.sampling import Figure

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


def thresholds(figures: Mapping[str, float], origin: Origin) -> CopyThresholds:
    """What the transports should use on this kind of GPU, with where it comes from."""
    default = CopyThresholds()
    choices = {
        "device_run_bytes": choose(sweep_of(figures, "device"), default.device_run_bytes),
        "host_run_bytes": choose(sweep_of(figures, "host"), default.host_run_bytes),
    }
    return CopyThresholds(
        device_run_bytes=choices["device_run_bytes"].nbytes,
        host_run_bytes=choices["host_run_bytes"].nbytes,
        provenance=ThresholdOrigin(
            gpu=origin.gpu,
            driver=origin.driver,
            torch=origin.torch,
            commit=origin.commit,
            measured_at=origin.measured_at,
            evidence={name: choice.evidence for name, choice in choices.items()},
        ),
    )


assert CopyThresholds().device_run_bytes == 256 * KIB
