"""Matching within a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aqua_placer.problem.parser import instance_from
from aqua_placer.value.matches import ServerMatch, match_servers
from aqua_protocol.plan import MatchingMode
from harness.matching import blocking_pairs


def matched(
    sizes: list[float],
    mode: MatchingMode,
    tp: list[int] | None = None,
    links: list[list[float]] | None = None,
    weight: list[float] | None = None,
) -> ServerMatch:
    shards = tp or [1] * len(sizes)
    total = sum(shards)
    columns: dict[str, Any] = {
        "name": [f"g{i}" for i in range(len(sizes))],
        "tp": shards,
        "r_gb": sizes,
    }
    if weight:
        columns["weight"] = weight
    server: dict[str, Any] = {"count": 1, "gpus": total, "hbm_gb": 80}
    if links:
        server["links"] = links
    instance = instance_from({"servers": [server], "groups": columns})
    slots = np.full((1, total), -1, dtype=np.int64)
    slots[0, : len(sizes)] = np.arange(len(sizes))
    at, gpus = 0, []
    for count in shards:
        gpus.append(list(range(at, at + count)))
        at += count
    return match_servers(instance, slots, gpus, mode)[0]


def pairs(match: ServerMatch) -> dict[int, list[int]]:
    return {s.consumer.group: [x.group for x in s.producers] for s in match.served_groups}


def test_the_neediest_consumer_gets_the_most_spare() -> None:
    match = matched([50, 20, -10, -40], MatchingMode.STABLE)
    assert pairs(match) == {3: [0], 2: [1]}
    assert match.covered_gb == 50
    assert blocking_pairs(match) == []


def test_a_swapped_matching_is_found_to_block() -> None:
    match = matched([50, 20, -10, -40], MatchingMode.STABLE)
    first, second = match.served_groups
    swapped = ServerMatch(
        0,
        (
            type(first)(first.consumer, second.producers),
            type(second)(second.consumer, first.producers),
        ),
        (),
        (),
    )
    assert len(blocking_pairs(swapped)) == 1


def test_an_idle_producer_beside_an_unserved_consumer_blocks() -> None:
    match = matched([50, -10], MatchingMode.STABLE)
    service = match.served_groups[0]
    apart = ServerMatch(0, (), (service.consumer,), service.producers)
    assert len(blocking_pairs(apart)) == 1


def test_best_fit_satisfies_more_consumers_in_full() -> None:
    sizes = [30.0, 20.0, -30.0, -25.0, -15.0]
    stable, best_fit = (
        matched(sizes, mode) for mode in (MatchingMode.STABLE, MatchingMode.BEST_FIT)
    )

    def satisfied(match: ServerMatch) -> int:
        return sum(s.covered_gb >= s.consumer.gb for s in match.served_groups)

    assert (satisfied(stable), satisfied(best_fit)) == (1, 2)
    assert stable.covered_gb >= best_fit.covered_gb


def test_a_lockstep_group_is_served_whole_or_not_at_all() -> None:
    match = matched([40, 10, -30], MatchingMode.EXACT, tp=[1, 1, 2])
    assert pairs(match) == {2: [0, 1]}
    assert match.covered_gb == 20
    lonely = matched([40, -30], MatchingMode.EXACT, tp=[1, 2])
    assert pairs(lonely) == {}


def test_exact_leaves_a_group_out_when_singles_cover_more() -> None:
    match = matched([40, 10, -30, -39], MatchingMode.EXACT, tp=[1, 1, 2, 1])
    assert pairs(match) == {3: [0]}
    assert match.covered_gb == 39


def test_weights_decide_who_is_served() -> None:
    heavy_first = matched([40, -30, -20], MatchingMode.EXACT, weight=[1, 1, 2])
    assert pairs(heavy_first) == {2: [0]}


def test_the_neediest_of_one_weight_is_served_where_less_needy_ones_would_cover_as_much() -> None:
    """Pairs of many weights make many kinds, so that sets of groups decide who is served."""
    weight = [1.0, 1.1, 1.2, 1.3, 1.4]
    match = matched(
        [10, 5, -20, -25, -30, *(-10 for _ in weight)],
        MatchingMode.STABLE,
        tp=[1] * 5 + [2] * len(weight),
        weight=[2.0] * 5 + weight,
    )
    assert blocking_pairs(match) == []
    assert pairs(match) == {4: [0], 3: [1]}


def test_links_prefer_the_fast_pair_over_the_large_one() -> None:
    links = [[0, 0, 1, 9], [0, 0, 9, 1], [1, 9, 0, 0], [9, 1, 0, 0]]
    fast = matched(
        [40, 38, -40, -38], MatchingMode.LINKS, links=[list(map(float, r)) for r in links]
    )
    assert pairs(fast) == {2: [1], 3: [0]}


def test_gpus_without_a_link_are_not_matched() -> None:
    links = [[0.0, 0.0], [0.0, 0.0]]
    assert pairs(matched([40, -30], MatchingMode.LINKS, links=links)) == {}


@pytest.mark.parametrize("mode", list(MatchingMode))
def test_a_server_of_one_role_matches_nobody(mode: MatchingMode) -> None:
    assert pairs(matched([10, 20, 30], mode)) == {}
    assert pairs(matched([-10, -20], mode)) == {}
