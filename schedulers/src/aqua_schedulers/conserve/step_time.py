"""What a step will take, as far as it can be known: a profile, corrected, or a safe fixed budget.

`StepTimes` answers one question, "may this load run within so many seconds", and is told what each
step took. It stands on one of two legs:

- *Profiled*: the profile's prediction times a correction, which follows the measured steps, and a
  margin for how much they scatter around it. A limit that says how much longer a step may become
  has the margin on that alone: the rest scatters as well without offline work. What a token costs
  beside answers is a hundredth of such a step, and a profile that is good to a twentieth may be
  wrong about it many times over. So the pace of answers is measured with offline tokens beside
  them, and without (`paced`), and where it differs by too much they are kept out.
- *Fixed*: there is no profile, or it was wrong for many steps on end (scatter above a tolerance
  even after correction). Then offline work gets a number of tokens a step that no prediction is
  behind: it starts small, is cut whenever a step with offline work overran its limit, by as much as
  it did and to a half at most, and grows back slowly while it is used.
  Steps with and without online requests have a budget each: they have other limits, and what fits
  into an empty engine says nothing of what fits beside answers. A step that is to have no offline
  work, a limit of 0, has none, and neither budget learns of it; nor of steps that are planned by a
  profile, whose limits may be longer.

Promises: no profile and a wrong one both end in the fixed budget, and `basis` says so, for a
warning and a metric; a budget that has been overrun is smaller in the next step of its kind. What a
step takes is unknown then, infinity, also where there is a profile that steps contradict. It does
not promise that no step overruns: the step that shows the error is over by then. So a fixed budget
is for limits that may be overrun now and then, and a reading that wants online requests as if alone
allows no offline work beside them (`readings`).

Source: ConServe section 4.5 trusts its profile for ever; the correction and the fallback are ours.
That a budget grows only while half of it is used is TCP's rule for its window (RFC 7661): steps of
few tokens prove nothing about many. TCP halves it at any loss; a step says by how much it was too
long. Where one in fourteen is late whatever its size, a budget that each halves stays below half of
what fits.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from aqua_schedulers.conserve.profile import StepLoad, StepTimeProfile

LEARNING_SHARE: Final = 0.05
"""Share of a new step in the averages. Doubled, they follow twice as fast and scatter more."""

SCATTER_MARGIN: Final = 2.0
"""Mean deviations that a prediction keeps below its limit. Doubled, offline work gets less when
times scatter, and fewer steps overrun."""

TOLERATED_SCATTER: Final = 0.3
"""Mean deviation of corrected predictions above which a profile is wrong: a good one is 3 to 5 %
off. Doubled, a wrong profile is believed for longer."""

TOLERATED_EXCESS: Final = 0.05
"""Share by which steps may really be longer with offline tokens beside answers, whatever a profile
says: it is off by about as much. Doubled, answers lose up to a tenth before offline work does."""

FORGETTING_SHARE: Final = 0.001
"""Share of that excess which a step of online requests alone lets be forgotten: else none would be
let in any more, and say that it has become less. Doubled, they are tried twice as often: where they
lengthen a step by a quarter, in one of 100 steps, not of 200."""

ALONE_EVERY: Final = 1024
"""Steps with offline tokens beside answers after which one run of steps is without, for the pace of
online requests alone. Doubled, offline work gets a hundredth more, and a change is seen later."""

MOST_SURPRISE: Final = 2.0
"""What a step counts for at most, over what was expected of it: one that the machine held up says
nothing of the profile. Doubled, a single step of many times its length makes a good profile look
wrong, and a wrong one is found out in fewer steps."""

FIRST_FIXED_TOKENS: Final = 64
"""Offline tokens of a step without a profile: on an A100 64 tokens of a 7B model cost 2 ms beside
decodes. Doubled, an unprofiled engine starts with twice the offline work and risk."""

MAX_FIXED_TOKENS: Final = 512
"""Largest fixed budget, vLLM's smallest usual chunk. Doubled, long calm lets it grow further."""

FIXED_STEP_TOKENS: Final = 1
"""Tokens that the fixed budget grows in a step within its limit. Doubled, it recovers faster."""

LEAST_SHARE_LEFT: Final = 0.5
"""Part of the fixed budget that a step leaves however long it took: one that the machine held up
says little of the budget. It cannot be doubled; halved, a single such step costs offline work twice
as much."""


class PredictionBasis(StrEnum):
    """What the answers stand on."""

    PROFILE = "profile"
    FIXED = "fixed"


class _FixedBudget:
    """Offline tokens that a step of one kind may have, found by trying."""

    def __init__(self) -> None:
        self.tokens = FIRST_FIXED_TOKENS

    def measured(self, seconds: float, *, limit_s: float, offline_tokens: int) -> None:
        """Learn that a step with so many offline tokens took so long."""
        if seconds > limit_s:
            if offline_tokens:  # Else it would have taken as long whatever the budget.
                share = max(limit_s / seconds, LEAST_SHARE_LEFT)
                self.tokens = int(share * self.tokens)
        elif 2 * offline_tokens >= self.tokens:
            self.tokens = min(MAX_FIXED_TOKENS, self.tokens + FIXED_STEP_TOKENS)


class StepTimes:
    """Predicts step times of one engine; made once, told every step.

    Args:
        profile: None starts with the fixed budget and stays there.

    Attributes:
        basis: What answers stand on now.
        excess: Share by which steps were longer with offline tokens beside answers, on average.
    """

    def __init__(self, profile: StepTimeProfile | None) -> None:
        self._profile = profile
        self._correction = 1.0
        self._scatter = 0.0 if profile is None else profile.relative_error / SCATTER_MARGIN
        # Seconds of steps of online requests alone over what the profile says, by how many these
        # are: the profile is off by as much as matters here, and by another share for each number.
        self._pace: dict[int, float] = {}
        self._steps_beside = 0
        self.excess = 0.0
        self._calm_budget, self._busy_budget = _FixedBudget(), _FixedBudget()
        self.basis = PredictionBasis.FIXED if profile is None else PredictionBasis.PROFILE

    @property
    def fixed_tokens(self) -> int:
        """The fixed budget of a step without online requests, also while a profile holds."""
        return self._calm_budget.tokens

    def seconds(self, load: StepLoad) -> float:
        """Expected time of a step; infinity where nothing can be said, 0 for an empty one."""
        if self._profile is None or self.basis is PredictionBasis.FIXED:
            return float("inf") if load.new_tokens else 0.0
        return self._profile.seconds(load) * self._correction

    def allows(
        self, load: StepLoad, limit_s: float, offline_tokens: int, own_s: float = 0.0
    ) -> bool:
        """Whether a step of `load`, of which so many tokens are offline's, keeps to the limit.

        Args:
            load: Of online and offline requests.
            limit_s: It keeps to.
            offline_tokens: Of the load.
            own_s: Part of the step that is as uncertain without them, and needs no margin: what
                online requests take alone. 0 where the limit is not on what others add.
        """
        if self.basis is PredictionBasis.FIXED or self._profile is None:
            return limit_s > 0.0 and offline_tokens <= self._budget(load, offline_tokens).tokens
        if load.new_tokens > self._profile.max_tokens:
            return False
        expected_s = self._profile.seconds(load) * self._correction
        margin_s = SCATTER_MARGIN * self._scatter * max(0.0, expected_s - own_s)
        if own_s and self._steps_beside >= ALONE_EVERY:
            return False
        if self.excess > TOLERATED_EXCESS:
            margin_s += self.excess * own_s
        return expected_s + margin_s <= limit_s

    def chunk_within(
        self,
        load: StepLoad,
        limit_s: float,
        offline_tokens: int,
        wanted: int,
        context: int,
        own_s: float = 0.0,
    ) -> int:
        """The most tokens of a chunk, up to `wanted`, that may join; by bisection."""

        def fits(tokens: int) -> bool:
            chunk = load.and_chunk(tokens, context)
            return self.allows(chunk, limit_s, offline_tokens + tokens, own_s)

        if fits(wanted):
            return wanted
        low, high = 0, wanted
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def measured(
        self, load: StepLoad, seconds: float, *, limit_s: float, offline_tokens: int
    ) -> None:
        """Learn what a step took; `limit_s` is what it was planned for, infinity for none."""
        if limit_s > 0.0 and self.basis is PredictionBasis.FIXED:
            self._budget(load, offline_tokens).measured(
                seconds, limit_s=limit_s, offline_tokens=offline_tokens
            )
        if self._profile is None or not load.new_tokens:
            return
        share = min(seconds / self._profile.seconds(load), MOST_SURPRISE * self._correction)
        off = abs(share / self._correction - 1.0)
        self._scatter += LEARNING_SHARE * (off - self._scatter)
        self._correction += LEARNING_SHARE * (share - self._correction)
        is_wrong = self._scatter > TOLERATED_SCATTER
        self.basis = PredictionBasis.FIXED if is_wrong else PredictionBasis.PROFILE

    def paced(self, alone: StepLoad, load: StepLoad, seconds: float, *, steps: int = 1) -> None:
        """Learn how far apart steps began that followed each other.

        Args:
            alone: What online requests compute in each, which is all of `load` or not.
            load: With offline tokens.
            seconds: From one to the next.
            steps: So many, all alike.
        """
        if self._profile is None:
            return
        alone_s = self._profile.seconds(alone)
        added_s = self._profile.seconds(load) - alone_s
        count = alone.request_count
        pace = self._pace.get(count)
        seconds = min(seconds, MOST_SURPRISE * ((pace or 1.0) * alone_s + added_s))
        if load == alone:
            self._steps_beside = 0
            share = 1.0 - (1.0 - LEARNING_SHARE) ** steps
            measured = seconds / alone_s
            self._pace[count] = measured if pace is None else pace + share * (measured - pace)
            self.excess *= (1.0 - FORGETTING_SHARE) ** steps
            return
        self._steps_beside += steps
        if pace is not None:
            self.excess += LEARNING_SHARE * (seconds / (pace * alone_s) - 1.0 - self.excess)

    def _budget(self, load: StepLoad, offline_tokens: int) -> _FixedBudget:
        """That of steps like this one, of which so many tokens are offline's."""
        is_calm = load.new_tokens == offline_tokens
        return self._calm_budget if is_calm else self._busy_budget
