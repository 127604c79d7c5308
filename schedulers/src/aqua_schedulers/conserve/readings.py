"""Where the paper's policy and ours differ: two readings, of which a policy has one.

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

from aqua_schedulers.conserve.views import NO_LIMIT, CoServedRequest


@dataclass(frozen=True, slots=True)
class Objectives:
    """What online users are promised (their SLO), in seconds.

    Attributes:
        ttft_s: Time to the first token.
        tpot_s: Time between two tokens of an answer.
    """

    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, slots=True)
class PaperReading:
    """The paper, word by word where it can be taken so.

    Source: ConServe Algorithms 1 and 2, section 4.5. `calc_budget` is undefined: the most tokens
    whose predicted step keeps to the objective, "TPOT for batches containing decode phase requests,
    TTFT otherwise"; for the latter we take what is left of the tightest prompt's. Line 14 of
    Algorithm 2 is inverted as printed (it would preempt when there is time): read as "return when
    the objective is met". Its victims are single requests, its safepoint aborts the batch (4.3);
    the batch goes, because a running kernel computes all of it.

    Attributes:
        bounds_online: Whether the limit also holds online prompts back.
        joins_prompts: Whether offline requests may compute beside online prompts.
    """

    objectives: Objectives
    bounds_online: bool = True
    joins_prompts: bool = True

    def limit_s(self, alone_s: float) -> float:
        """Longest step with online decodes, which take `alone_s` by themselves: the objective."""
        del alone_s
        return self.objectives.tpot_s

    def hard_limit_s(self) -> float:
        """The same for an offline request that is due: the objective."""
        return self.objectives.tpot_s

    def starved_limit_s(self, alone_s: float) -> float:
        """The same for the starved offline request: the objective."""
        del alone_s
        return self.objectives.tpot_s

    def own_s(self, alone_s: float) -> float:
        """Part of a limit whose scatter is not offline work's: none, the objective is absolute."""
        del alone_s
        return 0.0

    def prompt_limit_s(self, prompts: Sequence[CoServedRequest], now_s: float) -> float:
        """Longest step with online prompts and no online decode: what the tightest one has left."""
        return max(0.0, min(each.arrival_s for each in prompts) + self.objectives.ttft_s - now_s)

    def abortable_limit_s(self, wait_s: float, safepoints: int) -> float:
        """Longest step without online requests, where it has safepoints and is predicted: none.

        Args:
            wait_s: What an arrival may wait for it to stop.
            safepoints: Of the step.
        """
        del wait_s, safepoints
        return NO_LIMIT

    def aborts(self, remaining_s: float, own_s: float, safepoint_s: float) -> bool:
        """Whether an arrival aborts the offline step under way: when its first token would be late.

        Args:
            remaining_s: What the step still takes.
            own_s: What the arrival and the online requests before it take.
            safepoint_s: What an abort takes.
        """
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
        """A little longer than the online requests alone, within the objective.

        0, which is no offline work, where `alone_s` is infinite: what they take is not known.
        """
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

    def own_s(self, alone_s: float) -> float:
        """Part of a limit whose scatter is not offline work's: what online requests take alone.

        Source: ours. A margin on all of the step is larger than any small stretch of it as soon as
        times scatter by percents, and then no offline request ever stands beside an answer.
        """
        return alone_s

    def prompt_limit_s(self, prompts: Sequence[CoServedRequest], now_s: float) -> float:
        """No offline work: whatever joins a prompt's step comes on top of its first token."""
        del prompts, now_s
        return 0.0

    def abortable_limit_s(self, wait_s: float, safepoints: int) -> float:
        """Longest such step of which two intervals between safepoints take no longer than `wait_s`.

        An abort takes two: the rest of one, and one whose layers are launched already.
        """
        return wait_s * safepoints / 2

    def aborts(self, remaining_s: float, own_s: float, safepoint_s: float) -> bool:
        """Abort unless the step is over as soon."""
        del own_s
        return remaining_s > safepoint_s


Reading = PaperReading | GuardedReading
"""What a policy has; both answer the same questions."""
