"""Frames claimed while the store only looks full: a slab is being made, or about to be set free."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import pytest
import torch

from aqua_protocol import CapacityError, TransportError
from aqualib.memory.frame import Frame, PeerSlab
from aqualib.memory.frame_store import FrameStore
from aqualib.memory.migration_policy import Drain
from aqualib.transports.base import Transport
from harness.bounds import HANG_S, until
from harness.memory import PaperLender, PaperSlab

SLAB_BYTES = 1 << 20
UNIT_BYTES = 256


class PaperTransport:
    """Makes host slabs; each one starts with a call to `on_create`."""

    device = torch.device("cpu")

    def __init__(self, on_create: Callable[[], None] = lambda: None) -> None:
        self.on_create = on_create

    def create_host(self, nbytes: int) -> PaperSlab:
        self.on_create()
        return PaperSlab(nbytes)


class Claimer:
    """Claims one frame on a thread of its own."""

    def __init__(self, store: FrameStore) -> None:
        self._store = store
        self._thread = threading.Thread(target=self._claim, daemon=True)
        self._result: Future[Frame] = Future()

    def start(self) -> None:
        """Return when the claim is answered, or waits for something."""
        self._thread.start()
        until(lambda: self._result.done() or self._is_waiting(), "a claim that ends or waits")

    def frame(self) -> Frame:
        frame = self._result.result()
        self._thread.join()
        return frame

    def _claim(self) -> None:
        try:
            self._result.set_result(self._store.claim(UNIT_BYTES))
        except CapacityError as error:
            self._result.set_exception(error)

    def _is_waiting(self) -> bool:
        stack = sys._current_frames().get(self._thread.ident or 0)
        while stack is not None:
            if stack.f_code is threading.Condition.wait.__code__:
                return True
            stack = stack.f_back
        return False


def store_of(slab_count: int, transport: PaperTransport) -> FrameStore:
    return FrameStore(
        cast("Transport", transport), slab_bytes=SLAB_BYTES, host_bytes=slab_count * SLAB_BYTES
    )


def test_a_claim_waits_for_the_last_host_slab_that_another_thread_is_making() -> None:
    transport = PaperTransport()
    store = store_of(1, transport)
    claimer = Claimer(store)
    transport.on_create = claimer.start
    store.reserve(1)
    assert claimer.frame().host.nbytes == SLAB_BYTES
    store.audit()


def test_a_claim_makes_the_slab_itself_when_the_other_thread_could_not() -> None:
    transport = PaperTransport()
    store = store_of(1, transport)
    claimer = Claimer(store)

    def fail_once() -> None:
        transport.on_create = lambda: None
        claimer.start()
        raise TransportError("no memory")

    transport.on_create = fail_once
    with pytest.raises(TransportError, match="no memory"):
        store.reserve(1)
    assert claimer.frame().host.nbytes == SLAB_BYTES
    store.audit()


def test_a_claim_that_waited_for_the_slab_of_another_claim_is_told_that_the_store_is_full() -> None:
    transport = PaperTransport()
    store = store_of(1, transport)
    claimer = Claimer(store)
    transport.on_create = claimer.start
    store.claim(UNIT_BYTES)
    with pytest.raises(CapacityError, match="used up"):
        claimer.frame()


def test_a_claim_waits_for_a_dissolved_frame_that_is_still_on_its_way() -> None:
    store = store_of(1, PaperTransport())
    slab = PeerSlab(0, 1, PaperSlab(SLAB_BYTES), PaperLender())
    store.adopt([slab])
    frame = store.claim(UNIT_BYTES)
    store.take([frame], 1)
    store.ask_back([slab])
    move = store.next_migration()
    assert isinstance(move, Drain)
    store.dissolve(frame)
    claimer = Claimer(store)
    claimer.start()
    with store.answering() as (table, _):
        table.arrived(move)
    assert claimer.frame() is not frame
    store.audit()


def test_a_claim_does_not_wait_for_frames_that_nobody_gives_up() -> None:
    store = store_of(2, PaperTransport())
    with ThreadPoolExecutor() as threads:
        frames = list(threads.map(lambda _: store.claim(UNIT_BYTES), range(2)))
    store.pin(frames[0])
    store.dissolve(frames[0])
    with pytest.raises(CapacityError, match="used up"):
        store.claim(UNIT_BYTES)


def test_a_claim_finds_the_room_that_another_thread_is_giving_back_for_a_finalizer() -> None:
    store = store_of(1, PaperTransport())
    frame = store.claim(UNIT_BYTES)
    has_begun, may_end = threading.Event(), threading.Event()

    def give_back() -> bool:
        has_begun.set()
        assert may_end.wait(HANG_S)
        store.dissolve(frame)
        return True

    def sweep_and_claim() -> Frame:
        store.sweep()
        return store.claim(UNIT_BYTES)

    store.leave(give_back)
    with ThreadPoolExecutor(2) as threads:
        sweeping = threads.submit(store.sweep)
        assert has_begun.wait(HANG_S)
        claiming = threads.submit(sweep_and_claim)
        try:
            with pytest.raises(TimeoutError):
                claiming.result(0.2)
        finally:
            may_end.set()
        sweeping.result(HANG_S)
        assert claiming.result(HANG_S) is not frame
