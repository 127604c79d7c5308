"""What `torch.cuda` calls streams and events, over those of a `Machine`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from harness.cuda.streams import Event

if TYPE_CHECKING:
    from harness.cuda.streams import Stream
    from harness.cuda.torch_side import TorchSide


class TorchStream:
    """`torch.cuda.Stream` and `torch.cuda.ExternalStream`."""

    def __init__(
        self,
        side: TorchSide,
        device: Any = None,
        priority: int = 0,
        *,
        found: Stream | None = None,
    ) -> None:
        if found is None:
            ordinal = side.ordinal_of(device)
            with side.machine.lock:
                side.use(ordinal)
                found = side.machine.new_stream(ordinal, is_blocking=False, priority=priority)
        self._side = side
        self.found = found
        self.cuda_stream = found.handle
        self.device = torch.device("cuda", found.device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TorchStream) and other.found is self.found

    def __hash__(self) -> int:
        return hash(self.cuda_stream)

    def synchronize(self) -> None:
        self._side.wait_for(self.found)

    def wait_stream(self, other: TorchStream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: TorchEvent) -> None:
        machine = self._side.machine
        with machine.lock:
            machine.wait(self.found, event.found)

    def record_event(self, event: TorchEvent | None = None) -> TorchEvent:
        event = event or TorchEvent(self._side)
        event.record(self)
        return event

    def query(self) -> bool:
        return not self.found.queue


class TorchEvent:
    """`torch.cuda.Event`."""

    def __init__(self, side: TorchSide, **_: object) -> None:
        self._side = side
        self.found = Event(0, -1)

    def record(self, stream: TorchStream | None = None) -> None:
        side = self._side
        found = (stream or side.current_stream()).found
        with side.machine.lock:
            side.use(found.device)
            self.found.work = side.machine.queue(found, "an event of torch")

    def wait(self, stream: TorchStream | None = None) -> None:
        (stream or self._side.current_stream()).wait_event(self)

    def query(self) -> bool:
        machine = self._side.machine
        with machine.lock:
            machine.may_call("an event's query")
            return self.found.work is None or self.found.work.is_done

    def synchronize(self) -> None:
        machine = self._side.machine
        with machine.lock:
            if machine.may_call("an event's wait"):
                machine.finish(self.found.work)
