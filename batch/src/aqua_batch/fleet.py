"""The engines that a run has, as one object: shares go in, answers and losses come out.

A fleet starts engines and carries shares to them; it decides nothing about requests. What is lost
with an engine is the run's affair (`batch_run`), which alone knows what has been answered. Nodes
are numbers from 0; one that is lost and comes back, on the same machine or another, keeps its
number.

`LocalFleet` is one engine in this process. `ray_fleet` has engines on the nodes of a Ray cluster.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from aqua_batch.engine import BatchEngine, CacheCounters, EngineProperties
from aqua_batch.feed import BlendFeed, Share
from aqua_batch.outputs import RowOutput


@dataclass(frozen=True, slots=True)
class Report:
    """A node has worked on its share.

    Attributes:
        answers: New answers, by index in the share.
        running, left: Rows that the engine works on, and rows without an answer.
    """

    node: int
    answers: list[RowOutput]
    running: int
    left: int


@dataclass(frozen=True, slots=True)
class Lost:
    """A node's engine is gone, and what it had not reported with it."""

    node: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ready:
    """A node that was lost has an engine again, without a share."""

    node: int


Event = Report | Lost | Ready


class Fleet(Protocol):
    """Engines; each works on one share at a time."""

    @property
    def facts(self) -> EngineProperties:
        """What all engines can hold: the least of each."""

    def ready_nodes(self) -> list[int]:
        """Nodes that can be given a share, or work on one."""

    def begin(self, node: int, share: Share) -> None:
        """Give a share to a ready node whose last one has ended."""

    def wait(self) -> list[Event]:
        """Block until something happens.

        Raises:
            UnavailableError: No engine is left, and none comes back.
        """

    def cache_counters(self) -> CacheCounters:
        """Sum of the engines' own prefix-cache counters; lost engines are not in it."""


class LocalFleet:
    """One engine in this process. If it dies, so does the run."""

    def __init__(self, engine: BatchEngine) -> None:
        self._engine = engine
        self._feed: BlendFeed | None = None

    @property
    def facts(self) -> EngineProperties:
        """What the engine says."""
        return self._engine.facts

    def ready_nodes(self) -> list[int]:
        """The one engine, always."""
        return [0]

    def begin(self, node: int, share: Share) -> None:
        """Give the engine its share."""
        assert node == 0 and self._feed is None, f"node {node} is not idle"  # noqa: PT018 - one condition
        self._feed = BlendFeed.of(share, self._engine)

    def wait(self) -> list[Event]:
        """Take one step."""
        feed = self._feed
        assert feed is not None, "nothing to wait for"
        feed.step(time.monotonic())
        if feed.left_count == 0:
            self._feed = None
        return [Report(0, self._engine.take_outputs(), feed.running_count, feed.left_count)]

    def cache_counters(self) -> CacheCounters:
        """The engine's own counters."""
        return self._engine.cache_counters()
