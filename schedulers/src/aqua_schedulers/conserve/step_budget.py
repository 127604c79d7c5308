"""StepBudget: what the unified scheduler has decided of a step so far, and what still fits into it.

Source: ConServe Algorithm 1, whose budgets it holds: tau, tau_off, and those that it lacks for
memory and the number of requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from aqua_schedulers.conserve.profile import StepLoad
from aqua_schedulers.conserve.step_time import StepTimes
from aqua_schedulers.conserve.views import CoServedRequest


@dataclass(slots=True)
class StepBudget:
    """What of a step is decided.

    Attributes:
        load: Of online and offline requests together.
        limit_s: For the ordinary offline work of the step; `hard_limit_s` for that which is due,
            `starved_limit_s` for the starved request. `kept_s` is the widest that has let any in.
        own_s: Part of these limits that needs no margin (`StepTimes.allows`).
        token_room: Tokens that the step still takes.
        free_blocks: Blocks that nothing holds or is about to take.
        slots: Requests that may still come in.
        has_prompts: Whether online prompts take part.
        is_calm: Whether no online request does.
        preempt: Requests that leave memory for it.
        offline_tokens: Of each offline request; `offline_sum` of all.
    """

    load: StepLoad
    limit_s: float
    hard_limit_s: float
    starved_limit_s: float
    kept_s: float
    own_s: float
    token_room: int
    free_blocks: int
    slots: int
    has_prompts: bool
    is_calm: bool
    preempt: list[str] = field(default_factory=list)
    offline_tokens: dict[str, int] = field(default_factory=dict)
    offline_sum: int = 0

    def give(self, request: CoServedRequest, tokens: int, blocks: int) -> None:
        """Let an offline request compute so many tokens, with so many further blocks."""
        self.offline_tokens[request.request_id] = tokens
        self.offline_sum += tokens
        self.token_room -= tokens
        self.free_blocks -= blocks
        if request.is_decode:
            self.load = self.load.and_decode(request.known_tokens)
        else:
            self.load = self.load.and_chunk(tokens, request.computed_tokens)

    def is_full(self, times: StepTimes) -> bool:
        """Whether no ordinary request can have a token, whichever it is, now or later.

        Nothing takes less than a decode without context. In a calm step some token always fits.
        """
        least = self.load.and_decode(0)
        tokens = self.offline_sum + 1
        return not self.is_calm and not times.allows(least, self.limit_s, tokens, self.own_s)
