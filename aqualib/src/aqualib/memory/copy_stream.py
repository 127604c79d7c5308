"""The copy stream: the copies of one engine thread, and the pins that they need.

Every copy between an engine's tensors and frames goes through here. A stream pins a frame, submits
copies and unpins once they are fenced: on a CPU at the end of the call, on a GPU when the transfer
is waited for. Copies in flight are therefore pins like any other, and no frame moves under them.

A stream never waits for a frame while it holds another: where a gate is closed, it first fences its
own copies and lets go. So transfers of any size and order, in any number of threads, cannot lock
each other or the migrator out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aqua_protocol import TransportError

if TYPE_CHECKING:
    import torch

    from aqualib.memory.frame import Frame
    from aqualib.memory.frame_store import FrameStore
    from aqualib.ranges import Range
    from aqualib.transports.base import Copier, MappedSlab


class RenewableCopier:
    """One thread's copier: made when first needed, and anew after one has failed.

    A failed copier goes with the tensors that it keeps until a fence, which will not come any more.
    Failures are told as text: an exception keeps the calls that it came through alive, and with
    them tensors that would be in the way of unmapping.

    Args:
        make: Makes a copier for the calling thread.
    """

    def __init__(self, make: Callable[[], Copier]) -> None:
        self._make = make
        self._copier: Copier | None = None

    @property
    def copier(self) -> Copier:
        """The present copier.

        Raises:
            TransportError: It cannot be made.
        """
        if self._copier is None:
            self._copier = self._make()
        return self._copier

    def attempt(self, work: Callable[[Copier], None]) -> str:
        """Do `work` with the copier; returns what went wrong, or nothing."""
        try:
            work(self.copier)
        except (TransportError, RuntimeError) as error:  # The latter is how torch reports a device.
            self._copier = None
            return str(error)
        return ""


@dataclass(slots=True)
class CopyBatch:
    """Copies that one fence covers, and why they did not arrive, if they did not."""

    is_fenced: bool = False
    failure: str = ""


class CopyStream(RenewableCopier):
    """One thread's copies; used by that thread alone.

    What copies raises `DataLostError` where the frame cannot be read any more, and `TransportError`
    where copies that had to be waited for did not arrive.

    Args:
        store: Whose frames.
        make_copier: Makes a copier for this thread.
        is_synchronous: Copies are done when the copier returns, so pins end with the call.

    Attributes:
        batch: Receives the copies that are submitted now.
    """

    def __init__(
        self, store: FrameStore, make_copier: Callable[[], Copier], *, is_synchronous: bool
    ) -> None:
        super().__init__(make_copier)
        self.is_synchronous = is_synchronous
        self.batch = CopyBatch()
        self._store = store
        self._pins: list[Frame] = []
        self._is_orphaned = False

    def begin(self) -> None:
        """Start a transfer; first ends those that were dropped without a wait.

        Raises:
            TransportError: One of those did not arrive.
        """
        if self._is_orphaned:
            self._require_settled()

    def write(self, frame: Frame, part: Range, src: torch.Tensor, at: int) -> None:
        """Copy bytes of `src`, which is contiguous, from byte `at` on into a part of the frame."""
        slab = self._pin(frame, part).tensor
        self.copier.copy_bytes(slab, part.start, src, at, part.size)

    def read(self, frame: Frame, part: Range, dst: torch.Tensor, at: int) -> None:
        """Copy a part of the frame into `dst`, which is contiguous, from byte `at` on."""
        slab = self._pin(frame, None).tensor
        self.copier.copy_bytes(dst, at, slab, part.start, part.size)

    def view(self, frame: Frame, part: Range, *, writes: bool) -> torch.Tensor:
        """A part of the frame for one copy, pinned until the next fence; shape (part.size,), uint8.

        The tensor must not live when the stream pins its next frame.
        """
        return self._pin(frame, part if writes else None).tensor[part.start : part.end]

    def settle(self) -> str:
        """Wait for every copy submitted so far and unpin; returns why they did not arrive, if so.

        Each transfer in the batch hears of a failure as well.
        """
        batch, self.batch = self.batch, CopyBatch()
        pins, self._pins = self._pins, []
        self._is_orphaned = False
        if pins and (failure := self.attempt(lambda copier: copier.fence())):
            batch.failure = f"copies did not arrive: {failure}"
        batch.is_fenced = True
        for frame in pins:
            self._store.unpin(frame)
        return batch.failure

    def orphan(self) -> None:
        """A transfer was dropped without a wait; does nothing that a finalizer may not."""
        self._is_orphaned = True

    def _pin(self, frame: Frame, written: Range | None) -> MappedSlab:
        memory = self._store.try_pin(frame, written)
        if memory is None:
            self._require_settled()
            memory = self._store.pin(frame, written)
        self._pins.append(frame)
        return memory

    def _require_settled(self) -> None:
        if failure := self.settle():
            raise TransportError(failure)
