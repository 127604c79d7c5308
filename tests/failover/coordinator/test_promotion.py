"""A replica that becomes the master: it goes on where the other was, also by a wrong clock."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from aqua_coordinator.store import Pipeline, open_pool
from aqua_protocol import LeaseState
from harness.bounds import HANG_S, until
from harness.ledger_room import LedgerRoom
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer
from harness.redis_nodes import RedisNode, replicated, skewed
from harness.store_servers import short_directory

HOUR_S: Final = 3600


@asynccontextmanager
async def books(node: RedisNode, min_replicas: int) -> AsyncIterator[LedgerRoom]:
    """The books at a node."""
    pool = open_pool(node.url, connect_timeout_s=HANG_S, max_connections=4)
    pipeline = Pipeline(pool, timeout_s=HANG_S, min_replicas=min_replicas)
    pipeline.start()
    try:
        yield LedgerRoom(node.url, pipeline)
    finally:
        await pipeline.close()


def promote(new: RedisNode, other: RedisNode, old: RedisNode) -> None:
    """Lose the master, and let `other` follow `new`."""
    old.kill()
    new.command("REPLICAOF", "NO", "ONE")
    other.command("REPLICAOF", "127.0.0.1", new.port)
    until(lambda: other.info()["master_link_status"] == "up", f"{other} does not follow {new}")


@pytest.mark.parametrize("skew_s", [-HOUR_S, 0, HOUR_S], ids=["behind", "in step", "ahead"])
async def test_epochs_grow_and_nothing_ages_when_the_new_masters_clock_is_wrong(
    skew_s: int, tmp_path: Path
) -> None:
    environments = skewed(tmp_path, [0, skew_s, 0])
    producer, consumer = PaperProducer(), PaperConsumer()
    with (
        short_directory() as directory,
        replicated(directory, environments=environments) as (old, new, other),
    ):
        async with books(old, 2) as room:
            await room.join(producer)
            await room.hear(consumer)
            attached = await room.attached(producer, consumer)
            granted = (await room.grant(consumer, key="before")).lease
            ended = (await room.grant(consumer, key="ended")).lease
            view = await room.ledger.release_lease(
                ended.lease_id, epoch=ended.epoch, as_consumer=None
            )
            fence = view.epoch
        promote(new, other, old)
        async with books(new, 1) as room:
            assert await room.sweep() == 0, "a jump of the clock is no time that passed"
            assert (await room.ledger.lease(attached.lease_id)).state is LeaseState.ACTIVE
            if skew_s <= 0:  # A clock that is ahead forgets answers too soon.
                again = await room.grant(consumer, key="before")
                assert (again.lease.lease_id, again.lease.epoch) == (
                    granted.lease_id,
                    granted.epoch,
                )
            later = [(await room.grant(consumer, key=f"after-{n}")).lease for n in range(3)]
            epochs = [attached.epoch, granted.epoch, ended.epoch, *(one.epoch for one in later)]
            assert epochs == sorted({*epochs})
            assert fence > ended.epoch
            assert (await room.tell(producer)).grantable
            await room.hear(consumer)
            assert (await room.ledger.producer(producer.name)).leased_bytes == 5 * SLAB
            await room.check()
