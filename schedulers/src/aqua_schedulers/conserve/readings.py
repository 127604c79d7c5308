"""Where the paper's policy and ours differ, behind one interface: `Reading`.

Both run Algorithm 1 as `policy` has it. They answer differently to: how long may a step with online
requests last, may offline work stand beside online prompts, and does an arrival abort the offline
step that is running.

The paper fills every step up to the objective, so online requests get what the objective promises.
Ours fills up to what an arrival can wait without its user seeing it, a small share of the
objective, so that they get nearly what an engine of their own would give them; and it aborts
offline steps for each arrival, because aborted work is cheap where a step is cut down after an
abort and grows again in calm (`policy`). Where nothing says what online requests take alone, on the
fixed budget (`step_time`), a small share of it is nothing: offline work has the other steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol

from aqua_schedulers.conserve.views import CoServedRequest


@dataclass(frozen=True, slots=True)
class Objectives:
    """What online users are promised (their SLO), in seconds.

    Attributes:
        ttft_s: Time to the first token.
        tpot_s: Time between two tokens of an answer.
    """

    ttft_s: float
    tpot_s: float


class Reading(Protocol):
    """A reading of the paper, or another policy in its place."""

    @property
    def bounds_online(self) -> bool:
        """Whether the limit also holds online prompts back."""
        ...

    @property
    def joins_prompts(self) -> bool:
        """Whether offline requests may compute beside online prompts."""
        ...

    def limit_s(self, alone_s: float) -> float:
        """Longest step with online decodes, 0 for no offline work.

        Args:
            alone_s: What they take by themselves; infinity where that is not known.
        """
        ...

    def hard_limit_s(self) -> float:
        """Longest step with online decodes for an offline request that is due."""
        ...

    def starved_limit_s(self, alone_s: float) -> float:
        """Longest step with online decodes for the starved offline request."""
        ...

    def prompt_limit_s(self, prompts: Sequence[CoServedRequest], now_s: float) -> float:
        """Longest step with online prompts and no online decode."""
        ...

    def aborts(self, remaining_s: float, own_s: float, safepoint_s: float) -> bool:
        """Whether an arrival aborts the offline step under way.

        Args:
            remaining_s: What the step still takes.
            own_s: What the arrival and the online requests before it take.
            safepoint_s: What an abort takes.
        """
        ...


@dataclass(frozen=True, slots=True)
class PaperReading:
    """The paper, word by word where it can be taken so.

    Source: ConServe Algorithms 1 and 2, section 4.5. `calc_budget` is undefined: the most tokens
    whose predicted step keeps to the objective, "TPOT for batches containing decode phase requests,
    TTFT otherwise"; for the latter we take what is left of the tightest prompt's. Line 14 of
    Algorithm 2 is inverted as printed (it would preempt when there is time): read as "return when
    the objective is met". Its victims are single requests, its safepoint aborts the batch (4.3);
    the batch goes, because a running kernel computes all of it.
    """

    objectives: Objectives
    bounds_online: bool = True
    joins_prompts: bool = True

    def limit_s(self, alone_s: float) -> float:
        """The objective."""
        del alone_s
        return self.objectives.tpot_s

    def hard_limit_s(self) -> float:
        """The objective."""
        return self.objectives.tpot_s

    def starved_limit_s(self, alone_s: float) -> float:
        """The objective."""
        del alone_s
        return self.objectives.tpot_s

    def prompt_limit_s(self, prompts: Sequence[CoServedRequest], now_s: float) -> float:
        """What is left to the tightest prompt."""
        return max(0.0, min(each.arrival_s for each in prompts) + self.objectives.ttft_s - now_s)

    def aborts(self, remaining_s: float, own_s: float, safepoint_s: float) -> bool:
        """Abort only when the first token would else be late."""
        del safepoint_s
        return remaining_s + own_s > self.objectives.ttft_s


@dataclass(frozen=True, slots=True)
class GuardedReading:
    """Ours: online requests as if alone.

    Attributes:
        objective_share: Part of the objective that a predicted step may take.
        wait_share: Part of the objective for the first token by which offline work may lengthen a
            step, for that is what an arrival waits longer.
        stretch: Part of the online step's own time by which offline work may lengthen it.
    """

    objectives: Objectives
    objective_share: float
    wait_share: float
    stretch: float
    bounds_online: bool = False
    joins_prompts: bool = False

    def limit_s(self, alone_s: float) -> float:
        """A little longer than the online requests alone, within the objective; 0 if unknown."""
        return min(self.hard_limit_s(), self.starved_limit_s(alone_s))

    def hard_limit_s(self) -> float:
        """The objective, less a margin for what a prediction does not know."""
        return self.objective_share * self.objectives.tpot_s

    def starved_limit_s(self, alone_s: float) -> float:
        """The same little, but where online requests exceed the objective by themselves as well.

        Never the whole objective: with a long queue some request is always starved. Where the time
        alone is not known it waits for a step with online prompts: answers end, so there are some.

        Source: ours. Up to the objective, which is what is left without a prediction, all answers
        would take as long as the slowest may.
        """
        if alone_s == inf:
            return 0.0
        return alone_s + min(self.wait_share * self.objectives.ttft_s, self.stretch * alone_s)

    def prompt_limit_s(self, prompts: Sequence[CoServedRequest], now_s: float) -> float:
        """No offline work: whatever joins a prompt's step comes on top of its first token."""
        del prompts, now_s
        return 0.0

    def aborts(self, remaining_s: float, own_s: float, safepoint_s: float) -> bool:
        """Abort unless the step is over as soon."""
        del own_s
        return remaining_s > safepoint_s
