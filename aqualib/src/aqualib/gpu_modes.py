"""Ways in which a GPU is shared that change what lending can do: MIG slices, and MPS.

A *MIG* slice reaches no other slice and no other GPU, so it lends to processes on itself only.
Under *MPS* the processes of a GPU share one context in a server: a client that is killed with work
in flight may take the others with it, which is more than a producer may decide.

Source: NVIDIA, "Multi-Instance GPU User Guide"; "Multi-Process Service", "Client Termination".
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

MPS_DIRECTORY_VARIABLE: Final = "CUDA_MPS_PIPE_DIRECTORY"
MPS_DIRECTORY: Final = Path("/tmp/nvidia-mps")  # noqa: S108 - the daemon's own default


def is_under_mps() -> bool:
    """Whether CUDA programs of this process's environment are clients of an MPS daemon."""
    directory = os.environ.get(MPS_DIRECTORY_VARIABLE)
    return ((Path(directory) if directory else MPS_DIRECTORY) / "control").exists()


def gpus_in_slices() -> list[str]:
    """UUIDs of the GPUs that NVML says are cut into MIG slices; none where there is no NVML."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [pynvml.nvmlDeviceGetUUID(handle) for handle in handles if _is_cut(pynvml, handle)]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _is_cut(nvml: Any, handle: Any) -> bool:  # noqa: ANN401 - pynvml has no types
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # Most GPUs have no such mode.
        return False
    return bool(current)
