"""A consumer on a GPU that is not there, by random walks: bytes come back, no rule is broken.

The slice takes 4 walks of 100 operations, the whole tier 10^5 in all; a bug that walks can meet is
found in fewer than 10^4.
"""

from __future__ import annotations

from collections import Counter

import pytest

from aqua_protocol import AquaError
from harness.gpu_mends import MENDS, Mend
from harness.gpu_walk import walk
from harness.slices import SEED, examples

WALKS = 4
BUG_SEEDS = 50
BUG_OPERATIONS = 100


def test_bytes_come_back_and_no_rule_is_broken() -> None:
    done: Counter[str] = Counter()
    for number in range(WALKS):
        done += walk(WALKS * SEED + number, examples(100, whole=25_000))
    missing = {"attached", "reclaimed", "capture", "page_in", "fill_gpu"} - set(done)
    assert not missing, f"walks without {missing} show little"


@pytest.mark.parametrize(
    "mend", [mend for mend in MENDS if mend.is_met_by_walks], ids=lambda mend: mend.without
)
def test_walks_find_what_was_mended(mend: Mend) -> None:
    with mend.taken_back():
        for seed in range(BUG_SEEDS):
            try:
                walk(seed, BUG_OPERATIONS)
            except (AssertionError, AquaError):
                return
    pytest.fail(f"{BUG_SEEDS * BUG_OPERATIONS} operations do not show that {mend.without}")
