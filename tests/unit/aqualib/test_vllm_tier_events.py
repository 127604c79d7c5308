"""What routers hear of the prefix tier: what is there, and nothing twice."""

from __future__ import annotations

import random
from collections.abc import Hashable

from aqualib.engines.vllm.paging.block_table import BlockTable
from aqualib.engines.vllm.paging.tier_events import TierEvents


def test_a_listener_knows_what_the_table_has_after_each_step() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        table = BlockTable(6)
        events = TierEvents(table)
        heard: set[Hashable] = set()
        filling: list[int] = []
        keys: list[Hashable] = [bytes([at]) for at in range(8)] + [
            (bytes([at]), 1) for at in range(4)
        ]
        for _ in range(200):
            key = rng.choice(keys)
            match rng.randrange(5):
                case 0 if not table.is_known(key):
                    place = table.begin(key)
                    filling += [] if place is None else [place]
                case 1 if filling:
                    table.filled(filling.pop(rng.randrange(len(filling))))
                case 2 if table.is_known(key) <= bool(table.present([key])):
                    put = table.put(key, is_lasting=rng.random() < 0.8)
                    if put is not None:
                        table.release([put[0]])
                case 3:
                    table.lose(table.present([key]))
                case _ if rng.random() < 0.05:
                    table.keep_held()
            if rng.random() < 0.5:
                stored, removed = events.take()
                assert not heard & set(stored)
                assert heard >= set(removed)
                heard = (heard | set(stored)) - set(removed)
                assert heard == {each for each in keys if table.present([each])}


def test_blocks_that_only_their_request_finds_are_not_told_of() -> None:
    table = BlockTable(4)
    events = TierEvents(table)
    table.put(("r1", 0, 0))
    table.put(("r1", "tail", 5, 0))
    assert events.take() == ([], [])
