"""Ctrl-C, SIGTERM and SIGHUP as one exception, which can wait until a child process is in hand.

An interrupt between the birth of a child and the line that notes it would leave the child behind.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Self

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Raises `KeyboardInterrupt` in the main thread while entered; without it, Python's own way."""

    def __init__(self) -> None:
        self._is_deferring = self._is_pending = False
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        for number in NUMBERS:
            before = signal.signal(number, self._stop)
            self._entered.callback(signal.signal, number, before)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered.close()

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Hold an interrupt back until the block has ended, then raise it."""
        self._is_deferring = True
        try:
            yield
        finally:
            self._is_deferring = False
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        if not self._is_deferring:
            raise KeyboardInterrupt
        self._is_pending = True
