"""Who comes first: the order that makes a policy out of turns.

A ranking gives every request a key, lowest first, for each of its two phases: while its prompt is
computed, and while it decodes. Equal keys go by arrival. It also says how long a turn lasts.

- `FirstComeFirstServed`: arrival alone, and nobody is put out: what stock engines do.
- `LeastServedFirst`: section 7 of Aqua. Prompts by tokens computed, decodes by tokens generated,
  both over the request's weight; equal slices for everyone.
- `FirstTokenFirst`: ours. Equal slices make everyone wait for everyone: n requests that would
  finish one after another all finish near the end, each paged out and in dozens of times. What a
  burst needs is only that nobody waits for the *first* token. So prompts go first, in order of
  arrival, in short turns; a decode keeps its memory until it has generated a stint of tokens and
  somebody with less standing needs the room. Standing is attained service in stints that double:
  requests of equal standing go by arrival and never put each other out, so a request is put out at
  most once per doubling of its output, and the last standing is unbounded: there the policy is
  first come, first served, whose mean completion it approaches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from aqua_schedulers.cfs.views import RequestView

STANDINGS: Final = 3
"""Stints before the last, unbounded one."""


class Ranking(Protocol):
    """Orders requests within a phase."""

    @property
    def evicts(self) -> bool:
        """Whether those inside give way to those outside."""
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
    """Prompts first, then attained service in stints that double.

    Attributes:
        slice_iterations: A turn while prompts wait.
        stint_tokens: Output after which a request may be put out for the first time.
        long_factor: A turn while none waits, in `slice_iterations`.
    """

    slice_iterations: int
    stint_tokens: int
    long_factor: int = 8
    evicts: bool = True

    def prompt_key(self, request: RequestView) -> float:
        """Arrival, within a weight."""
        return -request.weight

    def decode_key(self, request: RequestView) -> float:
        """Stints done, 0 to `STANDINGS`."""
        stints = request.output_tokens / request.weight / self.stint_tokens
        standing = 0
        while stints >= 1.0 and standing < STANDINGS:
            stints /= 2.0
            standing += 1
        return float(standing)

    def turn_iterations(self, *, prompts_wait: bool) -> int:
        """Short while somebody waits for a first token."""
        return self.slice_iterations if prompts_wait else self.slice_iterations * self.long_factor
