"""A consumer on a GPU that is not there, by random walks: bytes come back, no rule is broken.

The slice takes a few episodes and two planted bugs, drawn by the seed; the whole tier (`make
gpu-walk`) 10^5 operations, and each planted bug, which is to be found in 10^4.
"""

from __future__ import annotations

from collections import Counter

import pytest

from harness.gpu_mends import MENDS
from harness.gpu_walk import EPISODE, walk
from harness.mend import Mend
from harness.slices import IS_WHOLE, SEED, examples, shuffled

WALKS = examples(4, whole=20)
"""Of the whole tier each is a test: a slow machine takes minutes for one."""
BUG_OPERATIONS = 10_000
PLANTED = shuffled([mend for mend in MENDS if IS_WHOLE or mend.is_met_by_walks], key="planted")


@pytest.mark.parametrize("first", range(0, WALKS, examples(WALKS, whole=1)))
def test_bytes_come_back_and_no_rule_is_broken(first: int) -> None:
    done: Counter[str] = Counter()
    for number in range(first, first + examples(WALKS, whole=1)):
        count, episode = examples(EPISODE, whole=100_000 // WALKS), examples(EPISODE, whole=500)
        done += walk(WALKS * SEED + number, count, episode=episode)
    wanted = {"reclaim", "capture", "page_in", "fill_gpu", "give_up", "blocks_in"}
    wanted |= {"attached", "reclaimed", "killed"} if IS_WHOLE else set()
    assert not wanted - set(done), f"walks without {wanted - set(done)} show little"


@pytest.mark.parametrize("mend", PLANTED[: examples(2, whole=len(MENDS))], ids=lambda m: m.without)
def test_walks_find_what_was_mended(mend: Mend) -> None:
    with mend.taken_back():
        for seed in range(BUG_OPERATIONS // EPISODE):
            try:
                walk(seed, EPISODE)
            except Exception:  # noqa: BLE001 - a bug may show as anything
                return
    pytest.fail(f"{BUG_OPERATIONS} operations do not show that {mend.without}")
