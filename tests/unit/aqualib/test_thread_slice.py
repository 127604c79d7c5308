"""A thread may ask for a short slice; who cannot have one goes on without."""

from __future__ import annotations

import os
import platform
import threading

import pytest

from aqualib import thread_slice


def in_a_thread_of_its_own() -> int:
    """Ask in a new thread and return the slice that it has then."""
    found: list[int] = []

    def run() -> None:
        thread_slice.run_promptly()
        found.append(thread_slice.slice_ns())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def knows_slices() -> bool:
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    return platform.machine() in {"x86_64", "aarch64"} and (major, minor) >= (6, 12)


@pytest.mark.skipif(not knows_slices(), reason="slices came with Linux 6.12")
def test_a_thread_gets_a_short_slice_and_others_keep_theirs() -> None:
    before = thread_slice.slice_ns()
    assert in_a_thread_of_its_own() == thread_slice.PROMPT_SLICE_NS
    assert thread_slice.slice_ns() == before != thread_slice.PROMPT_SLICE_NS


def test_on_an_unknown_machine_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "vax")
    assert in_a_thread_of_its_own() == 0
