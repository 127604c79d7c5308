"""Device memory while something runs: from NVML, from torch, or from the program's own account.

A meter yields the highest use since it was last reset, for what is free between two peaks is not
spare. NVML sees every process on the device, so it also measures a server; it is polled, and what
rises and falls between two looks stays unseen. torch sees its own allocator exactly, and only that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import httpx

from aqua_profiler.errors import MeterUnavailableError
from aqua_protocol.supervision import SupervisedThread, resting

POLL_S: Final = 0.005
"""Seconds between two looks of NVML, which take 0.1 ms each; twice as many miss shorter peaks."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A device's memory: the highest use since the last `reset`, and all of it."""

    used_bytes: int
    total_bytes: int

    @property
    def free_bytes(self) -> int:
        """What was never used."""
        return max(0, self.total_bytes - self.used_bytes)


class MemoryMeter:
    """Reads a device's memory; as it is, from a source that forgets old peaks by itself.

    Args:
        name: For the profile.
        tell: Returns the highest use since `reset`, and all memory, in bytes.
    """

    def __init__(self, name: str, tell: Callable[[], tuple[int, int]]) -> None:
        self.name = name
        self._tell = tell

    def read(self) -> MemoryUse:
        """The highest use since `reset`."""
        return MemoryUse(*self._tell())

    def reset(self) -> None:
        """Forget the highest use."""

    def close(self) -> None:
        """Stop reading the device's memory."""


class TorchMeter(MemoryMeter):
    """torch's allocator in this process, with what others hold on the device.

    Raises:
        MeterUnavailableError: torch sees no GPU.
    """

    def __init__(self, device: int) -> None:
        super().__init__("torch", self._look)
        try:
            import torch
        except ImportError as error:
            raise MeterUnavailableError("torch is not installed") from error
        if not torch.cuda.is_available():
            raise MeterUnavailableError("torch sees no GPU")
        self._cuda: Any = torch.cuda
        self._device = device

    def reset(self) -> None:
        """Forget the highest use."""
        self._cuda.synchronize(self._device)
        self._cuda.reset_peak_memory_stats(self._device)

    def _look(self) -> tuple[int, int]:
        self._cuda.synchronize(self._device)
        free, total = self._cuda.mem_get_info(self._device)
        elsewhere = total - free - self._cuda.memory_reserved(self._device)
        peak = self._cuda.max_memory_allocated(self._device)
        return min(total, int(elsewhere + peak)), int(total)


class NvmlMeter(MemoryMeter):
    """The whole device, polled on a thread.

    Raises:
        MeterUnavailableError: No NVML, or no such device.
    """

    def __init__(self, device: int) -> None:
        super().__init__("nvml", self._look)
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByIndex(device)
        except Exception as error:  # its own errors, or the loader's: all mean the same
            raise MeterUnavailableError(f"NVML cannot be used: {error}") from error
        self._nvml: Any = pynvml
        self._peak = 0
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = SupervisedThread(self._poll, "aqua-nvml")
        self._thread.start()

    def _poll(self) -> None:
        while True:
            with resting():
                if self._done.wait(POLL_S):
                    return
            self._look()

    def _look(self) -> tuple[int, int]:
        info = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        with self._lock:
            self._peak = max(self._peak, int(info.used))
            return self._peak, int(info.total)

    def reset(self) -> None:
        """Forget the highest use."""
        with self._lock:
            self._peak = 0

    def close(self) -> None:
        """Stop reading the device's memory."""
        self._done.set()
        self._thread.join()


def url_meter(url: str) -> MemoryMeter:
    """Asks a server that answers JSON with `used_bytes` and `total_bytes`."""

    def tell() -> tuple[int, int]:
        try:
            said = httpx.get(url, timeout=10.0, follow_redirects=True, trust_env=False).json()
            return int(said["used_bytes"]), int(said["total_bytes"])
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise MeterUnavailableError(
                f"{url} does not tell its memory: {error}",
                remedy="Answer JSON with used_bytes and total_bytes.",
            ) from error

    return MemoryMeter("url", tell)


def meter_for(program: Any, device: int) -> MemoryMeter:  # noqa: ANN401 - as above
    """The best meter: the program's own, torch in this process, NVML beside a server.

    Raises:
        MeterUnavailableError: None works here.
    """
    if hasattr(program, "used_bytes") and hasattr(program, "total_bytes"):
        return MemoryMeter("emulated", lambda: (int(program.used_bytes), int(program.total_bytes)))
    if not getattr(program, "is_remote", False):
        try:
            return TorchMeter(device)
        except MeterUnavailableError:
            pass
    return NvmlMeter(device)
