"""Two ranks in two processes abort each step at the same safepoint, and neither waits for ever."""

from __future__ import annotations

import multiprocessing
import random
from typing import TYPE_CHECKING, Final

from aqualib.engines.vllm.co_serving.abort_page import AbortPage
from harness.bounds import HANG_S

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

FLAGS: Final = 10_000
STEPS: Final = 16_800
"""In so many, flags abort far more than `FLAGS`: two in three, and those from outside."""
SAFEPOINTS: Final = 3
APART: Final = 7
"""Steps that a rank may be ahead: fewer than the page remembers."""


def _walk(place: str, end: Connection, *, is_first: bool) -> None:
    """Go through all steps as a rank does; say at which safepoint each was aborted, -1 for none."""
    rng = random.Random(1)
    found = []
    with AbortPage.open(place) as page:
        for step in range(1, STEPS + 1):
            stop = -1
            for safepoint in range(SAFEPOINTS):
                if is_first and rng.random() < 0.3:
                    page.ask(step)
                decide = page.decide if is_first else page.follow
                if decide(step, safepoint):
                    stop = safepoint
                    break
            found.append(stop)
            if not step % APART:
                # Collectives keep ranks near each other; here this does.
                end.send(step)
                end.recv()
    end.send(found)


def test_ranks_abort_at_the_same_safepoint_whenever_they_are_told() -> None:
    # Forked: a spawned process would import all that this one has.
    context = multiprocessing.get_context("fork")
    rng = random.Random(2)
    with AbortPage.create() as page:
        ends, ranks = [], []
        for is_first in (True, False):
            mine, theirs = context.Pipe()
            told = {"is_first": is_first}
            rank = context.Process(
                target=_walk, args=(page.place, theirs), kwargs=told, daemon=True
            )
            rank.start()
            ends.append(mine)
            ranks.append(rank)
        for done in range(APART, STEPS + 1, APART):
            # Flags from outside, too: for steps that are over, run or come.
            page.ask(done - rng.randrange(2 * APART))
            for end in ends:
                assert end.poll(HANG_S), "a rank waits for ever"
                assert end.recv() == done
            for end in ends:
                end.send(None)
        found = []
        for end in ends:
            assert end.poll(HANG_S), "a rank waits for ever"
            found.append(end.recv())
        for rank in ranks:
            rank.join(HANG_S)
    assert found[0] == found[1]
    assert len(found[0]) == STEPS
    assert STEPS - found[0].count(-1) >= FLAGS, "each of these by a flag of its own"
    assert set(found[0]) == {-1, *range(SAFEPOINTS)}, "aborts everywhere, and steps without one"
