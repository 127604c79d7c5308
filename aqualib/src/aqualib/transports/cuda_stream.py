"""Streams and events of our own, by the driver.

A stream here waits for no other by itself, the default one least of all, which an engine may keep
full. What must come before its work is said by an event. Streams and events go back to the driver
when they are collected; work that is queued still runs.

Priority only decides between kernels that wait for the same processors: those that an engine waits
for go before those in the background. Copy engines do not look at it.

Source: CUDA Driver API, "Stream Management" and "Event Management".
"""

from __future__ import annotations

import weakref
from ctypes import byref, c_int, c_void_p
from typing import TYPE_CHECKING, Final

from aqualib.transports.cuda_abi import EVENT_DISABLE_TIMING, STREAM_NON_BLOCKING

if TYPE_CHECKING:
    from aqualib.transports.cuda_driver import CudaDevice


class CudaEvent:
    """A point in a stream that other streams, and the host, can wait for; none until `record`."""

    def __init__(self, gpu: CudaDevice) -> None:
        self._gpu = gpu
        handle = c_void_p()
        gpu.call("cuEventCreate", byref(handle), EVENT_DISABLE_TIMING)
        self._handle = handle.value
        close = weakref.finalize(self, gpu.call, "cuEventDestroy_v2", self._handle)
        close.atexit = False  # The driver may have gone by then.

    def record(self, stream: int) -> None:
        """Mean what the stream has been given so far; 0 is the default stream."""
        self._gpu.call("cuEventRecord", self._handle, stream)

    def hold_back(self, stream: int) -> None:
        """Order what the stream is given from now on after the event."""
        self._gpu.call("cuStreamWaitEvent", stream, self._handle, 0)

    def synchronize(self) -> None:
        """Have the host wait for the event."""
        self._gpu.call("cuEventSynchronize", self._handle)


class CudaStream:
    """A stream of one GPU.

    Args:
        is_background: Whether its kernels give way to everyone's, or go before.
    """

    def __init__(self, gpu: CudaDevice, *, is_background: bool) -> None:
        self._gpu = gpu
        self._follows = CudaEvent(gpu)
        least, greatest, handle = c_int(), c_int(), c_void_p()
        gpu.call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        priority = least.value if is_background else greatest.value
        gpu.call("cuStreamCreateWithPriority", byref(handle), STREAM_NON_BLOCKING, priority)
        assert handle.value is not None, "the driver made no stream"
        self.handle: Final = handle.value
        close = weakref.finalize(self, gpu.call, "cuStreamDestroy_v2", self.handle)
        close.atexit = False  # The driver may have gone by then.

    def follow(self, other: int) -> None:
        """Order what comes after all that the `other` stream has been given so far."""
        self._follows.record(other)
        self._follows.hold_back(self.handle)

    def synchronize(self) -> None:
        """Have the host wait for everything in the stream."""
        self._gpu.call("cuStreamSynchronize", self.handle)
