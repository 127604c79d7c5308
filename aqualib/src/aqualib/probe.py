"""What a link really carries: measured when a slab is connected, never assumed.

A copy that quietly goes through host memory, a PCIe link where NVLink was expected, a GPU that was
moved: all of them work, at a tenth of the speed. So a borrower measures the first slab it maps and
logs and exports the transport it got and the rate it saw.

The slab keeps its contents: what is written is what was read from there. Memory for it is taken
from what the copiers have, since an engine that wants slabs is one that is short of memory. The
probe is short, so it
is a floor: a busy link or host shows as a slow one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aqua_protocol import MIB, TransportKind

if TYPE_CHECKING:
    import torch

    from aqualib.transports.base import Copier, MappedSlab, Transport

PROBE_BYTES: Final = 8 * MIB
"""Bytes of one copy: more than the caches close to a core; a sixteenth of a millisecond on NVLink.
Doubled, attaching takes a millisecond longer."""

MIN_ROUND_S: Final = 0.5e-3
"""Seconds that a round lasts at least, so that launching and fencing (20 us on a GPU) hardly count.
Doubled, they count half as much and the probe takes twice as long."""

ROUNDS: Final = 3
"""Rounds, of which the best counts: a disturbance only makes a copy slower. Doubled, the probe
takes twice as long."""

MAX_COPIES_PER_ROUND: Final = 64
"""Copies in a round at most; ends the search on a link without a cost. Doubled, links of more than
1 TB/s are measured a little better."""


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """One link, as seen from the side that measured.

    Attributes:
        transport: The one really used.
        write_bytes_per_s: Into the slab: paging out.
        read_bytes_per_s: Out of the slab: paging in.
    """

    transport: TransportKind
    write_bytes_per_s: float
    read_bytes_per_s: float

    def __str__(self) -> str:
        return (
            f"{self.transport.value}: {self.write_bytes_per_s / 1e9:.1f} GB/s out, "
            f"{self.read_bytes_per_s / 1e9:.1f} GB/s in"
        )


def measure(
    transport: Transport,
    mapped: MappedSlab,
    *,
    copier: Copier | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LinkMeasurement:
    """Measure the link to `mapped` from this side's device; takes a few milliseconds.

    Args:
        mapped: A slab that is not written to meanwhile; its contents are preserved.
        copier: The copier to use, or None for a new one.
        clock: Seconds, monotonic.
    """
    chosen = transport.copier(is_background=True) if copier is None else copier
    size = min(mapped.nbytes, PROBE_BYTES)
    remote = mapped.tensor[:size]
    with chosen.scratch(size) as local:
        read = _rate(chosen, local, remote, clock)
        write = _rate(chosen, remote, local, clock)
    return LinkMeasurement(transport.kind, write_bytes_per_s=write, read_bytes_per_s=read)


def _rate(
    copier: Copier, dst: torch.Tensor, src: torch.Tensor, clock: Callable[[], float]
) -> float:
    """Bytes per second of the best round."""

    def seconds_of(count: int) -> float:
        begin = clock()
        for _ in range(count):
            copier.copy(dst, src)
        copier.fence()
        return clock() - begin

    count = 1
    while (seconds := seconds_of(count)) < MIN_ROUND_S and count < MAX_COPIES_PER_ROUND:
        count *= 2
    best = min([seconds, *(seconds_of(count) for _ in range(ROUNDS - 1))])
    return count * src.nbytes / max(best, 1e-9)
