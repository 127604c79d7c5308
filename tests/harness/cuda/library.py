"""The driver's calls, as the binding makes them, over a `Machine`.

An instance stands where the loaded `libcuda.so.1` would: functions by their C names, which take
what ctypes takes and answer with a CUresult. So everything of the product above the C interface
runs here unchanged, and no compiler is needed.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import TYPE_CHECKING, Any

from aqualib.transports.cuda_abi import BATCH_COPY, MemAllocationProp
from harness.cuda.memory import (
    GRANULE_BYTES,
    Physical,
    free_addresses,
    home_of,
    make_memory,
    reserve_addresses,
)
from harness.cuda.results import (
    CAPTURE_UNSUPPORTED,
    CONTEXT,
    ERRORS,
    INVALID_CONTEXT,
    INVALID_DEVICE,
    INVALID_HANDLE,
    INVALID_VALUE,
    NAME,
    NO_DEVICE,
    NOT_FOUND,
    OUT_OF_MEMORY,
    SUCCESS,
)
from harness.cuda.streams import Event
from harness.cuda.violations import Kind, Stack

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.cuda.machine import Machine
    from harness.cuda.streams import Stream


def _int(value: Any) -> int:
    return int(getattr(value, "value", value) or 0)


def _at(reference: Any) -> Any:
    """What `byref` refers to."""
    return reference._obj


def _put(reference: Any, value: Any) -> None:
    _at(reference).value = value


def call(
    *, needs_context: bool = True, is_unsafe: bool = False
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """A driver call: counted, under the lock, in a context, and perhaps not during a capture."""

    def decorate(function: Callable[..., int]) -> Callable[..., int]:
        name = function.__name__

        @functools.wraps(function)
        def wrapped(self: StandInLibrary, *arguments: Any) -> int:
            machine = self.machine
            with machine.lock:
                machine.calls[name] += 1
                if needs_context and machine.current is None:
                    machine.report(Kind.CONTEXT, f"{name} without a context")
                    return INVALID_CONTEXT
                if is_unsafe and not machine.may_call(name):
                    return CAPTURE_UNSUPPORTED
                if machine.is_refused(name):
                    return OUT_OF_MEMORY
                return function(self, *arguments)

        return wrapped

    return decorate


class StandInLibrary:
    """`libcuda.so.1` over a machine that is not there."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._batch = BATCH_COPY(self._copy_batch)

    # --- Devices and contexts -------------------------------------------------------------

    @call(needs_context=False)
    def cuInit(self, flags: int) -> int:
        return (SUCCESS if self.machine.visible else NO_DEVICE) if not flags else INVALID_VALUE

    @call(needs_context=False)
    def cuDriverGetVersion(self, version: Any) -> int:
        _put(version, 13000)
        return SUCCESS

    def cuGetErrorName(self, error: int, name: Any) -> int:
        if error not in ERRORS:
            return INVALID_VALUE
        _put(name, ERRORS[error])
        return SUCCESS

    @call(needs_context=False)
    def cuGetProcAddress_v2(
        self, symbol: bytes, address: Any, version: int, flags: int, status: Any
    ) -> int:
        if (
            symbol != b"cuMemcpyBatchAsync"
            or flags
            or version != 12080
            or not self.machine.has_batch
        ):
            _put(status, 1)
            return NOT_FOUND
        _put(address, ctypes.cast(self._batch, ctypes.c_void_p).value)
        _put(status, 0)
        return SUCCESS

    @call(needs_context=False)
    def cuDeviceGetCount(self, count: Any) -> int:
        _put(count, len(self.machine.visible))
        return SUCCESS

    @call(needs_context=False)
    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        _put(device, ordinal)
        return SUCCESS if 0 <= ordinal < len(self.machine.visible) else INVALID_DEVICE

    @call(needs_context=False)
    def cuDeviceGetName(self, name: Any, size: int, device: int) -> int:
        name.value = NAME.encode()[: size - 1]
        return SUCCESS if 0 <= device < len(self.machine.visible) else INVALID_DEVICE

    @call(needs_context=False)
    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        del device
        machine = self.machine
        answers = {102: 1, 103: int(machine.exports_descriptors), 110: int(machine.has_rdma)}
        answers |= {91: int(machine.reads_registered), 134: machine.host_node}
        _put(value, answers.get(attribute, 0))
        return SUCCESS

    @call(needs_context=False)
    def cuDeviceGetUuid_v2(self, uuid: Any, device: int) -> int:
        _at(uuid).bytes[:] = self.machine.uuid_of(device).bytes
        return SUCCESS

    @call(needs_context=False)
    def cuDeviceCanAccessPeer(self, can: Any, device: int, peer: int) -> int:
        del device, peer
        _put(can, int(self.machine.has_peers))
        return SUCCESS

    @call(needs_context=False)
    def cuDevicePrimaryCtxRetain(self, context: Any, device: int) -> int:
        self.machine.contexts_made.add(device)
        _put(context, CONTEXT + device)
        return SUCCESS

    @call(needs_context=False)
    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.machine.thread.contexts.append(_int(context) - CONTEXT)
        return SUCCESS

    @call()
    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        _put(context, CONTEXT + self.machine.thread.contexts.pop())
        return SUCCESS

    @call(is_unsafe=True)
    def cuCtxSynchronize(self) -> int:
        if any(stream.capture for stream in self.machine.streams.values()):
            self.machine.report(Kind.CAPTURE, "a context is waited for that captures")
            return CAPTURE_UNSUPPORTED
        self.machine.finish_device(self._device)
        return SUCCESS

    @call()
    def cuCtxGetStreamPriorityRange(self, least: Any, greatest: Any) -> int:
        _put(least, 0)
        _put(greatest, -5)
        return SUCCESS

    @call(needs_context=False)
    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        thread = self.machine.thread
        before, thread.capture_mode = thread.capture_mode, _at(mode).value
        _put(mode, before)
        return SUCCESS

    # --- Streams and events ---------------------------------------------------------------

    @call()
    def cuStreamCreateWithPriority(self, stream: Any, flags: int, priority: int) -> int:
        if flags not in {0, 1}:
            return INVALID_VALUE
        made = self.machine.new_stream(self._device, is_blocking=not flags, priority=priority)
        _put(stream, made.handle)
        return SUCCESS

    @call()
    def cuStreamDestroy_v2(self, stream: Any) -> int:
        """Returns at once; what is queued still runs."""
        found = self._stream(stream)
        if found is None:
            return INVALID_HANDLE
        found.is_destroyed = True
        return SUCCESS

    @call(is_unsafe=True)
    def cuStreamSynchronize(self, stream: Any) -> int:
        if (found := self._stream(stream)) is None:
            return INVALID_HANDLE
        self.machine.finish_stream(found)
        return SUCCESS

    @call()
    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> int:
        found, marker = self._stream(stream), self.machine.events.get(_int(event))
        if found is None or marker is None or flags:
            return INVALID_HANDLE
        self.machine.wait(found, marker)
        return SUCCESS

    @call()
    def cuEventCreate(self, event: Any, flags: int) -> int:
        if flags not in {0, 2}:
            return INVALID_VALUE
        made = Event(0x3000 + 16 * self.machine.number(), self._device)
        self.machine.events[made.handle] = made
        _put(event, made.handle)
        return SUCCESS

    @call()
    def cuEventRecord(self, event: Any, stream: Any) -> int:
        marker, found = self.machine.events.get(_int(event)), self._stream(stream)
        if found is None or marker is None or marker.device != found.device:
            return INVALID_HANDLE
        marker.work = self.machine.queue(found, "an event")
        return SUCCESS

    @call(is_unsafe=True)
    def cuEventSynchronize(self, event: Any) -> int:
        marker = self.machine.events.get(_int(event))
        if marker is None:
            return INVALID_HANDLE
        self.machine.finish(marker.work)
        return SUCCESS

    @call()
    def cuEventDestroy_v2(self, event: Any) -> int:
        found = self.machine.events.pop(_int(event), None)
        return INVALID_HANDLE if found is None else SUCCESS

    # --- Memory ---------------------------------------------------------------------------

    @call(needs_context=False)
    def cuMemGetAllocationGranularity(self, size: Any, prop: Any, option: int) -> int:
        _put(size, GRANULE_BYTES)
        return SUCCESS if _at(prop).type == 1 and not option else INVALID_VALUE

    @call(is_unsafe=True)
    def cuMemCreate(self, handle: Any, size: int, prop: Any, flags: int) -> int:
        wanted: MemAllocationProp = _at(prop)
        device, extra = wanted.location.id, wanted.alloc_flags
        if (wanted.type, wanted.requested_handle_types, wanted.location.type) != (1, 1, 1):
            return INVALID_VALUE
        if flags or extra.compression_type or extra.usage or size <= 0 or size % GRANULE_BYTES:
            return INVALID_VALUE
        if extra.gpu_direct_rdma_capable and not self.machine.has_rdma:
            return INVALID_VALUE
        if not 0 <= device < len(self.machine.visible):
            return INVALID_DEVICE
        if self.machine.used[device] + size > self.machine.memory_bytes:
            return OUT_OF_MEMORY
        self.machine.used[device] += size
        fd = make_memory(self.machine.visible[device], size)
        memory = Physical(fd, device, size, is_ours=True)
        memory.is_rdma_capable = bool(extra.gpu_direct_rdma_capable)
        self._keep(handle, memory)
        return SUCCESS

    @call(is_unsafe=True)
    def cuMemRelease(self, handle: int) -> int:
        memory = self.machine.handles.pop(_int(handle), None)
        if memory is None:
            self.machine.report(Kind.REFCOUNT, "a handle is released that is none")
            return INVALID_VALUE
        memory.holders -= 1
        self.machine.drop(memory)
        return SUCCESS

    @call()
    def cuMemExportToShareableHandle(self, fd: Any, handle: int, kind: int, flags: int) -> int:
        memory = self.machine.handles.get(_int(handle))
        if kind != 1 or flags or memory is None:
            return INVALID_VALUE
        copy = os.dup(memory.fd)
        os.set_inheritable(copy, True)  # On purpose: the binding must see to that.
        _put(fd, copy)
        return SUCCESS

    @call(is_unsafe=True)
    def cuMemImportFromShareableHandle(self, handle: Any, fd: Any, kind: int) -> int:
        home = home_of(_int(fd))
        if kind != 1 or home is None or home not in self.machine.visible:
            return INVALID_VALUE
        copy = os.dup(_int(fd))
        size = os.fstat(copy).st_size
        device = self.machine.visible.index(home)
        known = [m for m in self.machine.handles.values() if os.path.sameopenfile(m.fd, copy)]
        if known:  # Of this process: one memory, whatever the handle.
            os.close(copy)
            self._keep(handle, known[0])
        else:
            self._keep(handle, Physical(copy, device, size, is_ours=False))
        return SUCCESS

    @call(needs_context=False)
    def cuMemGetAllocationPropertiesFromHandle(self, prop: Any, handle: int) -> int:
        memory = self.machine.handles.get(_int(handle))
        if memory is None:
            return INVALID_VALUE
        found: MemAllocationProp = _at(prop)
        found.type = found.requested_handle_types = found.location.type = 1
        found.location.id = memory.device
        return SUCCESS

    @call(is_unsafe=True)
    def cuMemAddressReserve(self, at: Any, size: int, align: int, hint: int, flags: int) -> int:
        if size <= 0 or size % GRANULE_BYTES or align or hint or flags:
            return INVALID_VALUE
        start = reserve_addresses(size)
        self.machine.space.reserved[start] = size
        _put(at, start)
        return SUCCESS

    @call(is_unsafe=True)
    def cuMemAddressFree(self, at: int, size: int) -> int:
        space = self.machine.space
        if space.reserved.get(at) != size or not space.is_vacant(at, size):
            self.machine.report(Kind.REFCOUNT, f"addresses {at:#x} are freed that cannot be")
            return INVALID_VALUE
        free_addresses(at, space.reserved.pop(at))
        return SUCCESS

    @call(is_unsafe=True)
    def cuMemMap(self, at: int, size: int, offset: int, handle: int, flags: int) -> int:
        memory = self.machine.handles.get(_int(handle))
        if offset or flags or memory is None or memory.nbytes != size:
            return INVALID_VALUE
        if not self.machine.space.is_vacant(at, size):
            return INVALID_VALUE
        self.machine.space.map(at, memory)
        return SUCCESS

    @call(is_unsafe=True)
    def cuMemUnmap(self, at: int, size: int) -> int:
        """Takes whole mappings, any number of them, and waits for nobody."""
        found = self.machine.space.within(at, size)
        if found is None:
            self.machine.report(
                Kind.REFCOUNT, f"{at:#x} is unmapped, where nothing is mapped whole"
            )
            return INVALID_VALUE
        for mapping in found:
            self.machine.unmap(mapping)
        return SUCCESS

    @call(is_unsafe=True)
    def cuMemSetAccess(self, at: int, size: int, access: Any, count: int) -> int:
        found = self.machine.space.within(at, size)
        wanted = _at(access)
        if found is None or count != 1 or wanted.location.type != 1 or wanted.flags not in {1, 3}:
            return INVALID_VALUE
        if not 0 <= wanted.location.id < len(self.machine.visible):
            return INVALID_DEVICE
        for mapping in found:
            self.machine.space.allow(mapping, wanted.location.id, writes=wanted.flags == 3)
        return SUCCESS

    @call(is_unsafe=True)
    def cuMemHostRegister_v2(self, at: int, size: int, flags: int) -> int:
        if not at or size <= 0 or flags != 1 or not self.machine.pin(at, size):
            return INVALID_VALUE
        if size > self.machine.memory_bytes:
            self.machine.unpin(at)
            return OUT_OF_MEMORY
        return SUCCESS

    @call(is_unsafe=True)
    def cuMemHostUnregister(self, at: int) -> int:
        if not self.machine.unpin(at):
            self.machine.report(Kind.REFCOUNT, f"host memory at {at:#x} was not registered")
            return INVALID_VALUE
        return SUCCESS

    # --- Copies ---------------------------------------------------------------------------

    @call()
    def cuMemsetD8Async(self, at: int, value: int, size: int, stream: Any) -> int:
        if (found := self._stream(stream)) is None:
            return INVALID_HANDLE
        self.machine.queue(
            found, "a memset", lambda: ctypes.memset(at, value, size), writes=[(at, size)]
        )
        return SUCCESS

    @call()
    def cuMemcpyAsync(self, dst: int, src: int, size: int, stream: Any) -> int:
        if (found := self._stream(stream)) is None:
            return INVALID_HANDLE
        self._copy(found, [(dst, src, size)])
        return SUCCESS

    def _copy_batch(  # noqa: PLR0913, PLR0917 - the driver's
        self,
        dsts: int,
        srcs: int,
        sizes: int,
        count: int,
        attributes: Any,
        first: Any,
        attribute_count: int,
        failed: Any,
        stream: int | None,
    ) -> int:
        machine = self.machine
        with machine.lock:
            machine.calls["cuMemcpyBatchAsync"] += 1
            failed[0] = (1 << 64) - 1
            if machine.is_refused("cuMemcpyBatchAsync"):
                return OUT_OF_MEMORY
            if not stream or not count or attribute_count != 1 or first[0]:
                return INVALID_VALUE
            if attributes[0].src_access_order != 1:
                return INVALID_VALUE
            if (found := self._stream(stream)) is None:
                return INVALID_HANDLE
            lists = [list((ctypes.c_uint64 * count).from_address(at)) for at in (dsts, srcs, sizes)]
            self._copy(found, list(zip(*lists, strict=True)))
            return SUCCESS

    def _copy(self, stream: Stream, parts: list[tuple[int, int, int]]) -> None:
        """One piece of work; the parts of a batch are ordered among themselves by nothing."""

        def run() -> None:
            for dst, src, size in parts:
                ctypes.memmove(dst, src, size)

        work = self.machine.queue(
            stream,
            f"a copy of {len(parts)} parts",
            run,
            reads=[(src, size) for _, src, size in parts],
            writes=[(dst, size) for dst, _, size in parts],
        )
        if any(self._is_pageable(at) for part in parts for at in part[:2]):
            self.machine.finish(work)

    def _is_pageable(self, at: int) -> bool:
        return not self.machine.space.is_device(at) and self.machine.pinned_log(at) is None

    # --- Inside ---------------------------------------------------------------------------

    @property
    def _device(self) -> int:
        device = self.machine.current
        assert device is not None, "a call that needs a context has none"
        return device

    def _stream(self, handle: Any) -> Stream | None:
        """The stream, if it is one of the current context's."""
        device = self.machine.current
        if device is None:
            self.machine.report(Kind.CONTEXT, "a stream is used without a context")
            return None
        found = self.machine.stream(_int(handle), device)
        if found is None or found.is_destroyed or found.device != device:
            what = f"stream {_int(handle):#x} is used in the context of cuda:{device}"
            self.machine.report(Kind.CONTEXT, what, Stack())
            return None
        return found

    def _keep(self, handle: Any, memory: Physical) -> None:
        number = self.machine.number()
        self.machine.handles[number] = memory
        memory.holders += 1
        _put(handle, number)
