"""The CUDA driver calls that lending device memory needs, over ctypes.

Owns the loaded library, error names, and one `CudaDevice` per GPU that makes the primary context
current around every call, so that any thread may use it and no thread's own context changes. It
decides nothing about slabs; see `cuda_vmm` and `cuda_copier`. Layouts are in `cuda_abi`.

Why ctypes: torch builds disagree on which cuda-bindings they tolerate (2.10 pins 12.9, 2.11 wants
13), CuPy has no virtual memory calls, and these prototypes are less than either dependency.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_ulonglong, c_void_p
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from aqua_protocol import TransportError, TransportUnavailableError, format_bytes
from aqualib.transports.cuda_abi import (
    ACCESS_READ,
    ACCESS_READ_WRITE,
    ALLOCATION_TYPE_PINNED,
    ATTRIBUTE_HOST_NODE,
    ATTRIBUTE_POSIX_FD_HANDLES,
    ATTRIBUTE_RDMA,
    ATTRIBUTE_READS_REGISTERED,
    ATTRIBUTE_VIRTUAL_MEMORY,
    BATCH_COPY,
    BATCH_COPY_VERSION,
    CAPTURE_MODE_RELAXED,
    COPY_IN_STREAM_ORDER,
    GRANULARITY_MINIMUM,
    HANDLE_TYPE_POSIX_FD,
    HOST_REGISTER_PORTABLE,
    LOCATION_TYPE_DEVICE,
    PROTOTYPES,
    SUCCESS,
    MemAccessDesc,
    MemAllocationProp,
    MemcpyAttributes,
    MemLocation,
    Uuid,
)
from aqualib.transports.cuda_buffers import StagingPool
from aqualib.transports.cuda_stream import CudaStream
from aqualib.transports.gpu_thresholds import thresholds_of

Words = npt.NDArray[np.uint64]
"""Addresses or sizes, laid out as the driver reads them."""

LIBRARY: Final = "libcuda.so.1"

NAME_BYTES: Final = 256
"""Bytes of room for a GPU's name, the end included: what NVIDIA's own tools allow. Doubled, nothing
changes."""


def load_library(name: str = LIBRARY) -> Any:  # noqa: ANN401 - what ctypes makes has no members
    """The driver's library, by path or soname: functions by the names of `PROTOTYPES`.

    All that Aqua asks of a driver goes through these, so that a stand-in for it needs no compiler.

    Raises:
        TransportUnavailableError: It is not there, or lacks a call that we need.
    """
    try:
        library = ctypes.CDLL(name)
        for call_name, arguments in PROTOTYPES.items():
            call = getattr(library, call_name)
            call.argtypes = arguments
            call.restype = c_int
    except OSError as error:
        raise TransportUnavailableError(
            f"the CUDA driver cannot be loaded: {error}",
            remedy="Install the NVIDIA driver; in a container, run with GPU access "
            "(`--gpus all`, or the NVIDIA runtime class).",
        ) from error
    except AttributeError as error:
        raise TransportUnavailableError(
            f"the CUDA driver is too old: {error}",
            remedy="Install driver 525 (CUDA 12.0) or newer.",
        ) from error
    return library


class CudaError(TransportError):
    """A driver call failed; `details` name the call and the driver's word for it."""

    code = "cuda_failed"


class CudaDriver:
    """The initialised driver library.

    Args:
        library: From `load_library`, or functions of the same names that take what ctypes takes.

    Raises:
        TransportUnavailableError: No driver, no device, or a driver that lacks a call we need.
    """

    def __init__(self, library: Any = None) -> None:  # noqa: ANN401 - as above
        self._library = load_library() if library is None else library
        try:
            self.call("cuInit", 0)
            self.device_count = self.read_int("cuDeviceGetCount")
        except CudaError as error:
            raise TransportUnavailableError(
                f"CUDA does not start: {error.message}",
                remedy="Check that `nvidia-smi` lists a GPU and that CUDA_VISIBLE_DEVICES "
                "does not hide it.",
            ) from error
        self.batch_copy = self._find_batch_copy()
        self._devices: dict[int, CudaDevice] = {}
        self._lock = threading.Lock()

    @property
    def version(self) -> int:
        """CUDA version of the driver, as 1000 * major + 10 * minor."""
        return self.read_int("cuDriverGetVersion")

    def uuid_of(self, ordinal: int) -> str:
        """The name of a visible GPU, which needs no context on it."""
        raw = Uuid()
        self.call("cuDeviceGetUuid_v2", byref(raw), self.read_int("cuDeviceGet", ordinal))
        return f"GPU-{uuid.UUID(bytes=bytes(raw.bytes))}"

    def name_of(self, ordinal: int) -> str:
        """What the vendor calls this kind of GPU, which needs no context on it."""
        text = ctypes.create_string_buffer(NAME_BYTES)
        self.call("cuDeviceGetName", text, NAME_BYTES, self.read_int("cuDeviceGet", ordinal))
        return text.value.decode(errors="replace")

    def device(self, ordinal: int) -> CudaDevice:
        """The GPU with this ordinal among the visible ones; one object per GPU.

        Raises:
            TransportUnavailableError: No such GPU.
            CudaError: Its context cannot be made.
        """
        if not 0 <= ordinal < self.device_count:
            raise TransportUnavailableError(
                f"there is no cuda:{ordinal} among {self.device_count} visible devices",
                remedy="Choose a smaller device number, or widen CUDA_VISIBLE_DEVICES.",
            )
        with self._lock:
            if ordinal not in self._devices:
                self._devices[ordinal] = CudaDevice(self, ordinal)
            return self._devices[ordinal]

    def call(self, name: str, *arguments: object) -> None:
        """Call the driver, without the GIL.

        Raises:
            CudaError: The result was not success.
        """
        self.require(name, getattr(self._library, name)(*arguments))

    def read_int(self, name: str, *arguments: object) -> int:
        """Call a function whose first argument is an `int *` for its result."""
        value = c_int()
        self.call(name, byref(value), *arguments)
        return value.value

    def require(self, name: str, result: int) -> None:
        """Raise `CudaError` unless `result` is success."""
        if result != SUCCESS:
            text = c_char_p()
            known = self._library.cuGetErrorName(result, byref(text)) == SUCCESS and text.value
            word = known.decode() if known else f"CUresult {result}"
            raise CudaError(f"{name} failed: {word}", call=name, result=word, result_code=result)

    def _find_batch_copy(self) -> Callable[..., int] | None:
        address, status = c_void_p(), c_int()
        result = self._library.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync", byref(address), BATCH_COPY_VERSION, 0, byref(status)
        )
        # A driver without the symbol answers with success and no address, or with not found.
        return BATCH_COPY(address.value) if result == SUCCESS and address.value else None


@functools.cache
def load_driver() -> CudaDriver:
    """The system's driver, loaded once.

    Raises:
        TransportUnavailableError: See `CudaDriver`; asked again, it tries again.
    """
    return CudaDriver()


class CudaDevice:
    """One GPU, by the primary context that torch uses too.

    The context is retained for the life of the process: torch keeps it anyway, and releasing it
    under live mappings would be a crash.

    Attributes:
        thresholds: Where copies change their route; measured on this kind of GPU, or the defaults.
    """

    def __init__(self, driver: CudaDriver, ordinal: int) -> None:
        self.driver = driver
        self.ordinal = ordinal
        self._device = driver.read_int("cuDeviceGet", ordinal)
        context = c_void_p()
        driver.call("cuDevicePrimaryCtxRetain", byref(context), self._device)
        self._context = context
        self._prop = MemAllocationProp(
            type=ALLOCATION_TYPE_PINNED,
            requested_handle_types=HANDLE_TYPE_POSIX_FD,
            location=MemLocation(LOCATION_TYPE_DEVICE, ordinal),
        )
        # Network cards, NIXL's among them, register only memory that was made for it.
        self._prop.alloc_flags.gpu_direct_rdma_capable = self._has(ATTRIBUTE_RDMA)
        self.uuid: Final = driver.uuid_of(ordinal)
        self.thresholds = thresholds_of(driver.name_of(ordinal))
        self._stream = self.make_stream(is_background=True)
        self.staging: Final = StagingPool(self)

    @property
    def shares_by_descriptor(self) -> bool:
        """Whether memory can be mapped by hand and exported as a POSIX descriptor."""
        return self._has(ATTRIBUTE_VIRTUAL_MEMORY) and self._has(ATTRIBUTE_POSIX_FD_HANDLES)

    @property
    def granularity(self) -> int:
        """Every allocation and mapping is a multiple of this many bytes: 2 MiB so far."""
        size = c_size_t()
        self.driver.call(
            "cuMemGetAllocationGranularity", byref(size), byref(self._prop), GRANULARITY_MINIMUM
        )
        return size.value

    @property
    def reads_registered_memory(self) -> bool:
        """Whether kernels reach pinned host memory by the address that the host uses."""
        return self._has(ATTRIBUTE_READS_REGISTERED)

    @property
    def host_node(self) -> int | None:
        """The NUMA node nearest to this GPU; None where there are none, or the driver is old."""
        with contextlib.suppress(CudaError):
            node = self.driver.read_int("cuDeviceGetAttribute", ATTRIBUTE_HOST_NODE, self._device)
            return node if node >= 0 else None
        return None

    def can_access(self, peer_ordinal: int) -> bool:
        """Whether this GPU reaches the memory of that one, over NVLink or PCIe."""
        if peer_ordinal == self.ordinal:
            return True
        return bool(self.driver.read_int("cuDeviceCanAccessPeer", self._device, peer_ordinal))

    def allocate(self, nbytes: int) -> int:
        """Physical memory on this GPU, in no address space yet; a handle to `release`.

        Raises:
            CudaError: Out of memory, or not a multiple of the granularity.
        """
        return self._read_word("cuMemCreate", nbytes, byref(self._prop), 0)

    def release(self, handle: int) -> None:
        """Drop a handle. Mappings and exported descriptors keep the memory."""
        self.call("cuMemRelease", handle)

    def export_fd(self, handle: int) -> int:
        """A descriptor of the memory behind `handle`, closed on exec, owned by the caller."""
        fd = c_int(-1)
        self.call("cuMemExportToShareableHandle", byref(fd), handle, HANDLE_TYPE_POSIX_FD, 0)
        fcntl.fcntl(fd.value, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
        return fd.value

    def import_fd(self, fd: int) -> int:
        """A handle to the memory behind a descriptor, which stays the caller's."""
        # The interface passes the descriptor itself in the pointer.
        return self._read_word("cuMemImportFromShareableHandle", fd, HANDLE_TYPE_POSIX_FD)

    def home_of(self, handle: int) -> int:
        """Ordinal, among the GPUs visible here, of the GPU that holds the memory."""
        prop = MemAllocationProp()
        self.driver.call("cuMemGetAllocationPropertiesFromHandle", byref(prop), handle)
        return int(prop.location.id)

    def map(self, handle: int, nbytes: int) -> int:
        """Map memory where this GPU can read and write it; the address, to `unmap`.

        The mapping keeps the memory; the handle may be released.

        Raises:
            CudaError: The memory has another size, or this GPU cannot reach it.
        """
        address = self.reserve(nbytes)
        try:
            self.map_at(address, handle, nbytes)
        except CudaError:
            self.free_reserved(address, nbytes)
            raise
        return address

    def unmap(self, address: int, nbytes: int) -> None:
        """Take a mapping out of the address space; no copy or kernel may be using it."""
        self.unmap_at(address, nbytes)
        self.free_reserved(address, nbytes)

    def reserve(self, nbytes: int) -> int:
        """Addresses with nothing behind them yet; to `free_reserved`.

        Raises:
            CudaError: Not a multiple of the granularity.
        """
        return self._read_word("cuMemAddressReserve", nbytes, 0, 0, 0)

    def free_reserved(self, address: int, nbytes: int) -> None:
        """Give addresses back that have nothing behind them any more."""
        self.call("cuMemAddressFree", address, nbytes)

    def map_at(self, address: int, handle: int, nbytes: int) -> None:
        """Put memory behind reserved addresses, for this GPU to read and write.

        Raises:
            CudaError: The memory has another size, or this GPU cannot reach it.
        """
        self.map_run(address, [handle], nbytes)

    def map_run(
        self, address: int, handles: Sequence[int], nbytes: int, *, is_writable: bool = True
    ) -> None:
        """Put several memories of `nbytes` each behind reserved addresses, one after the other.

        Rights are given once, for all.

        Raises:
            CudaError: As `map_at`; nothing is mapped.
        """
        rights = ACCESS_READ_WRITE if is_writable else ACCESS_READ
        access = MemAccessDesc(MemLocation(LOCATION_TYPE_DEVICE, self.ordinal), rights)
        with self._current(), contextlib.ExitStack() as undo:
            for number, handle in enumerate(handles):
                at = address + number * nbytes
                self.driver.call("cuMemMap", at, nbytes, 0, handle, 0)
                undo.callback(self.driver.call, "cuMemUnmap", at, nbytes)
            whole = len(handles) * nbytes
            self.driver.call("cuMemSetAccess", address, whole, byref(access), 1)
            undo.pop_all()

    def unmap_at(self, address: int, nbytes: int) -> None:
        """Take the memory away from behind reserved addresses; nothing may be using it."""
        self.call("cuMemUnmap", address, nbytes)

    def make_stream(self, *, is_background: bool = False) -> CudaStream:
        """A stream of our own."""
        return CudaStream(self, is_background=is_background)

    def synchronize(self) -> None:
        """Wait for everything that was queued on this GPU by this process."""
        self.call("cuCtxSynchronize")

    def zero(self, address: int, nbytes: int) -> None:
        """Fill with zeros and wait. The driver does not promise clean memory."""
        self.call("cuMemsetD8Async", address, 0, nbytes, self._stream.handle)
        self._stream.synchronize()

    def pin(self, address: int, nbytes: int) -> Callable[[], None]:
        """Page-lock host memory for every GPU of the process; returns how to undo it.

        Raises:
            TransportError: The kernel or the driver refuses to lock that much.
        """
        try:
            self.call("cuMemHostRegister_v2", address, nbytes, HOST_REGISTER_PORTABLE)
        except CudaError as error:
            raise TransportError(
                f"cannot pin {format_bytes(nbytes)} of host memory: {error.message}",
                remedy="Raise the locked-memory limit (`ulimit -l unlimited`) or reserve less "
                "host memory.",
                **error.details,
            ) from error
        return lambda: self.call("cuMemHostUnregister", address)

    def copy_batch(self, dsts: Words, srcs: Words, sizes: Words, stream: int) -> None:
        """Enqueue many copies on a stream: in one submission with drivers of CUDA 12.8 and newer.

        Args:
            dsts: Addresses, shape (n,), dense.
            srcs: Addresses, shape (n,), dense.
            sizes: Bytes of each copy, shape (n,), dense.
            stream: Handle of a real stream: the driver refuses the legacy default stream here.

        Raises:
            CudaError: Refused; none or some of the copies may have been enqueued.
        """
        attributes = MemcpyAttributes(src_access_order=COPY_IN_STREAM_ORDER)
        first, failed = c_size_t(0), c_size_t()
        lists = (dsts.ctypes.data, srcs.ctypes.data, sizes.ctypes.data, len(sizes))
        with self._current():
            if (copy := self.driver.batch_copy) is None:
                for dst, src, n in zip(dsts.tolist(), srcs.tolist(), sizes.tolist(), strict=True):
                    self.driver.call("cuMemcpyAsync", dst, src, n, stream)
                return
            result = copy(*lists, byref(attributes), byref(first), 1, byref(failed), stream)
        self.driver.require("cuMemcpyBatchAsync", result)

    def _read_word(self, name: str, *arguments: object) -> int:
        """Call a function whose first argument is an `unsigned long long *` for its result."""
        word = c_ulonglong()
        self.call(name, byref(word), *arguments)
        return word.value

    def call(self, name: str, *arguments: object) -> None:
        """Call the driver in this GPU's context.

        Raises:
            CudaError: The result was not success.
        """
        with self._current():
            self.driver.call(name, *arguments)

    def _has(self, attribute: int) -> bool:
        return bool(self.driver.read_int("cuDeviceGetAttribute", attribute, self._device))

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        # An engine that captures a graph forbids unsafe calls to every thread that minds it; ours
        # have nothing to do with the capture, and one that was refused would end it.
        mode = c_int(CAPTURE_MODE_RELAXED)
        self.driver.call("cuThreadExchangeStreamCaptureMode", byref(mode))
        try:
            self.driver.call("cuCtxPushCurrent_v2", self._context)
            try:
                yield
            finally:
                self.driver.call("cuCtxPopCurrent_v2", byref(c_void_p()))
        finally:
            self.driver.call("cuThreadExchangeStreamCaptureMode", byref(mode))
