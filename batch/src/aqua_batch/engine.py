"""What the feed and the fleets want of an engine.

An engine works on *rows*: one prompt and one answer each, known to it by their index in the share
that it serves (`feed`). Anything that steps can be one: a stock vLLM, the forecast's counting
engine, a test's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from aqua_batch.outputs import RowOutput


@dataclass(frozen=True, slots=True)
class StepEvents:
    """What a step brought.

    Attributes:
        started: Requests that generated their first token.
        finished: Requests that ended, and
        finished_tokens: what each of them generated.
    """

    started: Sequence[int]
    finished: Sequence[int]
    finished_tokens: Sequence[int]


class StepEngine(Protocol):
    """An engine as the feed sees it; requests are indices into the pool."""

    def submit(self, request: int) -> None:
        """Add a request to what the engine works on."""

    def step(self, token_budget: int) -> StepEvents:
        """Take one step. An engine with a budget of its own ignores `token_budget`."""


@dataclass(frozen=True, slots=True)
class CacheCounters:
    """An engine's own count of prompt tokens looked up in its prefix cache, and found there."""

    queried_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class EngineProperties:
    """What an engine says of itself.

    Attributes:
        capacity_tokens: KV tokens that fit.
        max_step_tokens: Most tokens of a step.
        longest_tokens: Prompt and answer that the model holds; None for no limit.
    """

    capacity_tokens: int
    max_step_tokens: int
    longest_tokens: int | None


class BatchEngine(StepEngine, Protocol):
    """An engine that makes answers of what it runs."""

    @property
    def facts(self) -> EngineProperties:
        """What it can hold and compute."""

    def serve(
        self, prompt_of: Callable[[int], list[int]], sampling_of: Callable[[int], Mapping[str, Any]]
    ) -> None:
        """Name the pool that the next requests are indices into: token ids, sampling fields."""

    def take_outputs(self) -> list[RowOutput]:
        """Completions since the last call."""

    def cache_counters(self) -> CacheCounters:
        """Its own prefix-cache counters, from its start."""
