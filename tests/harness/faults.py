"""Faults in loops under supervision: what a loop calls raises something that nothing foresees.

The loops are found by introspection. While a `FaultInjector` is open, the interpreter tells it of
every call; those that a supervised body makes, itself or one call further, are the sites at which a
fault can be planted. So a new loop is found as soon as it runs, and a new call of an old one, too.
A call that is made while the loop says that it rests would not be missed if it never ended.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import cycle, groupby
from types import CodeType, FrameType
from typing import Final, NamedTuple, Self

from aqua_protocol import supervision

DEPTH: Final = 2
"""Calls between a body and a site, at most."""


class UnforeseenError(Exception):
    """An error of no type that anything handles."""


class Site(NamedTuple):
    """A function, as called by loops of one kind."""

    loop: str
    function: str


class FaultInjector:
    """Watches the calls of loops; raises in one of them. A context manager, one at a time.

    Threads are watched that start while it is open, and the one that opens it.

    Attributes:
        sites: Every site seen, in the order of the first call.
        planted: Where to raise what; None when that has happened.
        unwatched: Sites that were called while their loop rested: there it may hang unseen.
    """

    def __init__(self, site: Site | None = None, error: BaseException | None = None) -> None:
        self.sites: dict[Site, None] = {}
        self.unwatched: set[Site] = set()
        self.planted = None if site is None or error is None else (site, error)

    def __enter__(self) -> Self:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or "/src/aqua" not in code.co_filename:
            return
        if code.co_filename == supervision.__file__:
            return
        outer = frame.f_back
        for _depth in range(DEPTH + 1):
            if outer is None:
                return
            calls_bodies = outer.f_code.co_name == "_run"
            if calls_bodies and outer.f_code.co_filename == supervision.__file__:
                loop = outer.f_locals["self"]
                site = Site(loop.kind, code.co_qualname)
                if loop.is_resting and frame.f_lasti <= _beginning(code):
                    self.unwatched.add(site)
                self._reach(site)
                return
            outer = outer.f_back

    def _reach(self, site: Site) -> None:
        self.sites.setdefault(site)
        if self.planted is not None and self.planted[0] == site:
            error, self.planted = self.planted[1], None
            raise error


def have_rested(seen: set[supervision.Loop]) -> bool:
    """Whether each loop that runs is resting or in `seen`, which those that rest now join."""
    loops = supervision.running_loops()
    seen.update(loop for loop in loops if loop.is_resting)
    return seen.issuperset(loops)


@cache
def _beginning(code: CodeType) -> int:
    """Where a call begins; one of a coroutine that goes on after a wait does so behind it."""
    return next(each.offset for each in dis.get_instructions(code) if each.opname == "RESUME")


def faults(sites: Iterable[Site]) -> Iterator[tuple[Site, BaseException]]:
    """A fault for each site; those of one loop are by turns of a foreign type and out of memory."""
    for _, of_loop in groupby(sorted(sites), key=lambda site: site.loop):
        errors = cycle((MemoryError(), UnforeseenError("a secret")))
        yield from zip(of_loop, errors, strict=False)
