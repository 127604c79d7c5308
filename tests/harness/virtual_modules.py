"""Stand-ins: what the modules of aqualib find instead of the operating system, for a while.

Whatever a module has under the names `threading`, `time`, `queue`, `os`, `random` and `signal`, the
lease channel's socket and selector, and clocks that are defaults of arguments. New modules are
found by themselves.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from aqua_protocol import supervision
from aqualib import channel as channels
from aqualib.channel import ChannelClosedError
from aqualib.peers import ProcessIdentity, process_behind
from aqualib.probe import LinkMeasurement, measure
from aqualib.thread_slice import run_promptly
from harness.virtual_machine import (
    EPOCH_S,
    FIRST_FD,
    Condition,
    Event,
    Lock,
    Machine,
    SimpleQueue,
    Thread,
)
from harness.virtual_sockets import (
    Channel,
    EventDescriptor,
    Listener,
    ProcessDescriptor,
    Selector,
)

MODULES: Final = {
    "threading": threading,
    "time": time,
    "queue": queue,
    "os": os,
    "random": random,
    "signal": signal,
}
LINK_BYTES_PER_S: Final = 1e9


class _StandIn:
    """A module with some names of its own."""

    def __init__(self, module: object, **names: object) -> None:
        self.__dict__.update(names)
        self._module = module

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the module's
        return getattr(self._module, name)


def _modules(machine: Machine) -> dict[str, object]:
    def now_s() -> float:
        return machine.now_s

    def close(fd: int) -> None:
        if (descriptor := machine.descriptors.get(fd)) is not None:
            descriptor.close()
        elif fd < FIRST_FD:
            os.close(fd)

    def eventfd_write(fd: int, value: int) -> None:
        descriptor = machine.descriptors[fd]
        assert isinstance(descriptor, EventDescriptor)
        descriptor.count += value
        descriptor.notify()

    def eventfd_read(fd: int) -> int:
        descriptor = machine.descriptors[fd]
        assert isinstance(descriptor, EventDescriptor)
        count, descriptor.count = descriptor.count, 0
        return count

    def pidfd_send_signal(fd: int, _: int) -> None:
        descriptor = machine.descriptors[fd]
        assert isinstance(descriptor, ProcessDescriptor)
        machine.after(0.0, descriptor.process.kill)

    return {
        "threading": _StandIn(
            threading,
            Lock=lambda: Lock(machine),
            RLock=lambda: Lock(machine),
            Condition=lambda lock=None: Condition(machine, lock),
            Event=lambda: Event(machine),
            Thread=lambda **options: Thread(machine, **options),
        ),
        "time": _StandIn(
            time,
            monotonic=now_s,
            perf_counter=now_s,
            time=lambda: EPOCH_S + machine.now_s + machine.process.skew_s,
            sleep=machine.sleep,
        ),
        "queue": _StandIn(queue, SimpleQueue=lambda: SimpleQueue(machine)),
        "os": _StandIn(
            os,
            close=close,
            eventfd=lambda *_: EventDescriptor(machine).number,
            eventfd_write=eventfd_write,
            eventfd_read=eventfd_read,
            getpid=lambda: machine.process.pid,
        ),
        "random": machine.random,
        "signal": _StandIn(signal, pidfd_send_signal=pidfd_send_signal),
    }


def _of_channels(machine: Machine) -> dict[int, object]:
    """Stand-ins for what `aqualib.channel` offers, by the id of what they stand for."""

    def connect(path: Path, **_: object) -> Channel:
        listener = machine.listeners.get(str(path))
        if listener is None:
            raise ChannelClosedError(f"no producer answers on {path}")
        channel: Channel = listener.connect(machine.process)
        return channel

    return {
        id(channels.Channel): lambda sock, *_, **__: sock,
        id(channels.LingeringSelector): lambda: Selector(machine),
        id(channels.connect): connect,
        id(channels.listen): lambda path, **_: Listener(machine, str(path)),
        id(run_promptly): lambda: None,
        id(process_behind): lambda who, _: ProcessIdentity(who.uid, who.pid, started_ticks=0),
        id(measure): lambda transport, _: LinkMeasurement(
            transport.kind, LINK_BYTES_PER_S, LINK_BYTES_PER_S
        ),
    }


@contextlib.contextmanager
def stand_ins(machine: Machine) -> Iterator[None]:
    """Let all of aqualib that is loaded work on the machine, within the block."""
    undo = [*_replace_names(machine), *_replace_defaults(machine), *_replace_secrets(machine)]
    try:
        yield
    finally:
        for holder, name, value in undo:
            if isinstance(holder, dict):
                holder[name] = value
            else:
                setattr(holder, name, value)


def _replace_names(machine: Machine) -> Iterator[tuple[Any, str, object]]:
    by_id = {id(MODULES[name]): module for name, module in _modules(machine).items()}
    by_id |= _of_channels(machine)
    for name, module in sorted(sys.modules.items()):
        is_ours = name.startswith("aqualib") or module is supervision
        if is_ours and module is not channels:
            for attribute, value in list(vars(module).items()):
                if id(value) in by_id:
                    yield module, attribute, value
                    setattr(module, attribute, by_id[id(value)])


def _replace_defaults(machine: Machine) -> Iterator[tuple[Any, str, object]]:
    for clocks in _defaults():
        for name, value in list(clocks.items()):
            if value is time.monotonic:
                yield clocks, name, value
                clocks[name] = lambda: machine.now_s


def _replace_secrets(machine: Machine) -> Iterator[tuple[Any, str, object]]:
    """Names that are drawn at random have to be drawn by the seed, too."""
    drawn = {
        "token_hex": lambda nbytes=32: machine.random.randbytes(nbytes).hex(),
        "token_bytes": lambda nbytes=32: machine.random.randbytes(nbytes),
        "randbits": machine.random.getrandbits,
        "randbelow": machine.random.randrange,
    }
    for name, draw in drawn.items():
        yield secrets, name, getattr(secrets, name)
        setattr(secrets, name, draw)


def _defaults() -> Iterator[dict[str, Any]]:
    """Defaults of keyword arguments of all methods in aqualib: some are a clock."""
    for name, module in sorted(sys.modules.items()):
        if name.startswith("aqualib"):
            for made in vars(module).values():
                if isinstance(made, type) and made.__module__ == name:
                    yield from (
                        function.__kwdefaults__
                        for function in vars(made).values()
                        if getattr(function, "__kwdefaults__", None)
                    )
