"""Whose turn it is when one token sends more than there is room for."""

from __future__ import annotations

import asyncio

from aqua_coordinator.http.token_queue import IN_WORK_BYTES, Place, TokenQueue

HALF = IN_WORK_BYTES // 2


async def _turns(*tasks: asyncio.Task[Place]) -> list[bool]:
    """Which of them have their place, when nothing happens any more."""
    for _ in range(10):
        await asyncio.sleep(0)
    return [task.done() for task in tasks]


async def test_what_is_more_than_the_room_waits_in_line() -> None:
    queue = TokenQueue()
    first = await queue.enter(HALF)
    large, small = (asyncio.create_task(queue.enter(size)) for size in (4 * IN_WORK_BYTES, 1))
    assert await _turns(large, small) == [False, False], "small ones would pass it for ever"
    first.leave()
    assert await _turns(large, small) == [True, False], "it has the room to itself"
    (await large).leave()
    assert await _turns(small) == [True]
    (await small).leave()
    await queue.enter(IN_WORK_BYTES)


async def test_one_that_is_given_up_takes_no_room() -> None:
    queue = TokenQueue()
    first = await queue.enter(IN_WORK_BYTES)
    waiting, called, last = (asyncio.create_task(queue.enter(HALF)) for _ in range(3))
    assert await _turns(waiting, called, last) == [False] * 3
    waiting.cancel()
    first.leave()
    called.cancel()  # Its turn has come, and it does not know yet.
    assert await _turns(waiting, called, last) == [True] * 3
    assert waiting.cancelled()
    assert called.cancelled()
    (await last).leave()
    await queue.enter(IN_WORK_BYTES)
