"""Rankings say which request comes first: the order that makes a policy out of time slices.

A ranking gives every request a key, lowest first, for each of its two phases: while its prompt is
computed, and while it decodes. Equal keys go by arrival. It also says how long a slice lasts.

- `FirstComeFirstServed`: arrival alone, and no preemption: what stock engines do.
- `FairShare`: section 7 of Aqua, read as the completely fair scheduler that it calls itself.
  Prompts by tokens computed; decodes by virtual runtime, the token slots of batches that they have
  had, prompt included, over their weight. A newcomer starts at the mean of those present, so that
  all get an equal share *from then on*.
- `LeastServedFirst`: section 7 word by word. Prompts by tokens computed, decodes by tokens
  generated, both over the request's weight. Under arrivals that do not end, a request that is ahead
  waits for all that come later: the longest output ends when the backlog does.
- `FirstTokenFirst`: ours. Equal slices make all requests wait for all others: n requests that would
  finish one after another all finish near the end, each paged out and in dozens of times. What a
  burst needs is only that none waits for its *first* token. So prompts go first, in order of
  arrival and in short slices; a decode is safe from other decodes for a first stint of tokens, and
  after it the earliest arrival holds memory until it is done. The last to arrive makes room for
  prompts, so a request leaves about once, and completions approach those of first come, first
  served. The price: between its first stint and its turn a request pauses, as long as it would
  have queued. Stints that double (attained service in levels) shorten the pause of short answers
  and were tried: equal requests then finish together again, at twice the mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from math import inf
from typing import ClassVar, Final

from aqua_schedulers.cfs.views import RequestView

LONG_SLICE_FACTOR: Final = 8
"""Length of a `FirstTokenFirst` slice while no prompt waits, in `slice_iterations`. Nothing is
urgent then, and every slice end may page. Doubled, decodes are paged half as often and pause twice
as long."""


class Ranking(ABC):
    """Orders requests within a phase; a request's key changes only while it is running.

    Attributes:
        slice_iterations: Engine steps of a slice.
        preempts: Whether running requests give way to waiting ones.
        keeps_equals: Whether, at equal keys, running requests stay; otherwise the earlier arrival
            holds memory.
        recompute_per_prompt_token: Tokens that may be computed again, by preemptions, for each
            prompt token admitted.
        granularity: A running decode gives way to a waiting one whose key is lower by more than
            this.
    """

    granularity: float = 0.0
    preempts: ClassVar[bool] = True
    keeps_equals: ClassVar[bool] = True
    recompute_per_prompt_token: ClassVar[float] = inf

    def __init__(self, slice_iterations: int = 1) -> None:
        self.slice_iterations = slice_iterations

    @abstractmethod
    def key(self, request: RequestView) -> float:
        """The request's key, compared with those of the same phase only."""

    def slice_steps(self, *, prompts_wait: bool) -> int:
        """Engine steps until running requests give way again."""
        del prompts_wait
        return self.slice_iterations

    def begin_slice(
        self, running: Iterable[RequestView], waiting_decode_keys: Collection[float]
    ) -> None:
        """A slice is about to be decided, among these; for rankings with a state."""
        del running, waiting_decode_keys

    def forget(self, request_id: str) -> None:
        """A request finished or was aborted, whether it was ever ranked or not; likewise."""
        del request_id


class FirstComeFirstServed(Ranking):
    """Arrival alone counts, also for what the engine itself preempted."""

    preempts = False

    def key(self, request: RequestView) -> float:
        """The same for all."""
        del request
        return 0.0


class FairShare(Ranking):
    """Least virtual runtime first; has a state, so each policy needs its own.

    Source: Aqua section 7, "we build a preemptive completely fair scheduler". Ambiguous there: what
    a newcomer starts with. "Least number of tokens generated" would make it zero and starve a
    request that is ahead, which no completely fair scheduler does; Linux starts it at the weighted
    mean virtual runtime of those that run (since 6.6; at about their least before). We take the
    plain mean. The time that is shared is token slots of batches, section 7's `B`, of which a
    prompt takes one for each of its tokens: without that charge, a newcomer's prompt comes for free
    at the expense of those who are there.

    The paper's batch is chosen anew at every slice; a granularity, as Linux has one, keeps a decode
    until it is that far ahead of one that waits. With 16 tokens page-outs fall to less than half,
    and the longest completions of a burst get shorter by up to a tenth: engines, which pay for
    each page-out, have it by default.

    Args:
        slice_iterations: Engine steps of a slice.
        granularity: In tokens over the weight.
    """

    def __init__(self, slice_iterations: int = 1, granularity: float = 0.0) -> None:
        super().__init__(slice_iterations)
        self.granularity = granularity
        self._starts: dict[str, float] = {}
        self._mean = 0.0

    def key(self, request: RequestView) -> float:
        """Prompts: tokens computed. Decodes: virtual runtime, at first seen from the mean."""
        if not request.output_tokens:
            return request.computed_tokens / request.weight
        start = self._starts.get(request.request_id)
        if start is None:
            # Output until now was the same for all: there was no slice, so none waited.
            charge = request.prompt_tokens - request.output_tokens
            start = self._starts[request.request_id] = self._mean + charge / request.weight
        return start + request.output_tokens / request.weight

    def begin_slice(
        self, running: Iterable[RequestView], waiting_decode_keys: Collection[float]
    ) -> None:
        """Find the mean that newcomers start at; it never goes back."""
        starts = self._starts
        keys = list(waiting_decode_keys)
        keys += [
            start + each.output_tokens / each.weight
            for each in running
            if (start := starts.get(each.request_id)) is not None
        ]
        if keys:
            self._mean = max(self._mean, sum(keys) / len(keys))

    def forget(self, request_id: str) -> None:
        """Drop its start."""
        self._starts.pop(request_id, None)


class LeastServedFirst(Ranking):
    """Aqua section 7 to the letter."""

    def key(self, request: RequestView) -> float:
        """The fewest tokens generated, or of the prompt computed, first."""
        return (request.output_tokens or request.computed_tokens) / request.weight


class FirstTokenFirst(Ranking):
    """Prompts first, then every request's first stint, then arrival.

    Recomputation is bounded: preemptions without a store compute contexts again, which takes time
    from prompts, which makes more wait, which preempts more. With one token for each prompt token
    admitted, prefill work at most doubles.

    Args:
        slice_iterations: Engine steps of a slice while prompts wait.
        stint_tokens: Output (times the weight) that goes before all further output.
    """

    keeps_equals = False
    recompute_per_prompt_token = 1.0

    def __init__(self, slice_iterations: int, stint_tokens: int) -> None:
        super().__init__(slice_iterations)
        self.stint_tokens = stint_tokens

    def key(self, request: RequestView) -> float:
        """Decodes in their first stint go first; otherwise heavier requests, then arrival."""
        is_first_stint = 0 < request.output_tokens < self.stint_tokens * request.weight
        return -inf if is_first_stint else -request.weight

    def slice_steps(self, *, prompts_wait: bool) -> int:
        """Short while some request waits for its first token."""
        return self.slice_iterations * (1 if prompts_wait else LONG_SLICE_FACTOR)
