"""One engine on one node of a Ray cluster.

The class is what Ray calls an actor once `ray_fleet` has wrapped it: a process of its own, whose
methods run one after another. Expected failures come back as values (`ErrorBody`), because the
driver must tell a model that cannot be served from a process that died.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from aqua_batch.engine import BatchEngine, CacheCounters, EngineProperties
from aqua_protocol.errors import AquaError, ErrorBody

if TYPE_CHECKING:
    from aqua_batch.feed import BlendFeed, Share
    from aqua_batch.fleet import Report

EngineFactory = Callable[[], BatchEngine]


class EngineActor:
    """An engine and the share that it works on."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._engine: BatchEngine | None = None
        self._feed: BlendFeed | None = None

    def host(self) -> str:
        """Name of the machine; answers as soon as Ray has placed the process."""
        return socket.gethostname()

    def start(
        self, make_engine: EngineFactory, environment: Mapping[str, str]
    ) -> EngineProperties | ErrorBody:
        """Start the engine.

        Args:
            environment: Variables for it; a worker's own are those that Ray was started with.
        """
        os.environ.update(environment)
        try:
            self._engine = make_engine()
        except AquaError as error:
            return error.to_body()
        return self._engine.facts

    def begin(self, share: Share) -> None:
        """Prepare a share."""
        from aqua_batch.feed import BlendFeed

        assert self._engine is not None, "not started"
        assert self._feed is None, "the last share has not ended"
        self._feed = BlendFeed.of(share, self._engine)

    def advance(self, for_s: float) -> Report:
        """Take steps for about that long, or until the share ends."""
        from aqua_batch.fleet import Report

        feed, engine = self._feed, self._engine
        if feed is None or engine is None:
            return Report(self._node, [], 0, 0)
        end_s = time.monotonic() + for_s
        while feed.left_count > 0:
            feed.step(time.monotonic())
            if time.monotonic() >= end_s:
                break
        if feed.left_count == 0:
            self._feed = None
        return Report(self._node, engine.take_outputs(), feed.running_count, feed.left_count)

    def cache_counters(self) -> CacheCounters:
        """The engine's own counters."""
        assert self._engine is not None, "not started"
        return self._engine.cache_counters()
