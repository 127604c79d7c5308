"""Producer adapter for any torch program that works in steps: image and audio pipelines first.

    loop = TorchLoop(CudaMemoryLimit(device), queue_length=lambda: len(requests))
    with Producer(...) as producer, Informer(producer, loop, profile):
        pipeline(prompt, callback_on_step_end=loop.on_step_end)

Such a program allocates while a step runs and frees when it ends, so memory that is unused between
two steps is not spare: the next one wants it. What is spare is what the highest of the recent steps
left over. The callback measures that at the end of every step; shrinking and growing then move a
limit that stays above the recent peak, and may happen at any time, on the informer's thread.

On a GPU the limit is torch's own: the allocator gives cached memory back to the driver and fails
beyond `set_per_process_memory_fraction`. Slabs are not made by torch's allocator and do not count
against it. A program that asks before it allocates, as one on an emulated device has to, is limited
by the answer, and gives up gradually what it still uses.

Not promised: that a step which needs more than any recent one succeeds while memory is lent. It
fails with torch's out-of-memory error, as it would on a smaller GPU.

Source: Aqua section 6, the northbound interface; the paper's producers report through patches of
their engines.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from aqua_protocol import MIB, ConfigError, TransportError
from aqua_protocol.members import LoadReport

if TYPE_CHECKING:
    import torch

    from aqualib.producer.device import EmulatedMemory

RECENT_STEPS: Final = 200
"""Steps that the peak is taken over: several images, so that the decoder at the end of each one,
which needs the most, is always among them. Doubled,
the memory of an unusually large step is lent that much later."""

DEFAULT_HEADROOM_BYTES: Final = 512 * MIB
"""Kept above the recent peak on a GPU: fragmentation, and workspaces that libraries allocate.
Doubled, that much less is lent."""


class TorchLoop:
    """A program in steps, as the informer sees it (a `LoadSource`).

    Args:
        limit: Its memory.
        queue_length: Requests that wait now; called on the informer's thread.
        requests_per_s: Rate of arrivals, if the program knows it; likewise.

    Attributes:
        step_ended: Call it at the end of every step, on the loop's thread.
        shrink, grow: The limit's, on the informer's thread.
    """

    def __init__(
        self,
        limit: CudaMemoryLimit | CountedMemoryLimit,
        *,
        queue_length: Callable[[], int],
        requests_per_s: Callable[[], float] | None = None,
    ) -> None:
        self._limit = limit
        self.step_ended: Final = limit.step_ended
        self.shrink: Final = limit.shrink
        self.grow: Final = limit.grow
        self._queue_length = queue_length
        self._requests_per_s = requests_per_s

    def on_step_end(
        self,
        pipeline: Any,  # noqa: ANN401 - any diffusers pipeline
        step_index: int,
        timestep: Any,  # noqa: ANN401 - a number or a tensor, by pipeline
        callback_kwargs: dict[str, Any],
    ) -> dict[str, Any]:
        """Serve diffusers as `callback_on_step_end`; changes nothing."""
        del pipeline, step_index, timestep
        self.step_ended()
        return callback_kwargs

    def load(self) -> LoadReport:
        """The load now."""
        return LoadReport(
            queue_length=self._queue_length(),
            memory_used_bytes=self._limit.used_bytes,
            memory_total_bytes=self._limit.total_bytes,
            requests_per_s=None if self._requests_per_s is None else self._requests_per_s(),
        )


class CudaMemoryLimit:
    """A limit on a GPU's caching allocator in torch, `headroom_bytes` above the recent peak.

    Raises:
        ConfigError: Not a GPU.
    """

    def __init__(
        self, device: torch.device, *, headroom_bytes: int = DEFAULT_HEADROOM_BYTES
    ) -> None:
        import torch

        if device.type != "cuda":
            raise ConfigError(
                f"{device} has no allocator to limit",
                remedy="Count the program's memory, and use CountedMemoryLimit.",
            )
        self._cuda = torch.cuda
        self._device = device
        self._headroom_bytes = headroom_bytes
        self._peaks: deque[int] = deque(maxlen=RECENT_STEPS)
        # What torch may hold: all that it holds now, and all that is free.
        free, self.total_bytes = torch.cuda.mem_get_info(device)
        self._limit_bytes = torch.cuda.memory_reserved(device) + free

    @property
    def used_bytes(self) -> int:
        """The recent peak, and whatever on the device is not torch's here: slabs, others."""
        free, total = self._cuda.mem_get_info(self._device)
        elsewhere = total - free - self._cuda.memory_reserved(self._device)
        return min(total, elsewhere + self._peak_bytes())

    def step_ended(self) -> None:
        """Note the peak since the last step ended."""
        self._peaks.append(self._cuda.max_memory_allocated(self._device))
        self._cuda.reset_peak_memory_stats(self._device)

    def shrink(self, nbytes: int) -> int:
        """Lower the limit, at most to the recent peak and the headroom; free what is cached."""
        spare = self._limit_bytes - self._peak_bytes() - self._headroom_bytes
        given = max(0, min(nbytes, spare))
        self._set_limit(self._limit_bytes - given)
        self._cuda.empty_cache()
        return given

    def grow(self, nbytes: int) -> None:
        """Raise the limit."""
        self._set_limit(self._limit_bytes + nbytes)

    def _peak_bytes(self) -> int:
        return max([self._cuda.memory_allocated(self._device), *self._peaks])

    def _set_limit(self, nbytes: int) -> None:
        self._limit_bytes = nbytes
        fraction = min(1.0, nbytes / self.total_bytes)
        self._cuda.set_per_process_memory_fraction(fraction, self._device)


class CountedMemoryLimit:
    """The memory of a program that asks before it allocates; thread-safe.

    The device's is shared by the program and its slabs; `least_bytes` are never given up.
    """

    def __init__(self, memory: EmulatedMemory, *, least_bytes: int) -> None:
        self._memory = memory
        self._least_bytes = least_bytes
        self._lock = threading.Lock()
        self._own_bytes = 0
        # What the program is entitled to, and how far it may go while it is giving something up.
        self._limit_bytes = memory.total_bytes - memory.used_bytes
        self._target_bytes = self._limit_bytes

    @property
    def total_bytes(self) -> int:
        """Memory of the device."""
        return self._memory.total_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes that the program and its slabs have taken."""
        return self._memory.used_bytes

    @property
    def own_bytes(self) -> int:
        """Bytes that the program has taken."""
        return self._own_bytes

    def try_take(self, nbytes: int) -> bool:
        """Account for an allocation about to be made; False when it has to wait."""
        with self._lock:
            if self._own_bytes + nbytes > self._target_bytes:
                return False
            try:
                self._memory.take(nbytes)
            except TransportError:
                return False  # The device has less than was agreed: slabs are not closed yet.
            self._own_bytes += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """Account for an allocation that has been freed."""
        with self._lock:
            self._memory.give_back(nbytes)
            self._own_bytes -= nbytes

    def step_ended(self) -> None:
        """Do nothing: every allocation is counted."""

    def shrink(self, nbytes: int) -> int:
        """Allow no allocation beyond what is to stay, and give up what is not in use already."""
        with self._lock:
            self._target_bytes = max(self._least_bytes, self._limit_bytes - nbytes)
            given = max(0, self._limit_bytes - max(self._target_bytes, self._own_bytes))
            self._limit_bytes -= given
            return given

    def grow(self, nbytes: int) -> None:
        """Use `nbytes` given up before again."""
        with self._lock:
            self._limit_bytes += nbytes
            self._target_bytes = self._limit_bytes
