from __future__ import annotations

import os
import threading
from pathlib import Path

from aqualib.transports.tether import Tethers, Undertaker


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_importers_are_counted_until_they_let_go() -> None:
    before = open_descriptors()
    tethers = Tethers()
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
    tethers = Tethers()
    end = tethers.add()
    copy = os.dup(end)
    os.close(end)
    tethers.drop_released()
    assert len(tethers) == 1
    os.close(copy)
    tethers.drop_released()
    assert len(tethers) == 0


def test_memory_that_nobody_holds_is_freed_at_once() -> None:
    undertaker, freed = Undertaker(), []
    undertaker.free_when_released(Tethers(), lambda: freed.append(1))
    assert freed == [1]
    assert undertaker.waiting_count == 0


def test_memory_is_freed_when_its_last_importer_lets_go_in_any_order() -> None:
    before = open_descriptors()
    undertaker = Undertaker()
    freed = {name: threading.Event() for name in "abc"}
    ends: dict[str, list[int]] = {}
    for name, event in freed.items():
        tethers = Tethers()
        ends[name] = [tethers.add(), tethers.add()]
        undertaker.free_when_released(tethers, event.set)
    assert undertaker.waiting_count == 3

    for name in "bca":
        os.close(ends[name][0])
        assert not freed[name].is_set()
        os.close(ends[name][1])
        assert freed[name].wait(10)
    assert undertaker.waiting_count == 0

    # The thread ended with its work; the next slab starts another.
    tethers, event = Tethers(), threading.Event()
    end = tethers.add()
    undertaker.free_when_released(tethers, event.set)
    assert undertaker.waiting_count == 1
    os.close(end)
    assert event.wait(10)
    for thread in threading.enumerate():
        if thread.name == "aqua-cuda-ipc-free":
            thread.join(10)
    assert open_descriptors() == before
