"""The carrier: copies a frame's bytes from one slab to another, as fast as the machine can.

One stream keeps a GPU's copy engine busy. A CPU core alone reads and writes at about half of what
its memory gives, and the C library streams past the caches only in copies larger than any slab; so
there a frame is cut in two, and a helper thread carries the other half. Halves of one frame rather
than two frames at once: the first slab of a reclaim is back in half the time.

Failures are told as text. An exception keeps the frames of its call alive, and with them tensors
that would be in the way of unmapping.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Final

from aqua_protocol import MIB, TransportError
from aqualib.ranges import Range

if TYPE_CHECKING:
    from aqualib.transports.base import Copier, MappedSlab, Transport

CPU_LANES: Final = 2
"""16 slabs of 64 MiB on a 2-core virtual machine (Xeon, Linux 6.18): one stream 157 ms, two 96 ms,
and a single memcpy of 1 GiB 109 ms."""

DEVICE_LANES: Final = 1

MIN_PART_BYTES: Final = 2 * MIB
"""Below, handing a part over (some 50 us) costs more than it saves."""


class SlabCopier:
    """The streams of one mover; `carry` is called by one thread.

    Args:
        transport: Makes the copiers.
    """

    def __init__(self, transport: Transport) -> None:
        count = CPU_LANES if transport.device.type == "cpu" else DEVICE_LANES
        self._stream = _Lane(transport)
        self._helpers = [_Helper(transport, index) for index in range(count - 1)]

    def copy(self, dst: MappedSlab, src: MappedSlab, runs: list[Range]) -> str:
        """Copy byte ranges between two slabs and wait for it; returns what went wrong, or nothing.

        After a failure some bytes may have arrived and some not.
        """
        first, *others = split_runs(runs, 1 + len(self._helpers), MIN_PART_BYTES)
        for helper, part in zip(self._helpers, others, strict=False):
            helper.begin(dst, src, part)
        failure = self._stream.copy(dst, src, first)
        for helper, _ in zip(self._helpers, others, strict=False):
            failure = helper.end() or failure
        return failure

    def close(self) -> None:
        """End the helpers. Harmless when repeated."""
        for helper in self._helpers:
            helper.close()


class _Lane:
    """Copies of one thread, with a copier that is replaced once it has failed."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._copier: Copier | None = None

    def copy(self, dst: MappedSlab, src: MappedSlab, runs: list[Range]) -> str:
        if not runs:
            return ""
        try:
            if self._copier is None:
                self._copier = self._transport.copier()
            for run in runs:
                self._copier.copy(dst.tensor[run.start : run.end], src.tensor[run.start : run.end])
            self._copier.fence()
        except (TransportError, RuntimeError) as error:  # The latter is how torch reports a device.
            # The copier goes as well, and with it the tensors that it keeps until a fence.
            self._copier = None
            return str(error)
        return ""


class _Helper:
    """A daemon thread with a stream of its own, for one part at a time."""

    def __init__(self, transport: Transport, index: int) -> None:
        self._stream = _Lane(transport)
        self._orders: queue.SimpleQueue[tuple[MappedSlab, MappedSlab, list[Range]] | None] = (
            queue.SimpleQueue()
        )
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, name=f"aqua-helper-{index}", daemon=True)
        thread.start()

    def begin(self, dst: MappedSlab, src: MappedSlab, runs: list[Range]) -> None:
        self._orders.put((dst, src, runs))

    def end(self) -> str:
        return self._failures.get()

    def close(self) -> None:
        self._orders.put(None)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            self._failures.put(self._stream.copy(*order))


def split_runs(runs: list[Range], count: int, least_bytes: int) -> list[list[Range]]:
    """Cut ascending runs into up to `count` parts of about equal size, none below `least_bytes`.

    Returns:
        At least one part, which may be empty; together they cover the same bytes in order.
    """
    total = sum(run.size for run in runs)
    count = max(1, min(count, total // least_bytes))
    parts: list[list[Range]] = [[]]
    room = share = -(-total // count)
    for run in runs:
        start, left = run
        while left:
            if not room:
                parts.append([])
                room = share
            size = min(left, room)
            parts[-1].append(Range(start, size))
            start, left, room = start + size, left - size, room - size
    return parts
