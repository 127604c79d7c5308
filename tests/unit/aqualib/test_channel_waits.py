"""Connecting to and waiting on a lease channel: what lingering must not change."""

from __future__ import annotations

import errno
import itertools
import resource
import selectors
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from aqua_protocol import TransportError
from aqua_protocol.channel import Ping
from aqualib import channel
from aqualib.channel import Channel, ChannelClosedError, LingeringSelector, connect
from harness.bounds import HANG_S

Ends = tuple[Channel[Ping], Channel[Ping]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    left, right = (
        Channel(sock, TypeAdapter(Ping))
        for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    )
    yield left, right
    left.close()
    right.close()


def test_a_wait_ends_without_a_packet(ends: Ends) -> None:
    assert not ends[0].wait(0)
    assert not ends[0].wait(0.001)


def test_a_packet_that_is_there_is_waited_for_by_nobody(ends: Ends) -> None:
    ends[1].send(Ping(number=1))
    assert ends[0].wait(0)
    assert ends[0].receive()[0] == Ping(number=1)


def test_a_packet_that_comes_after_lingering_wakes_the_sleeper(ends: Ends) -> None:
    timer = threading.Timer(0.05, ends[1].send, [Ping(number=2)])
    timer.start()
    assert ends[0].wait(HANG_S)
    timer.join()


def test_the_end_of_the_channel_is_something_to_receive(ends: Ends) -> None:
    ends[1].close()
    assert ends[0].wait(HANG_S)
    with pytest.raises(ChannelClosedError):
        ends[0].receive()


def test_a_selector_that_lingers_sees_what_any_selector_sees(ends: Ends) -> None:
    left, right = ends
    with LingeringSelector() as selector:
        selector.register(left, selectors.EVENT_READ, "left")
        assert selector.select(0) == []
        right.send(Ping(number=3))
        for _ in range(2):  # Asleep, then awake.
            ((key, mask),) = selector.select(60)
            assert (key.data, mask) == ("left", selectors.EVENT_READ)
        left.receive()
        assert selector.select(0.001) == []
        timer = threading.Timer(0.05, right.send, [Ping(number=4)])
        timer.start()
        assert selector.select(60)
        timer.join()


@pytest.mark.parametrize(("timeout", "looks"), [(0.0, 1), (3.0, 3), (60.0, 5), (None, 5)])
def test_a_selector_lingers_no_longer_than_it_may_wait(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, timeout: float | None, looks: int
) -> None:
    looked: list[float | None] = []

    def look(
        _selector: selectors.BaseSelector, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        looked.append(timeout)
        return []

    clock = SimpleNamespace(perf_counter=itertools.count().__next__)
    monkeypatch.setattr("aqualib.channel.time", clock)
    monkeypatch.setattr("aqualib.channel.LINGER_S", 5.0)
    with LingeringSelector() as selector:
        selector.register(ends[0], selectors.EVENT_READ)
        ends[1].send(Ping(number=5))
        assert selector.select(0), "awake from here on"
        monkeypatch.setattr(selectors.DefaultSelector, "select", look)
        assert selector.select(timeout) == []
    # A look per tick of the clock, then to sleep.
    assert looked == [0] * (looks - 1) + [timeout]


def test_a_process_without_descriptors_is_told_so_and_blames_no_producer(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(TransportError, match="no socket can be made") as caught:
            connect(tmp_path / "p.sock")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not isinstance(caught.value, ChannelClosedError)


class StarvedSocket(socket.socket):
    """A socket for whose packets the kernel has no memory, for a while."""

    refusals = 0

    def send(self, *packet: Any) -> int:  # noqa: ANN401 - as of a socket
        """Send, or raise what the kernel does."""
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.ENOBUFS, "No buffer space available")
        return super().send(*packet)


@pytest.mark.parametrize("refusals", [1, 3])
def test_a_lack_of_kernel_memory_does_not_end_a_channel(refusals: int) -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    starved = StarvedSocket(fileno=left.detach())
    sender, receiver = Channel(starved, TypeAdapter(Ping)), Channel(right, TypeAdapter(Ping))
    starved.refusals = refusals
    sender.send(Ping(number=1))
    starved.refusals = 1
    assert not sender.try_send(Ping(number=2))
    assert sender.try_send(Ping(number=3))
    assert [receiver.receive()[0].number for _ in range(2)] == [1, 3]
    sender.close()
    receiver.close()


def test_a_send_gives_up_when_there_is_never_any_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MEMORY_PATIENCE_S", 0.0)
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with StarvedSocket(fileno=left.detach()) as starved, right:
        starved.refusals = sys.maxsize
        with pytest.raises(ChannelClosedError, match="No buffer space"):
            Channel(starved, TypeAdapter(Ping)).send(Ping(number=1))
