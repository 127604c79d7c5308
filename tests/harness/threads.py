"""Work on a thread that has done nothing before, as an engine's own threads have not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")


def in_thread(work: Callable[[], ResultT]) -> ResultT:
    """Run on a thread of its own, which then ends; what the work gives, or raises."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()
