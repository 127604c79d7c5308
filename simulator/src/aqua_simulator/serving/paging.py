"""Where a preempted request's context goes: nowhere, host memory, or a peer's HBM.

vLLM drops the context and computes it again. An engine with Aqua pages it out and in over a link.
The link works beside the GPU: with overlap a step lasts as long as the longer of both, without it
the copy comes on top.

Source: Aqua sections 3 and 7.
"""

from __future__ import annotations

from dataclasses import dataclass

from aqua_protocol.errors import ConfigError
from aqua_schedulers.cfs import PagingTier


@dataclass(slots=True)
class PageStore:
    """A bounded store behind a link.

    Attributes:
        capacity_tokens: Tokens of KV cache that fit.
        link_bytes_per_s: Rate of the link, the same both ways.
        location: As the policy is told.
        is_overlapped: Whether copies hide behind computation.
    """

    name: str
    capacity_tokens: int
    link_bytes_per_s: float
    is_overlapped: bool = True
    location: PagingTier = PagingTier.PEER
    used_tokens: int = 0
    paged_out_tokens: int = 0
    paged_in_tokens: int = 0

    def __post_init__(self) -> None:
        if self.link_bytes_per_s <= 0:
            raise ConfigError(f"{self.name}: the link rate must be positive")

    def put(self, tokens: int) -> bool:
        """Take a context in; False, and no change, if it does not fit."""
        if self.used_tokens + tokens > self.capacity_tokens:
            return False
        self.used_tokens += tokens
        self.paged_out_tokens += tokens
        return True

    def take(self, tokens: int, *, keep: bool = False) -> None:
        """Give a context back; one to keep is a cached prefix, which takes no room of the store."""
        if not keep:
            assert tokens <= self.used_tokens, (tokens, self.used_tokens)
            self.used_tokens -= tokens
        self.paged_in_tokens += tokens
