"""Producer adapter for any torch program that works in steps: image and audio pipelines first.

    loop = TorchLoop(CudaMemoryLimit(device), queue_length=lambda: len(requests))
    with Producer(...) as producer, Informer(producer, loop, profile):
        pipeline(prompt, callback_on_step_end=loop.on_step_end)      # diffusers
        model.generate(**prompt, stopping_criteria=[loop.on_token])  # transformers

Such a program allocates while a step runs and frees when it ends, so memory that is unused between
two steps is not spare: the next one wants it. What is spare is what the highest of the recent steps
left over. The callback measures that at the end of every step; shrinking and growing then move a
limit that stays above the recent peak, and may happen at any time, on the informer's thread.

On a GPU the limit is torch's own: the allocator gives cached memory back to the driver and fails
beyond `set_per_process_memory_fraction`. Slabs are not made by torch's allocator and do not count
against it. On a CPU, `aqualib.engines.cpu_memory` counts tensors and refuses alike. A program that
asks before it allocates is limited by the answer, and gives up gradually what it still uses.

Not promised: that a step which needs more than any recent one succeeds while memory is lent. It
fails with torch's out-of-memory error, as it would on a smaller GPU.

Source: Aqua section 6, the northbound interface; the paper's producers report through patches of
their engines.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from aqua_protocol import MIB, ConfigError, TransportError
from aqualib.producer.offer_rule import ObservedLoad

if TYPE_CHECKING:
    import torch
    from jaxtyping import Bool, Int64

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
        arrived_count: Requests that have ever arrived, which says more than a rate; likewise.

    Attributes:
        on_step: Called with the duration of each step, in seconds, and its kind, of which there is
            one, on the loop's thread; the informer's.
        shrink, grow: The limit's, on the informer's thread.
    """

    def __init__(
        self,
        limit: PeakMemoryLimit | CountedMemoryLimit,
        *,
        queue_length: Callable[[], int],
        requests_per_s: Callable[[], float] | None = None,
        arrived_count: Callable[[], int] | None = None,
    ) -> None:
        self._limit = limit
        self.on_step: Callable[[float, str], None] | None = None
        self._last_end_s: float | None = None
        self.shrink: Final = limit.shrink
        self.grow: Final = limit.grow
        self._queue_length = queue_length
        self._requests_per_s = requests_per_s
        self._arrived_count = arrived_count

    def step_ended(self) -> None:
        """Call it at the end of every step, on the loop's thread."""
        self._limit.step_ended()
        now_s, before_s = time.perf_counter(), self._last_end_s
        self._last_end_s = now_s
        if self.on_step is not None and before_s is not None:
            self.on_step(now_s - before_s, "")

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

    def on_token(
        self,
        input_ids: Int64[torch.Tensor, "sequences tokens"],
        scores: object,
        **_: object,
    ) -> Bool[torch.Tensor, " sequences"]:
        """Serve transformers' `generate` as one of its `stopping_criteria`; stops nothing."""
        del scores
        self.step_ended()
        return input_ids.new_zeros(len(input_ids)).bool()

    def load(self) -> ObservedLoad:
        """The load now; what this process stores as a consumer is swap of the program's."""
        from aqualib.consumer import stored_bytes

        return ObservedLoad(
            queue_length=self._queue_length(),
            memory_used_bytes=self._limit.used_bytes,
            memory_total_bytes=self._limit.total_bytes,
            requests_per_s=None if self._requests_per_s is None else self._requests_per_s(),
            arrived_count=None if self._arrived_count is None else self._arrived_count(),
            swapped_bytes=stored_bytes(),
        )


class PeakMemoryLimit(ABC):
    """A limit on a torch program's memory, `headroom_bytes` above its recent peak; thread-safe.

    Args:
        limit_bytes: What the program may take before anything is lent.
        total_bytes: Memory of the device.
        headroom_bytes: Never lent.
    """

    def __init__(self, limit_bytes: int, total_bytes: int, headroom_bytes: int) -> None:
        self.total_bytes: Final = total_bytes
        self.limit_bytes = limit_bytes  # What the program may take now.
        self._headroom_bytes = headroom_bytes
        self._peaks: deque[int] = deque(maxlen=RECENT_STEPS)
        self._lock = threading.RLock()

    @property
    def used_bytes(self) -> int:
        """The recent peak, and whatever on the device is not the program's: slabs, others."""
        with self._lock:
            return min(self.total_bytes, self._elsewhere_bytes() + self._peak_bytes())

    def step_ended(self) -> None:
        """Note the peak since the last step ended."""
        with self._lock:
            self._peaks.append(self._take_peak_bytes())

    def shrink(self, nbytes: int) -> int:
        """Lower the limit, at most to the recent peak and the headroom."""
        with self._lock:
            spare = self.limit_bytes - self._peak_bytes() - self._headroom_bytes
            given = max(0, min(nbytes, spare))
            self.limit_bytes -= given
            self._limit_moved()
            return given

    def grow(self, nbytes: int) -> None:
        """Raise the limit."""
        with self._lock:
            self.limit_bytes += nbytes
            self._limit_moved()

    def _peak_bytes(self) -> int:
        return max([self._own_bytes(), *self._peaks])

    @abstractmethod
    def _own_bytes(self) -> int:
        """What the program has now."""

    @abstractmethod
    def _elsewhere_bytes(self) -> int:
        """What others have."""

    @abstractmethod
    def _take_peak_bytes(self) -> int:
        """The program's peak; the next one is counted from now."""

    @abstractmethod
    def _limit_moved(self) -> None:
        """Enforce `limit_bytes`."""


class CudaMemoryLimit(PeakMemoryLimit):
    """A limit on a GPU's caching allocator in torch; what is cached above it is freed.

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
                remedy="Use CpuMemoryLimit; or CountedMemoryLimit, if the program asks before it "
                "allocates.",
            )
        self._cuda = torch.cuda
        self._device = device
        # What torch may hold: all that it holds now, and all that is free.
        free, total = torch.cuda.mem_get_info(device)
        super().__init__(torch.cuda.memory_reserved(device) + free, total, headroom_bytes)

    def _own_bytes(self) -> int:
        return self._cuda.memory_allocated(self._device)

    def _elsewhere_bytes(self) -> int:
        free, total = self._cuda.mem_get_info(self._device)
        return total - free - self._cuda.memory_reserved(self._device)

    def _take_peak_bytes(self) -> int:
        peak_bytes = self._cuda.max_memory_allocated(self._device)
        self._cuda.reset_peak_memory_stats(self._device)
        return peak_bytes

    def _limit_moved(self) -> None:
        fraction = min(1.0, self.limit_bytes / self.total_bytes)
        self._cuda.set_per_process_memory_fraction(fraction, self._device)
        self._cuda.empty_cache()


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
