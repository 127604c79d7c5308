"""The order between an engine's kernels and what is loaded or saved beside them.

Blocks that are to be loaded may have been another request's until a moment ago, and kernels that
read or write them may still be queued; those that write what is to be saved may be, too. So a load
or a save begins with a mark on the engine's stream, made on the engine's thread; what the other
thread launches comes after the mark, on a stream of its own, and has ended before the load counts
as arrived, or the save as acknowledged. The engine's stream waits for nothing.

On a CPU everything is done when its call returns, and none of this does anything.

Source: vLLM issues 45357 and 50696, two connectors that lacked the first half.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

import torch

from aqualib.transports.cuda_copier import on_stream

if TYPE_CHECKING:
    from collections.abc import Iterator

URGENT: Final = -1
"""Priority in torch's terms, where lower goes first, of what requests wait for. CUDA's levels go
from 0 to -5, and engines use 0, as does what no request waits for. Doubled, loads go before other
urgent work as well."""


class SideStream:
    """The stream of one thread beside the engine's, which makes it.

    Args:
        device: The engine's.
        is_urgent: Whether requests wait for what is launched there.
    """

    def __init__(self, device: torch.device, *, is_urgent: bool) -> None:
        self._device = device
        self._stream: Any = None
        if device.type == "cuda":
            priority = URGENT if is_urgent else 0
            self._stream = torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call] # torch's

    def mark(self) -> Any:
        """What the calling thread's stream has been given so far; for `after`."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._device).record_event()

    @contextlib.contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        """Launch within the block what comes after the mark; all has ended when the block has."""
        if self._stream is None:
            yield
            return
        with on_stream(self._stream):
            self._stream.wait_event(mark)
            try:
                yield
            finally:
                self._stream.synchronize()
