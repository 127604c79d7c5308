"""The CUDA driver's binary interface, as far as we call it: constants, structures, prototypes.

The layouts are those of cuda.h, equal in CUDA 12.8 and 13.0; a test compares them with the
compiler's. What is done with them is the affair of `cuda_driver`.

Source: CUDA Driver API, "Virtual Memory Management" and "Driver Entry Point Access".
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import Final

# Values of enumerations, fixed by cuda.h.
SUCCESS: Final = 0
ALLOCATION_TYPE_PINNED: Final = 1
LOCATION_TYPE_DEVICE: Final = 1
HANDLE_TYPE_POSIX_FD: Final = 1
ACCESS_READ: Final = 1
ACCESS_READ_WRITE: Final = 3
GRANULARITY_MINIMUM: Final = 0
ATTRIBUTE_READS_REGISTERED: Final = 91
ATTRIBUTE_VIRTUAL_MEMORY: Final = 102
ATTRIBUTE_POSIX_FD_HANDLES: Final = 103
ATTRIBUTE_RDMA: Final = 110
ATTRIBUTE_HOST_NODE: Final = 134
STREAM_NON_BLOCKING: Final = 1
HOST_REGISTER_PORTABLE: Final = 1
COPY_IN_STREAM_ORDER: Final = 1
EVENT_DISABLE_TIMING: Final = 2
CAPTURE_MODE_RELAXED: Final = 2


class MemLocation(ctypes.Structure):
    """`CUmemLocation`: where memory is, or who may access it."""

    _fields_ = (("type", c_int), ("id", c_int))


class MemAllocationFlags(ctypes.Structure):
    """The unnamed structure at the end of `CUmemAllocationProp`; all zero for us."""

    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class MemAllocationProp(ctypes.Structure):
    """`CUmemAllocationProp`: what kind of memory to allocate."""

    _fields_ = (
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", MemLocation),
        ("win32_handle_meta_data", c_void_p),
        ("alloc_flags", MemAllocationFlags),
    )


class MemAccessDesc(ctypes.Structure):
    """`CUmemAccessDesc`: who may do what with a mapping."""

    _fields_ = (("location", MemLocation), ("flags", c_int))


class MemcpyAttributes(ctypes.Structure):
    """`CUmemcpyAttributes`: how the copies of a batch may be ordered."""

    _fields_ = (
        ("src_access_order", c_int),
        ("src_loc_hint", MemLocation),
        ("dst_loc_hint", MemLocation),
        ("flags", c_uint),
    )


class Uuid(ctypes.Structure):
    """`CUuuid`: 16 raw bytes."""

    _fields_ = (("bytes", ctypes.c_ubyte * 16),)


BATCH_COPY_VERSION: Final = 12080
"""CUDA version whose `cuMemcpyBatchAsync` we call: the first. Fixed by the arguments of
`BATCH_COPY`: CUDA 13 dropped one, but its drivers still serve this version when asked for it."""

BATCH_COPY: Final = ctypes.CFUNCTYPE(
    c_int,
    *(c_void_p, c_void_p, c_void_p, c_size_t),
    *(POINTER(MemcpyAttributes), POINTER(c_size_t), c_size_t),
    *(POINTER(c_size_t), c_void_p),
)
"""Destinations, sources, sizes and their count; attributes, the first copy of each and their count;
which copy failed; stream."""

PROTOTYPES: Final[dict[str, tuple[object, ...]]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetProcAddress_v2": (c_char_p, POINTER(c_void_p), c_int, c_uint64, POINTER(c_int)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceGetUuid_v2": (POINTER(Uuid), c_int),
    "cuDeviceCanAccessPeer": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuCtxGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(MemAllocationProp), c_int),
    "cuMemGetAllocationPropertiesFromHandle": (POINTER(MemAllocationProp), c_ulonglong),
    "cuMemCreate": (POINTER(c_ulonglong), c_size_t, POINTER(MemAllocationProp), c_ulonglong),
    "cuMemRelease": (c_ulonglong,),
    "cuMemExportToShareableHandle": (c_void_p, c_ulonglong, c_int, c_ulonglong),
    "cuMemImportFromShareableHandle": (POINTER(c_ulonglong), c_void_p, c_int),
    "cuMemAddressReserve": (POINTER(c_ulonglong), c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemAddressFree": (c_ulonglong, c_size_t),
    "cuMemMap": (c_ulonglong, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemUnmap": (c_ulonglong, c_size_t),
    "cuMemSetAccess": (c_ulonglong, c_size_t, POINTER(MemAccessDesc), c_size_t),
    "cuMemcpyAsync": (c_ulonglong, c_ulonglong, c_size_t, c_void_p),
    "cuMemsetD8Async": (c_ulonglong, ctypes.c_ubyte, c_size_t, c_void_p),
    "cuMemHostRegister_v2": (c_void_p, c_size_t, c_uint),
    "cuMemHostUnregister": (c_void_p,),
    "cuStreamCreateWithPriority": (POINTER(c_void_p), c_uint, c_int),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventDestroy_v2": (c_void_p,),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuStreamSynchronize": (c_void_p,),
}
