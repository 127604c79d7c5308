"""What was queued on a device inside `pinned()`: done before the bytes may move or be given away.

The device's queue is a list here, which runs when it is waited for and not before.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aqua_protocol import MIB, TransportError, TransportKind
from aqualib.memory.frame_store import FrameStore
from aqualib.transports import select
from aqualib.transports.cuda_driver import CudaDevice
from harness.consumers import consuming
from harness.cuda.stand_in import stand_in
from harness.producers import SLAB

if TYPE_CHECKING:
    from collections.abc import Callable

    from aqualib.tensor import AquaTensor
    from aqualib.transports.base import Transport


def note(patch: pytest.MonkeyPatch, kind: type, name: str, happened: list[str]) -> None:
    """Have every call of a method of the class noted by its name, before it is done."""
    method = getattr(kind, name)

    def noting(*args: Any) -> Any:  # noqa: ANN401 - the method's own
        happened.append(name)
        return method(*args)

    patch.setattr(kind, name, noting)


class LateDevice:
    """Kernels that run when the device is waited for; `happened` also has what the store does."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.happened: list[str] = []
        self.failure = ""
        self.transport: Transport = select(TransportKind.MEMFD)
        self._queue: list[Callable[[], object]] = []
        patch.setattr(self.transport, "synchronize", self.synchronize, raising=False)
        note(patch, FrameStore, "unpin", self.happened)
        note(patch, FrameStore, "give_back", self.happened)

    def fill(self, view: torch.Tensor, value: int) -> None:
        """Queue a kernel: like one, it keeps an address and no tensor."""
        address, nbytes = view.data_ptr(), view.nbytes

        def kernel() -> None:
            self.happened.append("kernel")
            ctypes.memset(address, value, nbytes)

        self._queue.append(kernel)

    def synchronize(self) -> None:
        while self._queue:
            self._queue.pop(0)()
        if self.failure:
            raise TransportError(self.failure)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    return LateDevice(monkeypatch)


def zeros() -> torch.Tensor:
    return torch.zeros(SLAB // 2, dtype=torch.uint8)


@pytest.mark.parametrize("is_checking", [False, True])
def test_what_was_queued_inside_is_done_before_the_pin_ends(
    device: LateDevice, is_checking: bool
) -> None:
    with consuming(transport=device.transport, is_checking=is_checking) as aqua:
        tensor = aqua.offload(zeros())
        device.happened.clear()
        with tensor.pinned() as view:
            device.fill(view, 7)
        assert device.happened == ["kernel", "unpin"]
        assert tensor.load().eq(7).all()


def test_a_kernel_that_only_reads_holds_the_bytes_as_well(device: LateDevice) -> None:
    with consuming(transport=device.transport, is_checking=True) as aqua:
        tensor = aqua.offload(zeros())
        device.happened.clear()
        with tensor.pinned(writes=False) as view:
            device.fill(view, 0)
        assert device.happened == ["kernel", "unpin"]


def test_a_block_that_raises_waits_too(device: LateDevice) -> None:
    def fail_inside(tensor: AquaTensor) -> None:
        with tensor.pinned() as view:
            device.fill(view, 7)
            raise ZeroDivisionError

    with consuming(transport=device.transport) as aqua:
        tensor = aqua.offload(zeros())
        device.happened.clear()
        with pytest.raises(ZeroDivisionError):
            fail_inside(tensor)
        assert device.happened == ["kernel", "unpin"]


def test_room_is_given_away_once_kernels_over_a_view_that_outlived_the_block_are_done(
    device: LateDevice,
) -> None:
    def outlived(tensor: AquaTensor) -> torch.Tensor:
        with tensor.pinned() as view:
            return view[1:]

    with consuming(transport=device.transport) as aqua:
        tensor = aqua.offload(zeros())
        survivor = outlived(tensor)
        device.happened.clear()
        device.fill(survivor, 7)
        tensor.release()
        assert device.happened == []
        del survivor
        aqua.empty((1,), torch.uint8).release()
        assert device.happened[:2] == ["kernel", "give_back"]


def test_a_device_that_failed_is_heard_of_and_holds_nothing(device: LateDevice) -> None:
    with consuming(transport=device.transport) as aqua:
        tensor = aqua.offload(zeros())
        device.failure = "the device has gone"
        with pytest.raises(TransportError, match="the device has gone"), tensor.pinned():
            device.happened.clear()
        assert device.happened == ["unpin"]
        tensor.release()


def test_a_gpu_is_waited_for_by_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    note(monkeypatch, CudaDevice, "synchronize", happened)
    note(monkeypatch, FrameStore, "unpin", happened)
    with (
        stand_in() as standing,
        consuming(4, 2 * MIB, transport=standing.transport()) as aqua,
    ):
        tensor = aqua.offload(zeros())
        happened.clear()
        with tensor.pinned(writes=False):
            pass
        assert happened[0] == "synchronize"
        assert happened[-1] == "unpin"
        tensor.release()
