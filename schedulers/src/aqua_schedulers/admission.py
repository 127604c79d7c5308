"""What an offline admission policy and a runtime say to each other, step by step.

The runtime owns memory and time; the policy owns order and pace. Once per engine step the runtime
shows its counters and the events since the last step, the policy answers with the requests to add
and with the tokens that the step may compute. The simulator's virtual engine and the feed of a
real vLLM show the same `BatchView`, so what is judged in simulation is what runs.

What becomes of an admission: the runtime admits from the front of the list while the prompts find
physical room and refuses the rest. Whether the outputs will find room later is the policy's guess;
where it guessed wrong the runtime retracts requests and shows them as `retracted`: they are the
policy's again, and it must offer them once more. A policy thus names each request exactly once,
plus once for every time it was refused or retracted.

Observed output lengths come back through `finished` and `finished_tokens`; a policy that learns
compares them with its estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from jaxtyping import Int32

Requests = Int32[np.ndarray, " requests"]
"""Indices into the pool that the policy was built for."""

NO_REQUESTS: Final[Requests] = np.empty(0, np.int32)


@dataclass(slots=True)
class BatchView:
    """The engine before a step; valid during one call, the engine may reuse it.

    Attributes:
        capacity_tokens: Physical tokens that fit; those not in use hold cached prefixes.
        step_index: Steps taken so far.
        now_s: Time on the runtime's clock.
        decoding_count: Requests that generate a token in every step.
        prefilling_count: Admitted requests whose prompt is not computed yet.
        pending_prefill_tokens: Prompt tokens that these still have to compute.
        logical_kv_tokens: What decode attention reads: the sum of contexts of decoding requests,
            a shared prefix counted once per request.
        physical_kv_tokens: What is in use in memory, a shared prefix counted once.
        finished: Requests that ended since the last call, in order.
        finished_tokens: Output tokens that each of `finished` generated; empty from a runtime
            that does not count them, in which case the policy counts steps.
        retracted: Requests thrown out of memory since the last call; they keep their generated
            tokens and compute them again as prompt.
        refused: Requests of the last plan for which there was no physical room.
    """

    capacity_tokens: int
    step_index: int = 0
    now_s: float = 0.0
    decoding_count: int = 0
    prefilling_count: int = 0
    pending_prefill_tokens: int = 0
    logical_kv_tokens: int = 0
    physical_kv_tokens: int = 0
    finished: Requests = field(default_factory=lambda: NO_REQUESTS)
    finished_tokens: Requests = field(default_factory=lambda: NO_REQUESTS)
    retracted: Requests = field(default_factory=lambda: NO_REQUESTS)
    refused: Requests = field(default_factory=lambda: NO_REQUESTS)

    @property
    def has_events(self) -> bool:
        """Whether a request finished, was thrown out or was refused since the last call."""
        return bool(len(self.finished) or len(self.retracted) or len(self.refused))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A policy's answer.

    Attributes:
        admit: Requests to add now, most wanted first.
        token_budget: Tokens of the step, decoding requests (one each) included. Decoding requests
            always run; prefill fills what is left. A runtime whose budget is fixed ignores it:
            the policy never admits much more prompt than the budget can compute.
        until_event: The runtime may repeat the step, with this budget and no admission, until a
            request finishes or is retracted, or the pending prefill is done.
    """

    admit: Requests | Sequence[int]
    token_budget: int
    until_event: bool = False


class AdmissionPolicy(Protocol):
    """Decides what joins the batch and how many tokens a step may compute."""

    def plan(self, view: BatchView) -> StepPlan:
        """The next step's plan; called once per step."""
        ...
