"""Who comes first: the order that makes a policy out of turns.

A ranking gives every request a key, lowest first, for each of its two phases: while its prompt is
computed, and while it decodes. Equal keys go by arrival. It also says how long a turn lasts.

- `FirstComeFirstServed`: arrival alone, and nobody is put out: what stock engines do.
- `FairShare`: section 7 of Aqua, read as the completely fair scheduler that it calls itself.
  Prompts by tokens computed; decodes by virtual runtime, the token slots of batches that they have
  had, prompt included, over their weight. Whoever comes starts at the mean of those present, so
  that everyone gets an equal share *from then on*.
- `LeastServedFirst`: section 7 word by word. Prompts by tokens computed, decodes by tokens
  generated, both over the request's weight. Under arrivals that do not end, whoever is ahead waits
  for everyone who comes later: the longest output ends when the backlog does.
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

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from aqua_schedulers.cfs.views import RequestView


class Ranking(Protocol):
    """Orders requests within a phase; a request's keys change only while it is inside."""

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

    def begin_turn(
        self,
        inside: Iterable[RequestView],  # noqa: ARG002 - for rankings with a state
        outside_decode_keys: Collection[float],  # noqa: ARG002 - likewise
    ) -> None:
        """A turn is about to be decided, among these."""
        return

    def forget(self, request_id: str) -> None:  # noqa: ARG002 - for rankings with a state
        """It finished or was aborted, whether it was ever ranked or not."""
        return


@dataclass(frozen=True, slots=True)
class FirstComeFirstServed(Ranking):
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


@dataclass(slots=True)
class FairShare(Ranking):
    """Least virtual runtime first; has a state, so each policy needs its own.

    Source: Aqua section 7, "we build a preemptive completely fair scheduler". Ambiguous there: what
    a newcomer starts with. "Least number of tokens generated" would make it zero and starve whoever
    is ahead, which no completely fair scheduler does; Linux starts it at the weighted mean virtual
    runtime of those that run (since 6.6; at about their least before). We take the plain mean. The
    time that is shared is token slots of batches, section 7's `B`, of which a prompt takes one for
    each of its tokens: without that charge, a newcomer's prompt comes for free at the expense of
    those who are there.

    Rejected: a granularity, as Linux has one, below which a decode does not make room for another.
    Of 16 tokens it halves the page-outs and shortens the longest completions of a burst by up to
    a tenth; but it is not the paper's, whose batch is chosen anew at every slice, and whoever wants
    fewer page-outs has `FirstTokenFirst`.
    """

    slice_iterations: int
    evicts: bool = True
    keeps_equals: bool = True
    recompute_per_prompt_token: float = inf
    _starts: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _mean: float = field(default=0.0, init=False, repr=False)

    def prompt_key(self, request: RequestView) -> float:
        """Least prompt tokens computed."""
        return request.computed_tokens / request.weight

    def decode_key(self, request: RequestView) -> float:
        """Virtual runtime; a request seen for the first time starts at the mean."""
        start = self._starts.get(request.request_id)
        if start is None:
            # Output until now was the same for everyone: there was no turn, so nobody waited.
            charge = request.prompt_tokens - request.output_tokens
            start = self._starts[request.request_id] = self._mean + charge / request.weight
        return start + request.output_tokens / request.weight

    def turn_iterations(self, *, prompts_wait: bool) -> int:  # noqa: ARG002 - a ranking's
        """The same for everyone."""
        return self.slice_iterations

    def begin_turn(
        self, inside: Iterable[RequestView], outside_decode_keys: Collection[float]
    ) -> None:
        """Find the mean that newcomers start at; it never goes back."""
        starts = self._starts
        total, count = sum(outside_decode_keys), len(outside_decode_keys)
        for request in inside:
            if request.request_id in starts:
                total += self.decode_key(request)
                count += 1
        if count:
            self._mean = max(self._mean, total / count)

    def forget(self, request_id: str) -> None:
        """Its start is of no use any more."""
        self._starts.pop(request_id, None)


@dataclass(frozen=True, slots=True)
class LeastServedFirst(Ranking):
    """Aqua section 7 to the letter."""

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
class FirstTokenFirst(Ranking):
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
