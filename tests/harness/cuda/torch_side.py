"""torch over the stand-in: tensors on `cuda:N` whose kernels are queued like the driver's copies.

A tensor of the stand-in is a CPU tensor over memory of the `Machine` that says it is on a GPU. What
torch would launch on it is queued on the thread's current stream and computed when the queue gets
there; what would wait for the device does. Memory comes from a caching allocator that hands a freed
block out again at once, on the stream that it was freed on, as torch's does.

`installed` puts this in the place of `torch.cuda` and of torch's factories, in all threads.
"""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from harness.cuda.torch_streams import TorchEvent, TorchStream
from harness.cuda.torch_tensors import (
    CPU,
    CachingAllocator,
    DeviceTensor,
    Frozen,
    construct,
    dress,
    ranges_of,
    rows_of,
)
from harness.cuda.violations import Stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from harness.cuda.machine import Machine
    from harness.cuda.streams import Stream

FACTORIES: Final = (
    *("empty", "zeros", "ones", "full", "tensor", "arange", "randint", "randn", "rand"),
    *("randperm", "empty_strided", "as_tensor"),
)
"""Functions of torch that take a device and make a tensor."""


class _Thread(threading.local):
    """What the CUDA runtime and torch keep for each thread."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, TorchStream] = {}


class TorchSide:
    """What stands where `torch.cuda` was; one at a time in a process."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.thread = _Thread()
        self.allocator = CachingAllocator(self)
        self._indexes: dict[int, torch.Tensor] = {}
        self._loaded: set[tuple[Any, ...]] = set()

    # --- torch.cuda -----------------------------------------------------------------------

    def use(self, ordinal: int) -> None:
        """The runtime makes a GPU's context when it is first needed."""
        self.machine.contexts_made.add(ordinal)

    def set_device(self, device: Any) -> None:
        """`torch.cuda.set_device`; since CUDA 12 it makes the context."""
        ordinal = self.ordinal_of(device)
        self.thread.device = ordinal
        self.use(ordinal)

    def ordinal_of(self, device: Any) -> int:
        """The number of a device; the thread's own where none is named."""
        if device is None:
            return self.thread.device
        if isinstance(device, int):
            return device
        index: int | None = torch.device(device).index
        return self.thread.device if index is None else index

    def current_stream(self, device: Any = None) -> TorchStream:
        """`torch.cuda.current_stream`."""
        ordinal = self.ordinal_of(device)
        if ordinal not in self.thread.streams:
            self.thread.streams[ordinal] = self.default_stream(ordinal)
        return self.thread.streams[ordinal]

    def default_stream(self, device: Any = None) -> TorchStream:
        """`torch.cuda.default_stream`."""
        with self.machine.lock:
            return TorchStream(self, found=self.machine.stream(None, self.ordinal_of(device)))

    def set_stream(self, stream: TorchStream) -> None:
        """`torch.cuda.set_stream`, which sets the device as well."""
        if self.thread.device != stream.found.device:
            self.set_device(stream.found.device)
        self.thread.streams[stream.found.device] = stream

    @contextlib.contextmanager
    def on_stream(self, stream: TorchStream | None) -> Iterator[None]:
        """`torch.cuda.stream`, in torch's own steps: it goes back to the device it came from."""
        if stream is None:
            yield
            return
        source = self.current_stream()
        with self.on_device(stream.found.device):
            before = self.current_stream(stream.found.device)
        self.set_stream(stream)
        try:
            yield
        finally:
            if source.device != stream.device:
                self.set_stream(before)
            self.set_stream(source)

    @contextlib.contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        """`torch.cuda.device`, which goes back without making a context."""
        before, self.thread.device = self.thread.device, self.ordinal_of(device)
        try:
            yield
        finally:
            self.thread.device = before

    def external_stream(self, handle: int, device: Any = None) -> TorchStream:
        """`torch.cuda.ExternalStream`."""
        found = self.machine.stream(handle, self.ordinal_of(device))
        assert found is not None, f"no stream has the handle {handle:#x}"
        return TorchStream(self, found=found)

    def wait_for(self, found: Stream) -> None:
        """The host waits for a stream."""
        with self.machine.lock:
            if self.machine.may_call("waiting for a stream"):
                self.machine.finish_stream(found)

    def synchronize(self, device: Any = None) -> None:
        """`torch.cuda.synchronize`."""
        with self.machine.lock:
            if self.machine.may_call("cudaDeviceSynchronize"):
                self.machine.finish_device(self.ordinal_of(device))

    @contextlib.contextmanager
    def capturing(self, stream: TorchStream | None = None) -> Iterator[None]:
        """`torch.cuda.graph` as engines call it: a capture in the mode that all threads mind."""
        found = (stream or TorchStream(self)).found
        with self.machine.lock:
            found.capture = "global"
            self.machine.captures[found.number] = Stack()
        try:
            with self.on_stream(TorchStream(self, found=found)):
                yield
        finally:
            with self.machine.lock:
                found.capture = None
                del self.machine.captures[found.number]

    # --- Tensors --------------------------------------------------------------------------

    def is_device(self, tensor: torch.Tensor) -> bool:
        """Whether the bytes of a tensor are a GPU's."""
        return self.machine.is_device(tensor.untyped_storage().data_ptr())

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        """What a device tensor says: where its storage is used from."""
        ordinal = self.allocator.ordinals.get(tensor.untyped_storage().data_ptr())
        return torch.device("cuda", 0 if ordinal is None else ordinal)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of torch that met a device tensor."""
        name = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None)
        with torch._C.DisableTorchFunctionSubclass():
            if name == "__get__" and (answer := self._property(owner, args[0])) is not None:
                return answer
            if name in {"cpu", "tolist", "item", "__bool__", "__repr__", "__int__"}:
                host = self._to_host(args[0])
                return host if name == "cpu" else func(host)
            if name == "numpy":
                raise TypeError("can't convert cuda:0 device type tensor to numpy.")
            if name in {"to", "cuda"}:
                device = _device_in(args[1:], kwargs)
                if device is not None and device.type != "meta":
                    return self._to(args[0], device)
            if func is torch.equal:
                return torch.equal(*(self._to_host(x) for x in args))
            with Kernels(self):
                out = func(*args, **_without_device(kwargs))
            return tree_map(self._dressed, out)

    def _property(self, which: Any, tensor: torch.Tensor) -> Any:
        on_device = isinstance(tensor, DeviceTensor)
        if which is torch.Tensor.device:
            return self.device_of(tensor) if on_device else CPU
        if which is torch.Tensor.is_cuda:
            return on_device
        if which is torch.Tensor.is_cpu:
            return not on_device
        return None

    def _dressed(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor):
            return dress(value) if self.is_device(value) else value
        return value

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, which the host waits for."""
        if not isinstance(tensor, DeviceTensor):
            return tensor
        host = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        with Kernels(self):
            host.copy_(tensor)
        return host

    def _to(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return self._to_host(tensor)
        if isinstance(tensor, DeviceTensor):
            return tensor
        made = self.allocator.like(tensor, self.ordinal_of(device))
        with torch._C.DisableTorchFunctionSubclass(), Kernels(self):
            made.copy_(tensor)
        return made

    def launch(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One of torch's own operations: at once if it moves no bytes, else queued."""
        flat, shape = tree_flatten((args, kwargs))
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        device = [x for x in tensors if x.numel() and self.is_device(x)]
        schema = func._schema
        writes = [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments]
        is_view = not any(writes) and any(r.alias_info is not None for r in schema.returns)
        if not device or is_view or func.overloadpacket is torch.ops.aten.set_:
            return func(*args, **kwargs)
        ordinal = self.ordinal_of(self.device_of(device[0]))
        stream = self.current_stream(ordinal).found
        if func is torch.ops.aten._local_scalar_dense.default:
            return func(self._to_host(dress(args[0])))
        is_copy = func is torch.ops.aten.copy_.default
        if not is_copy and any(x.dim() and x.numel() and not self._is_seen(x) for x in tensors):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        written = [
            named[a.name]
            for a, is_write in zip(schema.arguments, writes, strict=True)
            if is_write and isinstance(named.get(a.name), torch.Tensor)
        ]
        out = None
        if not any(writes):
            # Zeros stand in for what is not known yet: only the shape of the result counts.
            unknown = [x.new_zeros(x.shape) if isinstance(x, torch.Tensor) else x for x in flat]
            zero_args, zero_kwargs = tree_unflatten(unknown, shape)
            out = tree_map(
                lambda x: self.allocator.like(x, ordinal) if isinstance(x, torch.Tensor) else x,
                func(*zero_args, **zero_kwargs),
            )
            written = [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)]
        self._queue(func, flat, shape, stream, tensors, written, is_in_place=out is None)
        crosses = is_copy and not all(self.is_device(x) for x in tensors)
        if crosses and not (self._is_reachable(tensors) and self._is_asynchronous(args, kwargs)):
            self.wait_for(stream)
        return args[0] if out is None and writes[0] else kwargs.get("out") if out is None else out

    def _queue(
        self,
        func: Any,
        flat: list[Any],
        shape: Any,
        stream: Stream,
        tensors: list[torch.Tensor],
        written: list[torch.Tensor],
        *,
        is_in_place: bool,
    ) -> None:
        # Addresses only: work that is queued keeps no tensor alive.
        ids = {id(x) for x in written}
        frozen = [
            Frozen(x, is_value=not x.dim() and id(x) not in ids and not self.is_device(x))
            if isinstance(x, torch.Tensor)
            else x
            for x in flat
        ]
        results = [Frozen(x) for x in written]

        def run() -> None:
            args, kwargs = tree_unflatten(
                [x.thaw() if isinstance(x, Frozen) else x for x in frozen], shape
            )
            with torch._C.DisableTorchFunctionSubclass():
                out = func(*args, **kwargs)
                if not is_in_place:
                    outs = [x for x in tree_flatten(out)[0] if isinstance(x, torch.Tensor)]
                    for result, value in zip(results, outs, strict=True):
                        result.thaw().copy_(value)

        overwritten = func is torch.ops.aten.copy_.default or "fill_" in str(func)
        overwritten |= "zero_" in str(func) or "out" in str(func)
        read = [x for x in tensors if id(x) not in ids or not overwritten]
        # A table is as large as its index says, if the host knows that.
        table, index = flat[0], flat[2] if "index_" in str(func) else None
        if index is not None and self.is_device(index):
            index = self._index_values(table, index)

        def touched(x: torch.Tensor) -> list[tuple[int, int]]:
            return rows_of(x, index) if x is table and index is not None else ranges_of(x)

        with self.machine.lock:
            self._load(func, tensors)
            self._note_index(func, flat, written)
            self.use(stream.device)
            self.machine.queue(
                stream,
                str(func),
                run,
                reads=[r for x in read for r in touched(x)],
                writes=[r for x in written for r in touched(x)],
            )

    def _load(self, func: Any, tensors: list[torch.Tensor]) -> None:
        """A kernel is loaded when it is first launched, which may wait for all that is queued.

        Source: CUDA Programming Guide, "Lazy Loading", on concurrent execution.
        """
        kernel = (func, *(x.dtype for x in tensors))
        if func is not torch.ops.aten.copy_.default and kernel not in self._loaded:
            self._loaded.add(kernel)
            self.machine.require_free(f"{func} is loaded")

    def _note_index(self, func: Any, flat: list[Any], written: list[torch.Tensor]) -> None:
        """Remember what an index on a GPU will hold, where it is copied from the host."""
        for each in written:
            start = each.data_ptr()
            end = start + each.untyped_storage().nbytes()
            for at in [at for at in self._indexes if start <= at < end]:
                del self._indexes[at]
        if func is torch.ops.aten.copy_.default:
            target, source = flat[:2]
            is_index = source.dtype == torch.int64 and source.shape == target.shape
            if is_index and self.is_device(target) and not self.is_device(source):
                # What the host writes there before the copy is done is reported as such.
                self._indexes[target.data_ptr()] = source.clone()

    def _index_values(self, table: torch.Tensor, index: torch.Tensor) -> torch.Tensor | None:
        """What an index on a GPU holds when its kernel gets there; None where only that knows.

        Nor is it told where the table's rows are no stretches of bytes: all of it counts then.
        """
        known = self._indexes.get(index.data_ptr())
        is_known = known is not None and known.shape == index.shape
        return known if is_known and table[:1].is_contiguous() else None

    def _is_seen(self, tensor: torch.Tensor) -> bool:
        """Whether kernels see it: a GPU's memory, or registered memory that was given to one."""
        at = tensor.untyped_storage().data_ptr()
        is_given = at in self.allocator.ordinals and self.machine.pinned_log(at) is not None
        return is_given or self.is_device(tensor)

    def _is_reachable(self, tensors: list[torch.Tensor]) -> bool:
        return all(
            self.is_device(x) or self.machine.pinned_log(x.data_ptr()) is not None for x in tensors
        )

    @staticmethod
    def _is_asynchronous(args: Any, kwargs: Any) -> bool:
        return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))

    # --- Installing -----------------------------------------------------------------------

    @contextlib.contextmanager
    def installation(self) -> Iterator[None]:
        """Be torch's CUDA for the process."""
        with contextlib.ExitStack() as stack:
            for owner, name, thing in self._patches():
                stack.enter_context(mock.patch.object(owner, name, thing, create=True))
            DeviceTensor.side = self
            try:
                yield
            finally:
                DeviceTensor.side = None

    def _patches(self) -> Iterator[tuple[Any, str, Any]]:
        cuda = torch.cuda
        yield torch.version, "cuda", "13.0"
        yield cuda, "Stream", partial(TorchStream, self)
        yield cuda, "Event", partial(TorchEvent, self)
        yield cuda, "ExternalStream", self.external_stream
        for name, method in {
            "is_available": lambda: True,
            "device_count": lambda: len(self.machine.visible),
            "current_device": lambda: self.thread.device,
            "set_device": self.set_device,
            "current_stream": self.current_stream,
            "default_stream": self.default_stream,
            "set_stream": self.set_stream,
            "stream": self.on_stream,
            "device": self.on_device,
            "synchronize": self.synchronize,
            "empty_cache": self.allocator.empty_cache,
            "mem_get_info": self.allocator.mem_get_info,
            "memory_reserved": lambda _=None: self.allocator.reserved_bytes,
        }.items():
            yield cuda, name, method
        yield torch.Tensor, "to", self._method("to")
        yield torch.Tensor, "is_pinned", lambda tensor, _=None: self._is_pinned(tensor)
        yield torch._C, "_construct_storage_from_data_pointer", self._construct
        for name in FACTORIES:
            yield torch, name, self._factory(getattr(torch, name))

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        is_host = not isinstance(tensor, DeviceTensor)
        return is_host and self.machine.pinned_log(tensor.data_ptr()) is not None

    def _method(self, name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            device = _device_in(args, kwargs)
            is_here = isinstance(tensor, DeviceTensor) or (device and device.type == "cuda")
            if device is None or device.type == "meta" or not is_here:
                return original(tensor, *args, **kwargs)
            return self._to(tensor, device)

        return method

    def _factory(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def make(*args: Any, **kwargs: Any) -> torch.Tensor:
            device = kwargs.get("device")
            if kwargs.pop("pin_memory", False):
                made = original(*args, **kwargs)
                self.allocator.pin(made)
                return made
            if device is None or torch.device(device).type != "cuda":
                return original(*args, **kwargs)
            plain = original(*args, **kwargs | {"device": "cpu"})
            made = self.allocator.like(plain, self.ordinal_of(device))
            if "empty" not in original.__name__ and plain.numel():
                self._fill(made, plain)
            return made

        make.__name__ = original.__name__
        return make

    def _fill(self, made: torch.Tensor, plain: torch.Tensor) -> None:
        """Launch the kernel that writes what a factory promises."""
        stream = self.current_stream(self.device_of(made)).found
        target, values = Frozen(made), plain.clone()
        with self.machine.lock:
            self.use(stream.device)
            self.machine.queue(
                stream, "a factory", lambda: target.thaw().copy_(values), writes=ranges_of(made)
            )

    def _construct(self, at: int, device: torch.device, nbytes: int) -> Any:
        if device.type == "cuda":
            self.allocator.ordinals[at] = device.index or 0
        return construct(at, CPU, nbytes)


class Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
    """While active, what torch does to device memory is queued."""

    def __init__(self, side: TorchSide) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self._side = side

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Skipping it takes seconds to import it.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        return self._side.launch(func, args, kwargs or {})


def _device_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    for value in (*args[:1], kwargs.get("device")):
        if isinstance(value, torch.device | str):
            return torch.device(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return torch.device("cuda", value)
    return None


def _without_device(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "device"}
