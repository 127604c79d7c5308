"""What the scheduler's half of paging has done, for metrics and tests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PagingCounts:
    """What was done so far; blocks unless named otherwise.

    Attributes:
        saved_blocks: Paged out for preempted requests.
        clean_blocks: Of preempted requests, in the store already.
        checkpointed_blocks: Paged out while their request ran.
        kept_blocks: Paged out for the prefix tier when their request finished.
        unsaved_blocks: Dropped for want of room in the store: their tokens are computed again.
        restored_tokens: Of preempted requests, loaded instead of computed.
        prefix_hit_tokens: Of new requests, loaded instead of computed.
        queried_tokens: Of new requests, looked up.
        lost_blocks: Not there when they were needed.
        evicted_requests: Evicted by an operator's command; counted by the scheduler.
        evicted_tokens: Of these, kept in the store.
        forced_preemptions: Requests that the policy preempted; counted by the scheduler.
    """

    saved_blocks: int = 0
    clean_blocks: int = 0
    checkpointed_blocks: int = 0
    kept_blocks: int = 0
    unsaved_blocks: int = 0
    restored_tokens: int = 0
    prefix_hit_tokens: int = 0
    queried_tokens: int = 0
    lost_blocks: int = 0
    evicted_requests: int = 0
    evicted_tokens: int = 0
    forced_preemptions: int = 0

    def totals(self) -> dict[str, float]:
        """What operators see, by the names of `operations.metrics`."""
        return {
            "evicted_requests": self.evicted_requests,
            "evicted_tokens": self.evicted_tokens,
            "forced_preemptions": self.forced_preemptions,
            "restored_tokens": self.restored_tokens,
            "prefix_queried_tokens": self.queried_tokens,
            "prefix_hit_tokens": self.prefix_hit_tokens,
            "unsaved_blocks": self.unsaved_blocks,
            "lost_blocks": self.lost_blocks,
        }
