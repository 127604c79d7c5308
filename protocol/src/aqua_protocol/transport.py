"""Names of the ways to share memory, and what crosses the wire about a shared slab."""

from __future__ import annotations

from enum import StrEnum


class TransportKind(StrEnum):
    """How a slab is shared between two processes."""

    MEMFD = "memfd"
    """Anonymous host memory behind a file descriptor: CPU machines, tests, the demo."""
    CUDA_VMM = "cuda_vmm"
    """CUDA virtual memory management with POSIX descriptors: the primary path on GPUs."""
    CUDA_IPC = "cuda_ipc"
    """Legacy CUDA IPC handles: drivers and containers without VMM export."""
