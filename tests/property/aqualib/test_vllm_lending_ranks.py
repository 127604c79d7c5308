"""All ranks give and take the same blocks: nothing is used before every one has agreed.

Histories are drawn by seed; two controls show that they find what they look for.
"""

from __future__ import annotations

import pytest

from harness.lagging_ranks import History

SEEDS = range(200)
EVENTS = 120


def test_no_rank_lacks_memory_that_is_used_whatever_the_others_do() -> None:
    lent = late = 0
    for seed in SEEDS:
        history = History(seed)
        history.run(EVENTS)
        lent += history.lent_count
        late += history.late_count
    assert lent > len(SEEDS) // 2, "hardly anything was lent"
    assert late > len(SEEDS) // 4, "hardly any rank was late"


def test_a_rank_that_dies_costs_blocks_and_the_engine_goes_on() -> None:
    for seed in SEEDS:
        history = History(seed)
        history.run(EVENTS // 2) if seed % 2 else history.meanwhile()
        history.kill()
        history.run(EVENTS // 2)
        while history.requests:
            history.finish()
        assert history.pool.get_num_free_blocks() >= 1, "no request would ever run again"


@pytest.mark.parametrize("missing", ["is_acknowledged", "waits_for_steps"])
def test_without_agreement_a_block_is_used_that_has_no_memory(missing: str) -> None:
    broken = 0
    for seed in SEEDS:
        try:
            History(seed, **{missing: False}).run(EVENTS)
        except AssertionError:
            broken += 1
    assert broken > len(SEEDS) // 20, f"{broken} of {len(SEEDS)} histories would have shown it"
