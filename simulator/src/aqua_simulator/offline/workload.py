"""An offline workload as arrays: requests, and the prefix tree their prompts form.

The engine needs no token ids. It needs to know which part of a prompt is shared with whom, so a
prompt is a path in a tree whose nodes carry token counts. Trees come from a planner that read real
tokens, or from a generator that knows its segments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Int64

from aqua_protocol.errors import ConfigError


@dataclass(frozen=True, eq=False)
class OfflineWorkload:
    """Requests over a prefix tree.

    Attributes:
        node_parent: Parent of each node; -1 for a root. A parent's index is below its children's.
        node_tokens: Tokens that the node adds to its parent's path.
        leaf: Node at which each request's prompt ends; equal prompts end at one node.
        output_tokens: Tokens that each request will generate, at least 1.
        known_output: Whether the length is known in advance (generation media).
    """

    node_parent: Int64[np.ndarray, " nodes"]
    node_tokens: Int64[np.ndarray, " nodes"]
    leaf: Int64[np.ndarray, " requests"]
    output_tokens: Int64[np.ndarray, " requests"]
    known_output: Bool[np.ndarray, " requests"]

    def __post_init__(self) -> None:
        count = len(self.leaf)
        if count == 0:
            raise ConfigError("the workload has no requests", remedy="Add at least one request.")
        for name in ("output_tokens", "known_output"):
            if len(getattr(self, name)) != count:
                raise ConfigError(f"{name} has {len(getattr(self, name))} rows, leaf has {count}")
        if np.any(self.output_tokens < 1) or np.any(self.node_tokens < 0):
            raise ConfigError("output_tokens must be at least 1 and node_tokens at least 0")
        if np.any(self.node_parent >= np.arange(len(self.node_parent))):
            raise ConfigError("node_parent must name nodes of lower index")

    @property
    def request_count(self) -> int:
        """Requests of the workload."""
        return len(self.leaf)

    @cached_property
    def node_depth_tokens(self) -> Int64[np.ndarray, " nodes"]:
        """Tokens from the root to the end of each node, shape (num_nodes,)."""
        depth = np.array(self.node_tokens, dtype=np.int64)
        for node in range(len(depth)):
            parent = self.node_parent[node]
            if parent >= 0:
                depth[node] += depth[parent]
        return depth

    @cached_property
    def prompt_tokens(self) -> Int64[np.ndarray, " requests"]:
        """Prompt length of each request, shape (num_requests,)."""
        prompts: Int64[np.ndarray, " requests"] = self.node_depth_tokens[self.leaf]
        return prompts

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens of all requests: the numerator of the paper's throughput."""
        return int(self.prompt_tokens.sum() + self.output_tokens.sum())

    @cached_property
    def used_nodes(self) -> Bool[np.ndarray, " nodes"]:
        """Whether each node is part of some prompt, shape (num_nodes,)."""
        used = np.zeros(len(self.node_parent), dtype=bool)
        used[self.leaf] = True
        for node in range(len(used) - 1, -1, -1):
            if used[node] and self.node_parent[node] >= 0:
                used[self.node_parent[node]] = True
        return used

    @property
    def distinct_prompt_tokens(self) -> int:
        """Prompt tokens if every shared prefix is computed exactly once."""
        return int(self.node_tokens[self.used_nodes].sum())

    @property
    def optimal_sharing(self) -> float:
        """Share of all tokens, prompts and outputs, that perfect prefix sharing saves."""
        saved = int(self.prompt_tokens.sum()) - self.distinct_prompt_tokens
        return saved / self.total_tokens
