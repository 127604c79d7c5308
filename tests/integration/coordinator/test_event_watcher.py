"""Event streams are told of changes by a store that may stand still."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from aqua_coordinator import event_watcher
from aqua_coordinator.event_watcher import EventWatcher
from aqua_coordinator.store import open_pool
from aqua_coordinator.store.connection import close_pool
from aqua_protocol.supervision import SupervisedTask
from harness.bounds import HANG_S
from harness.store_servers import running_store


async def test_a_store_that_stands_still_is_left_and_asked_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(event_watcher, "BLOCK_MS", 50)
    with running_store() as store:
        pool = open_pool(store.url, connect_timeout_s=HANG_S, max_connections=2)
        watcher = EventWatcher(pool)
        watcher.listeners = 1
        assert store.pid is not None
        os.kill(store.pid, signal.SIGSTOP)
        try:
            async with asyncio.timeout(HANG_S), SupervisedTask(watcher.run, "event-watcher"):
                # It has connected, which the kernel answers, and waits for the first word.
                await watcher.next_change()
        finally:
            os.kill(store.pid, signal.SIGCONT)
            await close_pool(pool)
