"""An offline workload as arrays: requests, and the prefix tree their prompts form.

The engine needs no token ids. It needs to know which part of a prompt is shared with whom, so a
prompt is a path in a tree whose nodes carry token counts. Trees come from a planner that read real
tokens, or from a generator that knows its segments.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int64

from aqua_protocol.errors import ConfigError
from aqua_schedulers.blendserve.tree import PrefixTree


@dataclass(frozen=True, eq=False)
class OfflineWorkload:
    """Requests over a prefix tree.

    Attributes:
        tree: Of their prompts.
        output_tokens: Tokens that each request will generate, at least 1.
        known_output: Whether the length is known in advance (generation media).
    """

    tree: PrefixTree
    output_tokens: Int64[np.ndarray, " requests"]
    known_output: Bool[np.ndarray, " requests"]

    def __post_init__(self) -> None:
        count = self.request_count
        if count == 0:
            raise ConfigError("the workload has no requests", remedy="Add at least one request.")
        for name in ("output_tokens", "known_output"):
            if len(getattr(self, name)) != count:
                raise ConfigError(f"{name} has {len(getattr(self, name))} rows, not {count}")
        if np.any(self.output_tokens < 1) or np.any(self.tree.edge_tokens < 0):
            raise ConfigError("output_tokens must be at least 1 and edge_tokens at least 0")

    @property
    def request_count(self) -> int:
        """Requests of the workload."""
        return self.tree.request_count

    @property
    def prompt_tokens(self) -> Int64[np.ndarray, " requests"]:
        """Prompt length of each request, shape (num_requests,)."""
        return self.tree.prompt_tokens

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens of all requests: the numerator of the paper's throughput."""
        return int(self.prompt_tokens.sum() + self.output_tokens.sum())

    @property
    def optimal_sharing(self) -> float:
        """Share of all tokens, prompts and outputs, that perfect prefix sharing saves."""
        return (int(self.prompt_tokens.sum()) - self.tree.distinct_tokens) / self.total_tokens
