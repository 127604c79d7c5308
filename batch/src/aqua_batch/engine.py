"""What the feed wants of an engine.

Apart from the feed because an engine must be startable before any policy is loaded: vLLM's CPU
build scans all loaded modules when it starts, and trips over the wrappers that llvmlite (under
numba, under the policies) leaves in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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


class Engine(Protocol):
    """An engine as the feed sees it; requests are indices into the pool."""

    def submit(self, request: int) -> None:
        """Add a request to what the engine works on."""
        ...

    def step(self, token_budget: int) -> StepEvents:
        """Take one step. An engine with a budget of its own ignores `token_budget`."""
        ...
