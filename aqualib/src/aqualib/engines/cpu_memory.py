"""The memory of a torch program on a CPU: tensors are counted as they are made, and refused.

    memory = EmulatedMemory(64 << 20)
    with CpuMemoryLimit(memory) as limit:
        pipeline = StableDiffusionPipeline.from_pretrained(...)
        loop = TorchLoop(limit, queue_length=lambda: len(requests))

A CPU has no allocator that could be limited, so a machine without a GPU would need a program that
asks before it allocates. This does it for programs of others, as they are: torch tells a dispatch
mode of every operation, and a tensor that does not fit is an out-of-memory error, as on a GPU.

Counted is what is made within the context and on its thread. Not counted: workspaces inside of an
operation, and fragmentation.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from aqua_protocol import TransportError, format_bytes
from aqualib.engines.torch_loop import PeakMemoryLimit

if TYPE_CHECKING:
    from collections.abc import Callable

    from aqualib.producer.device import EmulatedMemory


class CpuMemoryLimit(PeakMemoryLimit):
    """A limit on the tensors that one thread makes; a context manager on that thread.

    What is made does not fit if it exceeds `limit_bytes`, or what `memory`, which the program
    shares with its slabs, has left: `torch.OutOfMemoryError`.
    """

    def __init__(self, memory: EmulatedMemory, *, headroom_bytes: int = 0) -> None:
        limit_bytes = memory.total_bytes - memory.used_bytes
        super().__init__(limit_bytes, memory.total_bytes, headroom_bytes)
        self._memory = memory
        self._counted_bytes = 0
        self._highest_bytes = 0
        self._storages: set[int] = set()
        # A tensor may be freed in the middle of anything, this class included: only noted there.
        self._freed: deque[int] = deque()
        self._mode = _EveryResult(self._made)

    def __enter__(self) -> Self:
        self._mode.__enter__()  # type: ignore[no-untyped-call] # torch does not type its modes
        return self

    def __exit__(self, *error: object) -> None:
        self._mode.__exit__(*error)  # type: ignore[no-untyped-call] # likewise

    def _made(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if tensor.device.type != "cpu" or id(storage) in self._storages:
            return
        nbytes = storage.nbytes()
        with self._lock:
            if self._own_bytes() + nbytes > self.limit_bytes:
                raise torch.OutOfMemoryError(
                    f"CPU out of memory: {format_bytes(nbytes)} wanted, "
                    f"{format_bytes(self._counted_bytes)} of {format_bytes(self.limit_bytes)} taken"
                )
            try:
                self._memory.take(nbytes)
            except TransportError as error:  # Slabs are not closed yet.
                raise torch.OutOfMemoryError(str(error)) from error
            self._counted_bytes += nbytes
            self._highest_bytes = max(self._highest_bytes, self._counted_bytes)
        # torch keeps the Python object of a storage as long as the storage itself.
        self._storages.add(id(storage))
        weakref.finalize(storage, self._gone, id(storage), nbytes).atexit = False

    def _gone(self, storage_id: int, nbytes: int) -> None:
        self._storages.discard(storage_id)
        self._freed.append(nbytes)

    def _own_bytes(self) -> int:
        while self._freed:
            nbytes = self._freed.popleft()
            self._counted_bytes -= nbytes
            self._memory.give_back(nbytes)
        return self._counted_bytes

    def _elsewhere_bytes(self) -> int:
        own_bytes = self._own_bytes()
        return self._memory.used_bytes - own_bytes

    def _take_peak_bytes(self) -> int:
        peak_bytes, self._highest_bytes = self._highest_bytes, self._own_bytes()
        return peak_bytes

    def _limit_moved(self) -> None:
        """Nothing to do: every tensor asks."""


class _EveryResult(TorchDispatchMode):  # type: ignore[no-untyped-call] # likewise
    """Tells of every tensor that an operation returns."""

    def __init__(self, tell: Callable[[torch.Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # likewise
        self._tell = tell

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operation returns
        del types
        made = func(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._tell, made)
        return made
