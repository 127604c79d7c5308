"""What one engine is given to run, and running it.

A `Share` is complete: prompts as token ids, estimated lengths, sampling fields, policy. It refers
to no file and to no other share, so it may travel to another machine. `ShareRun` takes it through
an engine step by step, called by the command's own loop or by an actor on a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from aqua_batch.engine import BatchEngine
from aqua_batch.feed import BlendFeed
from aqua_batch.outputs import RowOutput
from aqua_batch.policies import Policy, policy_for
from aqua_batch.tokenization import Prompts
from aqua_schedulers.blendserve import LengthEstimate, PreparedPool, ResourceCost, prepare


@dataclass(frozen=True, eq=False)
class Share:
    """Rows for one engine.

    Attributes:
        lengths: Estimates, one for each row, made from all rows of the batch.
        sampling: Sampling fields of each row, `max_tokens` among them.
        prepared: The rows in order, where the caller has worked that out already.
    """

    prompts: Prompts
    lengths: LengthEstimate
    sampling: Sequence[Mapping[str, Any]]
    policy: Policy
    cost: ResourceCost
    prepared: PreparedPool | None = None

    def packed(self) -> Share:
        """The share as it travels: nothing on this machine's disk, nothing that can be redone."""
        return replace(self, sampling=list(self.sampling), prepared=None)


class ShareRun:
    """A share on its way through an engine."""

    def __init__(self, share: Share, engine: BatchEngine) -> None:
        prepared = share.prepared or prepare(
            share.prompts.pool(), share.cost, lengths=share.lengths
        )
        facts = engine.facts
        policy = policy_for(
            share.policy,
            prepared,
            capacity_tokens=facts.capacity_tokens,
            max_step_tokens=facts.max_step_tokens,
        )
        self._feed = BlendFeed(policy, prepared.tree, engine, capacity_tokens=facts.capacity_tokens)
        self._engine = engine
        engine.serve(share.prompts.prompt, share.sampling.__getitem__)

    @property
    def left_count(self) -> int:
        """Rows without an answer."""
        return self._feed.left_count

    @property
    def running_count(self) -> int:
        """Rows that the engine works on."""
        return self._feed.running_count

    def step(self, now_s: float) -> list[RowOutput]:
        """Take one engine step; returns the answers that it brought."""
        self._feed.step(now_s)
        return self._engine.take_outputs()
