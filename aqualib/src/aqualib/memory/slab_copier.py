"""The slab copier: copies a frame's bytes from one slab to another, as fast as the machine can.

One copy stream keeps a GPU's copy engine busy. A CPU core alone reads and writes at about half of
what its memory gives, and the C library streams past the caches only in copies larger than any
slab; so there a frame is cut in two, and a helper thread copies the other half. Halves of one frame
rather than two frames at once: the first slab of a reclaim is back in half the time.
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Final

from aqua_protocol import MIB
from aqualib.memory.copy_stream import RenewableCopier
from aqualib.ranges import Range, split

if TYPE_CHECKING:
    from aqualib.transports.base import Copier, MappedSlab, Transport

CPU_COPIERS: Final = 2
"""Threads that copy one frame on a CPU. 16 slabs of 64 MiB on a 2-core virtual machine (Xeon, Linux
6.18): one thread 157 ms, two 96 ms, and a single memcpy of 1 GiB 109 ms. Doubled, four threads
share what two get out of the memory."""

DEVICE_COPIERS: Final = 1
"""Threads that feed a GPU's copy engine. Doubled, a second one waits for the same engine."""

MIN_PART_BYTES: Final = 2 * MIB
"""Bytes below which a part is not handed over: that costs some 50 us, in which a core copies half a
MiB. Doubled, frames of 2 to 4 MiB are copied by one core."""


class SlabCopier:
    """The copiers of one migrator; `copy` is called by one thread."""

    def __init__(self, transport: Transport) -> None:
        count = CPU_COPIERS if transport.device.type == "cpu" else DEVICE_COPIERS
        self._copier = RenewableCopier(transport.copier)
        self._helpers = [_Helper(transport, index) for index in range(count - 1)]

    def copy(self, dst: MappedSlab, src: MappedSlab, ranges: list[Range]) -> str:
        """Copy byte ranges between two slabs and wait for it; returns what went wrong, or nothing.

        After a failure some bytes may have arrived and some not.
        """
        first, *others = split(ranges, 1 + len(self._helpers), MIN_PART_BYTES)
        for helper, part in zip(self._helpers, others, strict=False):
            helper.begin(dst, src, part)
        failure = _copy(self._copier, dst, src, first)
        for helper, _ in zip(self._helpers, others, strict=False):
            failure = helper.end() or failure
        return failure

    def close(self) -> None:
        """End the helpers. Harmless when repeated."""
        for helper in self._helpers:
            helper.close()


class _Helper:
    """A daemon thread with a copier of its own, for one part at a time."""

    def __init__(self, transport: Transport, index: int) -> None:
        self._copier = RenewableCopier(transport.copier)
        self._parts: queue.SimpleQueue[tuple[MappedSlab, MappedSlab, list[Range]] | None]
        self._parts = queue.SimpleQueue()
        self._failures: queue.SimpleQueue[str] = queue.SimpleQueue()
        name = f"aqua-slab-copier-{index}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def begin(self, dst: MappedSlab, src: MappedSlab, ranges: list[Range]) -> None:
        self._parts.put((dst, src, ranges))

    def end(self) -> str:
        return self._failures.get()

    def close(self) -> None:
        self._parts.put(None)

    def _run(self) -> None:
        while (part := self._parts.get()) is not None:
            self._failures.put(_copy(self._copier, *part))


def _copy(renewable: RenewableCopier, dst: MappedSlab, src: MappedSlab, ranges: list[Range]) -> str:
    def submit(copier: Copier) -> None:
        for part in ranges:
            copier.copy(dst.tensor[part.start : part.end], src.tensor[part.start : part.end])
        copier.fence()

    return renewable.attempt(submit) if ranges else ""
