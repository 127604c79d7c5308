"""The pool of requests that a plan is made for, and the plan's inputs in one place."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from aqua_protocol.errors import ConfigError
from aqua_schedulers.blendserve.lengths import (
    UNKNOWN,
    LengthEstimate,
    estimate_lengths,
)
from aqua_schedulers.blendserve.tree import PrefixTree


@dataclass(frozen=True, eq=False)
class RequestPool:
    """Offline requests, all known in advance; arrays have one entry per request.

    Attributes:
        tree: The prompts.
        known_tokens: Output lengths that the requests state themselves, UNKNOWN elsewhere.
        sampled_tokens: Output lengths found out by sampling, UNKNOWN elsewhere.
        limit_tokens: Most that each request may generate; None without limits.
    """

    tree: PrefixTree
    known_tokens: Int32[np.ndarray, " requests"]
    sampled_tokens: Int32[np.ndarray, " requests"]
    limit_tokens: Int32[np.ndarray, " requests"] | None = None

    def __post_init__(self) -> None:
        count = self.tree.request_count
        for name in ("known_tokens", "sampled_tokens", "limit_tokens"):
            array = getattr(self, name)
            if array is not None and len(array) != count:
                raise ConfigError(f"{name} has {len(array)} entries, the tree {count} requests")
            if array is not None and np.any((array < 1) & (array != UNKNOWN)):
                raise ConfigError(f"{name} must be at least 1, or UNKNOWN")

    @property
    def request_count(self) -> int:
        """Requests of the pool."""
        return self.tree.request_count

    def estimate(self) -> LengthEstimate:
        """Output lengths as far as the pool knows them."""
        return estimate_lengths(
            self.tree, self.known_tokens, self.sampled_tokens, limit_tokens=self.limit_tokens
        )
