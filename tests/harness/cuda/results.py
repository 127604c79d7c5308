"""What the driver answers: values of `CUresult`, and their names."""

from __future__ import annotations

from typing import Final

NAME: Final = "stand-in, no GPU"
"""What the GPUs of a machine that is not there are called."""

SUCCESS: Final = 0
INVALID_VALUE: Final = 1
OUT_OF_MEMORY: Final = 2
NO_DEVICE: Final = 100
INVALID_DEVICE: Final = 101
INVALID_CONTEXT: Final = 201
INVALID_HANDLE: Final = 400
NOT_FOUND: Final = 500
NOT_READY: Final = 600
CAPTURE_UNSUPPORTED: Final = 900

ERRORS: Final = {
    INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
    OUT_OF_MEMORY: b"CUDA_ERROR_OUT_OF_MEMORY",
    NO_DEVICE: b"CUDA_ERROR_NO_DEVICE",
    INVALID_DEVICE: b"CUDA_ERROR_INVALID_DEVICE",
    INVALID_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT",
    INVALID_HANDLE: b"CUDA_ERROR_INVALID_HANDLE",
    NOT_READY: b"CUDA_ERROR_NOT_READY",
    CAPTURE_UNSUPPORTED: b"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
}

CONTEXT: Final = 0x1000
"""Handle of the primary context of GPU 0."""
