"""The stream: the copies of one engine thread, and the pins that they need.

Every copy between an engine's tensors and frames goes through here. A stream pins a frame, submits
copies and unpins once they are fenced: on a CPU at the end of the call, on a GPU when the transfer
is waited for. Copies in flight are therefore pins like any other, and no frame moves under them.

A stream never waits for a frame while it holds another: where a gate is closed, it first fences its
own copies and lets go. So transfers of any size and order, in any number of threads, cannot lock
each other or the mover out.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from aqua_protocol import AquaError, TransportError

if TYPE_CHECKING:
    import torch

    from aqualib.memory.frame import Frame
    from aqualib.memory.frame_store import FrameStore
    from aqualib.ranges import Range
    from aqualib.transports.base import Copier


class CopyBatch:
    """Copies that one fence covers.

    Attributes:
        is_fenced: The fence is behind them.
        failure: Why they did not arrive, if they did not.
    """

    __slots__ = ("failure", "is_fenced")

    def __init__(self) -> None:
        self.is_fenced = False
        self.failure = ""


class CopyStream:
    """One thread's copies; used by that thread alone.

    Args:
        store: Whose frames.
        new_copier: Makes a copier for this thread.
        is_synchronous: Copies are done when the copier returns, so pins end with the call.
    """

    def __init__(
        self, store: FrameStore, new_copier: Callable[[], Copier], *, is_synchronous: bool
    ) -> None:
        self.is_synchronous = is_synchronous
        self.batch = CopyBatch()
        self._store = store
        self._new_copier = new_copier
        self._copier: Copier | None = None
        self._pins: list[Frame] = []
        self._is_orphaned = False

    @property
    def copier(self) -> Copier:
        """The thread's copier; a new one after one has failed.

        Raises:
            TransportError: It cannot be made.
        """
        if self._copier is None:
            self._copier = self._new_copier()
        return self._copier

    def begin(self) -> None:
        """Start a transfer; first ends those that were dropped without a wait.

        Raises:
            TransportError: One of those did not arrive.
        """
        if self._is_orphaned:
            self.settle()

    def tensor(self, frame: Frame, run: Range, *, writes: bool) -> torch.Tensor:
        """Pin the frame and return its bytes in `run`, shape (run.size,), uint8.

        The result is for one copy: nobody may hold it when the stream asks for the next frame.

        Raises:
            DataLostError: The frame cannot be read any more.
            TransportError: Copies that had to be waited for did not arrive.
        """
        written = run if writes else None
        memory = self._store.try_pin(frame, written)
        if memory is None:
            self.settle()
            memory = self._store.pin(frame, written)
        self._pins.append(frame)
        return memory.tensor[run.start : run.end]

    def settle(self) -> None:
        """Wait for every copy submitted so far and unpin.

        Raises:
            TransportError: They did not arrive; each transfer in the batch will say so as well.
        """
        batch, self.batch = self.batch, CopyBatch()
        pins, self._pins = self._pins, []
        self._is_orphaned = False
        try:
            if pins and self._copier is not None:
                self._copier.fence()
        except (TransportError, RuntimeError) as error:
            # Torch reports a device by the latter. The copier keeps tensors until a fence that
            # will not come any more, so it goes.
            self._copier = None
            batch.failure = f"copies did not arrive: {error}"
            raise TransportError(batch.failure) from error
        finally:
            batch.is_fenced = True
            for frame in pins:
                self._store.unpin(frame)

    def orphan(self) -> None:
        """A transfer was dropped without a wait; does nothing that a finalizer may not."""
        self._is_orphaned = True


class Transfer:
    """Bytes on their way between an engine's tensor and the store.

    Wait for it on the thread that started it, before touching either side. One that is dropped
    without a wait ends with the next transfer of its thread, and keeps its frames in place until
    then.

    Args:
        stream: The stream of the thread, whose present batch has the last of the copies.
        finish: Called once, after the fence, with the reason if the copies did not arrive: checks
            and counts them, and raises what the waiter shall see.
    """

    __slots__ = ("_batch", "_error", "_finish", "_stream")

    def __init__(self, stream: CopyStream, finish: Callable[[str], None]) -> None:
        self._stream = stream
        self._batch = stream.batch
        self._finish: Callable[[str], None] | None = finish
        self._error: AquaError | None = None
        if stream.is_synchronous:
            self.wait()

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._batch.is_fenced

    def wait(self) -> None:
        """Wait until every byte has arrived. Repeating it repeats its outcome.

        Raises:
            TransportError: A copy failed. The target's contents are undefined: free slots that were
                paged out to, and page in again or recompute.
            ChecksumMismatchError: What arrived is not what was stored; do not use it.
        """
        if self._error is not None:
            raise self._error
        if not self._batch.is_fenced:
            with suppress(TransportError):  # `finish` hears of it by the batch.
                self._stream.settle()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            try:
                finish(self._batch.failure)
            except AquaError as error:
                # Without the traceback, whose frames would keep tensors alive.
                self._error = error.with_traceback(None)
                raise

    def __del__(self) -> None:
        if self._finish is not None:
            self._stream.orphan()

    def __repr__(self) -> str:
        state = self._batch.failure or ("done" if self.is_done else "under way")
        return f"<Transfer, {state}>"
