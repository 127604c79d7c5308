"""Descriptors of a virtual machine: lease channels, eventfds, pidfds, and what waits for them.

A channel carries packets in order, each after a while, and so does its end: what a Unix socket
promises, with the time between made visible. See `virtual_machine`.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from types import SimpleNamespace
from typing import Any, Final

from aqualib.channel import ChannelClosedError
from aqualib.peers import PeerCredentials
from harness.virtual_machine import Descriptor, Machine, Process

QUEUE_PACKETS: Final = 16
"""Packets that a lease channel takes before its sender has to wait."""
SEND_TIMEOUT_S: Final = 5.0
"""How long a sender waits for a peer that does not read."""


class EventDescriptor(Descriptor):
    """An eventfd."""

    count = 0

    def is_readable(self) -> bool:
        return self.count > 0


class ProcessDescriptor(Descriptor):
    """A pidfd."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.machine)
        self.process = process
        process.watchers.append(self)

    def is_readable(self) -> bool:
        return not self.process.is_alive


class Channel(Descriptor):
    """One end of a lease channel: `aqualib.channel.Channel` without a socket.

    Packets arrive in order, each after a while; so does the end.
    """

    def __init__(self, machine: Machine, process: Process) -> None:
        super().__init__(machine)
        self.process = process
        process.channels.append(self)
        self.other: Channel | None = None
        self._inbox: deque[Any] = deque()
        self._under_way = 0
        self._latest_s = 0.0
        self._is_ended = False

    @property
    def credentials(self) -> PeerCredentials:
        assert self.other is not None
        return PeerCredentials(self.other.process.pid, os.geteuid(), os.getegid())

    def peer_pidfd(self) -> int:
        assert self.other is not None
        return ProcessDescriptor(self.other.process).number

    def is_readable(self) -> bool:
        return bool(self._inbox) or self._is_ended

    def is_writable(self) -> bool:
        return self._is_ended or self.other is None or self.other.has_room()

    def has_room(self) -> bool:
        """Whether another packet fits."""
        return len(self._inbox) + self._under_way < QUEUE_PACKETS

    def send(self, message: object, fds: object = ()) -> None:
        del fds
        deadline_s = self.machine.now_s + SEND_TIMEOUT_S
        while not self.try_send(message):
            waiter = self.machine.park(deadline_s - self.machine.now_s)
            self.watch(waiter)
            if not waiter.wait():
                raise ChannelClosedError("the peer has not read for seconds")

    def try_send(self, message: object) -> bool:
        if self.number < 0 or self._is_ended or self.other is None:
            raise ChannelClosedError("the channel is closed")
        if not self.other.has_room():
            return False
        self.other.expect(message)
        return True

    def wait(self, timeout_s: float) -> bool:
        end_s = self.machine.now_s + timeout_s
        while not self.is_readable():
            if self.machine.now_s >= end_s:
                return False
            waiter = self.machine.park(end_s - self.machine.now_s)
            self.watch(waiter)
            waiter.wait()
        return True

    def receive(self) -> tuple[Any, list[int]]:
        while not self._inbox:
            if self._is_ended or self.number < 0:
                raise ChannelClosedError("the peer closed the lease channel")
            waiter = self.machine.park()
            self.watch(waiter)
            waiter.wait()
        message = self._inbox.popleft()
        if self.other is not None:
            self.other.notify()
        return message, []

    def shutdown(self) -> None:
        """Both ends see the end."""
        self._is_ended = True
        self.notify()
        if self.other is not None:
            self.other.expect(None)

    def close(self) -> None:
        if self.number >= 0:
            other, self.other = self.other, None
            if other is not None:
                other.expect(None)
            with contextlib.suppress(ValueError):
                self.process.channels.remove(self)
            super().close()
            self.notify()

    def settimeout(self, _: float | None) -> None: ...

    def expect(self, message: object) -> None:
        """A packet is on its way here; None is the end."""
        delay_s = self.machine.random.uniform(0, self.machine.latency_s)
        self._latest_s = max(self._latest_s + 1e-9, self.machine.now_s + delay_s)
        self._under_way += 1
        self.machine.after(self._latest_s - self.machine.now_s, lambda: self._arrive(message))

    def _arrive(self, message: object) -> None:
        self._under_way -= 1
        if message is None:
            self._is_ended = True
        elif not self._is_ended:
            self._inbox.append(message)
        self.notify()


class Listener(Descriptor):
    """A listening socket."""

    def __init__(self, machine: Machine, path: str) -> None:
        super().__init__(machine)
        self._path = path
        self._backlog: deque[Channel] = deque()
        machine.listeners[path] = self
        self.process = machine.process
        self.process.on_death.append(self.close)

    def is_readable(self) -> bool:
        return bool(self._backlog)

    def settimeout(self, _: float | None) -> None: ...

    def accept(self) -> tuple[Channel, None]:
        if not self._backlog:
            raise BlockingIOError
        return self._backlog.popleft(), None

    def connect(self, process: Process) -> Channel:
        """The client's end of a new connection."""
        mine, theirs = Channel(self.machine, process), Channel(self.machine, self.process)
        mine.other, theirs.other = theirs, mine
        self._backlog.append(theirs)
        self.notify()
        return mine

    def close(self) -> None:
        if self.machine.listeners.get(self._path) is self:
            del self.machine.listeners[self._path]
        while self._backlog:
            self._backlog.popleft().close()
        super().close()


class Selector:
    """`aqualib.channel.LingeringSelector`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._keys: dict[int, SimpleNamespace] = {}

    def register(self, fileobj: Any, events: int, data: object = None) -> None:  # noqa: ANN401 - a number or a thing
        """Watch it."""
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        assert number in self._machine.descriptors, f"{fileobj} is closed"
        assert number not in self._keys, f"{fileobj} is registered"
        self._keys[number] = SimpleNamespace(fileobj=fileobj, fd=number, events=events, data=data)

    def unregister(self, fileobj: object) -> None:
        """Watch it no more."""
        number = next(n for n, key in self._keys.items() if key.fileobj is fileobj or n == fileobj)
        del self._keys[number]

    def modify(self, fileobj: Any, events: int, data: object = None) -> None:  # noqa: ANN401 - as above
        """Watch for something else."""
        self.unregister(fileobj)
        self.register(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[SimpleNamespace, int]]:
        """Wait until something is ready."""
        end_s = None if timeout is None else self._machine.now_s + timeout
        while not (ready := self._ready()):
            left_s = None if end_s is None else end_s - self._machine.now_s
            if left_s is not None and left_s <= 0:
                break
            waiter = self._machine.park(left_s)
            for number in self._keys:
                if (descriptor := self._machine.descriptors.get(number)) is not None:
                    descriptor.watch(waiter)
            waiter.wait()
        return ready

    def _ready(self) -> list[tuple[SimpleNamespace, int]]:
        found = []
        for number, key in self._keys.items():
            descriptor = self._machine.descriptors.get(number)
            if descriptor is not None:
                mask = (descriptor.is_readable() and 1) | (descriptor.is_writable() and 2)
                if mask & key.events:
                    found.append((key, mask & key.events))
        return found

    def close(self) -> None:
        """Forget all."""
        self._keys.clear()
