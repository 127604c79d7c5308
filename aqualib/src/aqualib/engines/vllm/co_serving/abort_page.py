"""The page by which an engine tells its workers to abort a step, and they agree on where.

An engine has one. Its scheduler makes it; the thread that takes requests in writes to it while the
scheduler waits for the step; the workers look at it at each safepoint. Nothing is called and
nothing is sent: a look costs some hundred nanoseconds, and needs no other process to answer.

It has no name in a file system. It is anonymous memory of the scheduler's process, which workers
open by its descriptor (`/proc/PID/fd/N`): the kernel lets in only the same user, and frees it with
the last process, whichever way that ends. So nothing is left behind, and nothing old is found.

With several ranks all have to abort at the same safepoint, or those that go on wait for ever in
the next collective of their layers. So the first rank decides, and the others wait until it has.
That is sound because collectives keep ranks within a layer of each other; the bound of the wait
(`AGREEMENT_S`) catches a first rank that has died.

Words of eight bytes, aligned, each with one writer:

    0        the step to abort                           the engine
    1        the last safepoint that was decided         the first rank
    2 ...    the last safepoints at which steps were aborted

What was decided of a safepoint is there before the word that says so. A rank may come to a
safepoint when the first is in a later step: the words from 2 on remember as many aborted steps as
can be under way, and more.

Source: ConServe section 4.3 has ranks meet in a barrier at each safepoint (988 us).
"""

from __future__ import annotations

import mmap
import os
import time
from typing import Final, Self

from aqua_protocol import TransportError
from aqualib.transports.host_pages import PAGE_BYTES
from aqualib.transports.memfd import sealed_memory

REMEMBERED_STEPS: Final = 8
"""Aborted steps that ranks may still be at: vLLM has two under way at most without a pipeline.
Doubled, the page would hold more of them, and nothing else changes."""

SAFEPOINT_BITS: Final = 20
"""Of a word, for the safepoint's number within its step: a million layers. Doubled, an engine could
number only eight million steps."""

AGREEMENT_S: Final = 60.0
"""Seconds that a rank waits for the first to decide: much longer than any layer takes. Doubled, an
engine whose first rank has died says so later."""

YIELDS_AFTER: Final = 1000
"""Looks before a waiting rank lets others have its core: some tenths of a millisecond, more than
ranks are apart as a rule. Doubled, ranks that share a core hold each other up for longer."""


class AbortPage:
    """One side's view of the page; close it, or use it as a context manager.

    `create` makes one in the scheduler's process, `open` finds it in a worker's.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, PAGE_BYTES)
        self._words = memoryview(self._map).cast("q")

    def __repr__(self) -> str:
        return f"AbortPage({'closed' if self._descriptor < 0 else self.place})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @classmethod
    def create(cls) -> Self:
        """Make a page; it lives as long as this process or one that has opened it.

        Raises:
            TransportError: The kernel gives no such memory.
        """
        return cls(sealed_memory(PAGE_BYTES))

    @classmethod
    def open(cls, place: str) -> Self:
        """Open the page of an engine on this machine.

        Raises:
            TransportError: It is gone, or this process may not.
        """
        try:
            return cls(os.open(place, os.O_RDWR | os.O_CLOEXEC))
        except (OSError, ValueError) as error:
            raise TransportError(f"{place} is no page that can be opened: {error}") from error

    @property
    def place(self) -> str:
        """Where `open` finds it, in this process and others."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Let go of it; harmless when repeated."""
        if self._descriptor < 0:
            return
        self._words.release()
        self._map.close()
        os.close(self._descriptor)
        self._descriptor = -1

    # --- The engine --------------------------------------------------------------------------

    def ask(self, step: int) -> None:
        """Have a step aborted at its next safepoint; one that has ended is not concerned."""
        self._words[0] = step

    def is_asked(self, step: int) -> bool:
        """Whether this step is to be aborted."""
        return self._words[0] == step

    # --- Ranks -------------------------------------------------------------------------------

    def decide(self, step: int, safepoint: int) -> bool:
        """Decide for all ranks whether the step is aborted at this safepoint; the first rank's."""
        is_abort = self.is_asked(step)
        at = _position(step, safepoint)
        if is_abort:
            self._words[2 + step % REMEMBERED_STEPS] = at
        self._words[1] = at
        return is_abort

    def follow(self, step: int, safepoint: int, timeout_s: float = AGREEMENT_S) -> bool:
        """Wait for what the first rank decides of this safepoint; every other rank's.

        Raises:
            TransportError: It has decided nothing within the time.
        """
        at = _position(step, safepoint)
        looks = 0
        give_up_s = 0.0
        while self._words[1] < at:
            looks += 1
            if looks < YIELDS_AFTER:
                continue
            os.sched_yield()
            give_up_s = give_up_s or time.monotonic() + timeout_s
            if time.monotonic() > give_up_s:
                raise TransportError(
                    f"the first rank has not come to safepoint {safepoint} of step {step} within "
                    f"{timeout_s:g} s"
                )
        return self._words[2 + step % REMEMBERED_STEPS] == at


def _position(step: int, safepoint: int) -> int:
    """A safepoint's place in the order of all: later steps, and later in a step, are greater."""
    return step << SAFEPOINT_BITS | safepoint
