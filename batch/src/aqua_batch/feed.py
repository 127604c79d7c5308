"""Feeds an engine in the order and at the pace of a policy: the BlendScheduler's client side.

A `Share` is what one engine is given to run. It is complete: prompts as token ids, estimated
lengths, sampling fields, policy. It refers to no file and to no other share, so it may travel to
another machine. `BlendFeed.of` takes it through an engine, called by the command's own loop or by
an actor on a node.

A stock engine takes requests whenever it is given some, and hides what it does with them. The feed
therefore holds requests back, adds them as the policy says, and reckons from the engine's answers
what the policy wants to know: which requests decode, how much prompt is still to compute, how much
memory is in use. Prefix hits are predicted with a model of the engine's cache
(`PrefixCacheModel`). The token budget of a step is the engine's own; pace comes from admission.

What it promises: every request is submitted once, and the engine is never left without work
while there is some. It knows neither files nor vLLM: a `StepEngine` is anything that steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from aqua_batch.engine import BatchEngine, StepEngine, StepEvents
from aqua_batch.policies import Policy, policy_for
from aqua_batch.tokenization import Prompts
from aqua_protocol.errors import ConfigError
from aqua_schedulers.admission import AdmissionPolicy, BatchView
from aqua_schedulers.blendserve import (
    LengthEstimate,
    PrefixCacheModel,
    PrefixTree,
    PreparedPool,
    ResourceCost,
    prepare,
)


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
        """The share as it travels: nothing that can be redone."""
        return replace(self, prepared=None)


class BlendFeed:
    """Runs a pool through an engine that holds so many KV tokens, one step per call."""

    def __init__(
        self, policy: AdmissionPolicy, tree: PrefixTree, engine: StepEngine, *, capacity_tokens: int
    ) -> None:
        self._policy = policy
        self._engine = engine
        self._prompt = tree.prompt_tokens
        self._cache = PrefixCacheModel(tree, capacity_tokens)
        self._missing: dict[int, int] = {}
        self._decoding: dict[int, int] = {}
        self._pending = 0
        self._logical = 0
        self._output = 0
        self._left = tree.request_count
        self._view = BatchView(capacity_tokens)

    @classmethod
    def of(cls, share: Share, engine: BatchEngine) -> BlendFeed:
        """A share on its way through an engine."""
        pool, facts = share.prompts.pool, engine.facts
        prepared = share.prepared or prepare(pool(), share.cost, lengths=share.lengths)
        policy = policy_for(
            share.policy,
            prepared,
            capacity_tokens=facts.capacity_tokens,
            max_step_tokens=facts.max_step_tokens,
        )
        engine.serve(share.prompts.prompt, share.sampling.__getitem__)
        return cls(policy, prepared.tree, engine, capacity_tokens=facts.capacity_tokens)

    @property
    def left_count(self) -> int:
        """Requests that have not ended."""
        return self._left

    @property
    def running_count(self) -> int:
        """Requests that the engine works on."""
        return len(self._missing) + len(self._decoding)

    def step(self, now_s: float) -> None:
        """Plan, submit, step, and book what happened.

        Raises:
            ConfigError: The policy admits nothing and nothing runs: it would wait for ever.
        """
        view = self._view
        view.now_s = now_s
        view.decoding_count = len(self._decoding)
        view.prefilling_count = len(self._missing)
        view.pending_prefill_tokens = self._pending
        view.logical_kv_tokens = self._logical
        view.physical_kv_tokens = self._cache.used_tokens + self._output
        plan = self._policy.plan(view)
        for request in np.asarray(plan.admit).tolist():
            missing = self._cache.hold(request)
            self._missing[request] = missing
            self._pending += missing
            self._engine.submit(request)
        if self.running_count == 0:
            raise ConfigError(
                f"the policy admits none of the {self._left} requests that are left",
                remedy="This is a defect of the policy; run with --policy dfs and report it.",
            )
        self._book(self._engine.step(plan.token_budget))
        view.step_index += 1

    def _book(self, events: StepEvents) -> None:
        # One token each for those that were decoding; an engine that did less (it preempted one)
        # shows it by finishing later, and the sums are put right then.
        self._logical += len(self._decoding)
        self._output += len(self._decoding)
        for request in events.started:
            self._pending -= self._missing.pop(request)
            self._decoding[request] = self._view.step_index
            self._logical += int(self._prompt[request]) + 1
            self._output += 1
        for request in events.finished:
            generated = self._view.step_index - self._decoding.pop(request) + 1
            self._logical -= int(self._prompt[request]) + generated
            self._output -= generated
            self._cache.release(request)
            self._left -= 1
        self._view.finished = np.array(events.finished, np.int32)
        self._view.finished_tokens = np.array(events.finished_tokens, np.int64)
