"""Who comes first: the order that makes a policy out of turns.

A ranking gives every request a key, lowest first, for each of its two phases: while its prompt is
computed, and while it decodes. Equal keys go by arrival. It also says how long a turn lasts.

- `FirstComeFirstServed`: arrival alone, and nobody is put out: what stock engines do.
- `LeastServedFirst`: section 7 of Aqua. Prompts by tokens computed, decodes by tokens generated,
  both over the request's weight; equal slices for everyone.
- `FirstTokenFirst`: ours. Equal slices make everyone wait for everyone: n requests that would
  finish one after another all finish near the end, each paged out and in dozens of times. What a
  burst needs is only that nobody waits for the *first* token. So prompts go first, in order of
  arrival and in short turns; a decode is safe from other decodes for a first stint of tokens, and
  after it the earliest arrival holds memory until it is done. The last to arrive makes room for
  prompts, so a request leaves about once, and completions approach those of first come, first
  served. The price: between its first stint and its turn a request pauses, as long as it would
  have queued. Stints that double (attained service in levels) shorten the pause of short answers
  and were tried: equal requests then finish together again, at twice the mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Protocol

from aqua_schedulers.cfs.views import RequestView


class Ranking(Protocol):
    """Orders requests within a phase."""

    @property
    def evicts(self) -> bool:
        """Whether those inside give way to those outside."""
        ...

    @property
    def keeps_equals(self) -> bool:
        """Whether, at equal keys, those inside stay; otherwise the earlier arrival holds memory."""
        ...

    @property
    def recompute_per_prompt_token(self) -> float:
        """Tokens that may be computed again, by evictions, for each prompt token let in."""
        ...

    def prompt_key(self, request: RequestView) -> float:
        """Of a request without an output token."""
        ...

    def decode_key(self, request: RequestView) -> float:
        """Of a request with output tokens."""
        ...

    def turn_iterations(self, *, prompts_wait: bool) -> int:
        """Engine steps until those inside give way again."""
        ...


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed:
    """Arrival alone."""

    evicts: bool = False
    keeps_equals: bool = True
    recompute_per_prompt_token: float = inf

    def prompt_key(self, request: RequestView) -> float:  # noqa: ARG002 - a ranking's
        """Prompts wait for everyone who was in before."""
        return 0.0

    def decode_key(self, request: RequestView) -> float:  # noqa: ARG002 - a ranking's
        """What the engine itself preempted comes back by arrival."""
        return 0.0

    def turn_iterations(self, *, prompts_wait: bool) -> int:  # noqa: ARG002 - a ranking's
        """No turn puts anybody out."""
        return 1


@dataclass(frozen=True, slots=True)
class LeastServedFirst:
    """Aqua section 7."""

    slice_iterations: int
    evicts: bool = True
    keeps_equals: bool = True
    recompute_per_prompt_token: float = inf

    def prompt_key(self, request: RequestView) -> float:
        """Least prompt tokens computed."""
        return request.computed_tokens / request.weight

    def decode_key(self, request: RequestView) -> float:
        """Least tokens generated."""
        return request.output_tokens / request.weight

    def turn_iterations(self, *, prompts_wait: bool) -> int:  # noqa: ARG002 - a ranking's
        """The same for everyone."""
        return self.slice_iterations


@dataclass(frozen=True, slots=True)
class FirstTokenFirst:
    """Prompts first, then everyone's first stint, then arrival.

    Attributes:
        slice_iterations: A turn while prompts wait.
        stint_tokens: Output (times the weight) that goes before all further output.
        long_factor: A turn while no prompt waits, in `slice_iterations`.
        recompute_per_prompt_token: Evictions without a store compute contexts again, which takes
            time from prompts, which makes more wait, which evicts more. With 1, prefill work at
            most doubles.
    """

    slice_iterations: int
    stint_tokens: int
    long_factor: int = 8
    evicts: bool = True
    keeps_equals: bool = False
    recompute_per_prompt_token: float = 1.0

    def prompt_key(self, request: RequestView) -> float:
        """Arrival, within a weight."""
        return -request.weight

    def decode_key(self, request: RequestView) -> float:
        """In its first stint, then beyond; among the latter heavier requests first."""
        if request.output_tokens < self.stint_tokens * request.weight:
            return -inf
        return -request.weight

    def turn_iterations(self, *, prompts_wait: bool) -> int:
        """Short while somebody waits for a first token."""
        return self.slice_iterations if prompts_wait else self.slice_iterations * self.long_factor
