from __future__ import annotations

import os
import threading

import pytest

from aqua_protocol import TransportError
from aqualib.transports.release_pipe import DeferredFree, ReleasePipes
from harness.bounds import HANG_S, until
from harness.transport_peer import open_descriptors


def await_idle(undertaker: DeferredFree) -> None:
    """Wait until no memory waits any more; the freeing thread has closed what it had by then."""
    until(lambda: undertaker.waiting_count == 0, "all memory is free")


def test_importers_are_counted_until_they_let_go() -> None:
    before = open_descriptors()
    tethers = ReleasePipes()
    first, second = tethers.add(), tethers.add()
    assert len(tethers) == 2
    os.close(first)
    tethers.drop_released()
    assert len(tethers) == 1
    os.close(second)
    tethers.drop_released()
    assert len(tethers) == 0
    assert open_descriptors() == before


def test_a_duplicate_of_the_end_keeps_the_tether() -> None:
    tethers = ReleasePipes()
    end = tethers.add()
    copy = os.dup(end)
    os.close(end)
    tethers.drop_released()
    assert len(tethers) == 1
    os.close(copy)
    tethers.drop_released()
    assert len(tethers) == 0


def test_memory_that_nobody_holds_is_freed_at_once() -> None:
    undertaker, freed = DeferredFree(), []
    undertaker.free_when_released(ReleasePipes(), lambda: freed.append(1))
    assert freed == [1]
    assert undertaker.waiting_count == 0


def test_memory_is_freed_when_its_last_importer_lets_go_in_any_order() -> None:
    before = open_descriptors()
    undertaker = DeferredFree()
    freed = {name: threading.Event() for name in "abc"}
    ends: dict[str, list[int]] = {}
    for name, event in freed.items():
        tethers = ReleasePipes()
        ends[name] = [tethers.add(), tethers.add()]
        undertaker.free_when_released(tethers, event.set)
    assert undertaker.waiting_count == 3

    for name in "bca":
        os.close(ends[name][0])
        assert not freed[name].is_set()
        os.close(ends[name][1])
        assert freed[name].wait(HANG_S)
    await_idle(undertaker)

    # The thread ended with its work; the next slab starts another.
    tethers, event = ReleasePipes(), threading.Event()
    end = tethers.add()
    undertaker.free_when_released(tethers, event.set)
    assert undertaker.waiting_count == 1
    os.close(end)
    assert event.wait(HANG_S)
    await_idle(undertaker)
    assert open_descriptors() == before


def test_memory_counts_as_waiting_until_it_has_really_been_freed() -> None:
    undertaker = DeferredFree()
    begun, may_end = threading.Event(), threading.Event()

    def free() -> None:
        begun.set()
        assert may_end.wait(HANG_S)

    tethers = ReleasePipes()
    end = tethers.add()
    undertaker.free_when_released(tethers, free)
    os.close(end)
    assert begun.wait(HANG_S)
    assert undertaker.waiting_count == 1
    may_end.set()
    await_idle(undertaker)


def test_memory_that_cannot_be_freed_keeps_no_other_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> None:
        raise TransportError("the context is gone")

    undertaker, freed = DeferredFree(), threading.Event()
    broken, whole = ReleasePipes(), ReleasePipes()
    ends = broken.add(), whole.add()
    undertaker.free_when_released(broken, fail)
    undertaker.free_when_released(whole, freed.set)
    for end in ends:
        os.close(end)
    assert freed.wait(HANG_S)
    await_idle(undertaker)
    assert "the context is gone" in caplog.text


def test_memory_whose_freeing_crashed_is_freed_later_and_keeps_no_other_waiting() -> None:
    calls, freed = iter([MemoryError(), KeyError()]), [threading.Event(), threading.Event()]

    def crash_twice() -> None:
        for error in calls:
            raise error
        freed[0].set()

    undertaker = DeferredFree()
    broken, whole = ReleasePipes(), ReleasePipes()
    ends = broken.add(), whole.add()
    undertaker.free_when_released(broken, crash_twice)
    undertaker.free_when_released(whole, freed[1].set)
    for end in ends:
        os.close(end)
    assert freed[0].wait(HANG_S)
    assert freed[1].wait(HANG_S)
    await_idle(undertaker)
