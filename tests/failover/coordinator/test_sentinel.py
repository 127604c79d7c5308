"""Failovers under Sentinels: what members were told is so afterwards, however the master died."""

from __future__ import annotations

import contextlib
import itertools
from pathlib import Path
from typing import Final

import pytest
import redis

from harness.failovers import KINDS, MEMBERS, FailoverRoom, failover_room, watched_nodes
from harness.redis_nodes import skewed
from harness.slices import IS_WHOLE, SEED, shuffled
from harness.store_servers import short_directory

FAILOVERS: Final = 110
"""Of each of the two runs in the whole tier, 220 together; in a slice, one of each kind in all."""
SKEWS_S: Final = (0, -30, 45)
"""How far each node's clock is off; a failover to the second turns time back by 75 s at times."""


def require_growing_epochs(room: FailoverRoom) -> None:
    """No epoch was issued twice, and none after a later one."""
    for member in room.members:
        assert all(one < next_one for one, next_one in itertools.pairwise(member.epochs))
    epochs = [epoch for member in room.members for epoch in member.epochs]
    assert len({*epochs}) == len(epochs)


@pytest.mark.parametrize("clocks", ["in step", "skewed"])
async def test_no_acknowledged_lease_or_release_is_lost_and_no_epoch_issued_twice(
    clocks: str, tmp_path: Path
) -> None:
    environments = skewed(tmp_path, SKEWS_S) if clocks == "skewed" else None
    kinds = shuffled(KINDS)
    if IS_WHOLE:
        kinds = list(itertools.islice(itertools.cycle(kinds), FAILOVERS))
    else:
        kinds = kinds[:2] if environments is None else kinds[2:]
    with short_directory() as directory, watched_nodes(directory, environments) as nodes:
        async with failover_room(*nodes, min_replicas=2, seed=SEED) as room:
            for kind in kinds:
                refused = room.refusals
                await room.fail_over(kind)
                assert room.lost == [], f"after failover {room.failovers}, {kind}"
                assert room.refusals > refused, "the master was not lost under load"
                require_growing_epochs(room)
    assert room.failovers == len(kinds)


async def test_without_waiting_for_replicas_acknowledged_leases_are_lost() -> None:
    with short_directory() as directory, watched_nodes(directory) as nodes:
        async with failover_room(*nodes, min_replicas=0, seed=SEED) as room:
            await room.fail_over("isolate")
            assert room.lost


async def test_members_that_a_master_does_not_know_report_anew_and_are_served() -> None:
    with short_directory() as directory, watched_nodes(directory) as (nodes, sentinels):
        async with failover_room(nodes, sentinels, min_replicas=0, seed=SEED) as room:
            await room.wait_for(MEMBERS)
            for node in nodes:
                with contextlib.suppress(redis.ReadOnlyError):
                    node.command("FLUSHALL")
            await room.wait_for(2 * MEMBERS)  # Of these, as many may have been on their way.
            assert any("has not reported yet" in said for one in room.members for said in one.lost)
