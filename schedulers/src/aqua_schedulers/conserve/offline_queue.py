"""Offline requests that wait: in which order they come in, and which have waited too long.

Deadlines first, earliest first; then requests that have begun before those that have not (their
checkpoints take room, and their end frees it); then by arrival. A later request overtakes only by
its deadline, and a preempted one comes back before any new one.

A request is *due* when what it still has to compute, one token a step at the objective's pace,
takes as long as is left until its deadline. It is *starved* when it got no token for
`starvation_s`. Either is served before all other offline work and may use the whole objective;
the longest starved one besides gets tokens that online prompts would have taken (`policy`).

Costs: O(log n) for each that comes or goes, O(1) for the starved one, O(k) for the k first.

Source: the paper has no order and no bound ("best-effort", section 2.2); all of this is ours.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from math import inf

from aqua_schedulers.conserve.views import CoServedRequest

QueueKey = tuple[float, bool, float, int]
"""Deadline, whether it is new, arrival, number."""


class OfflineQueue:
    """Waiting offline requests in order, and when each offline request was last served.

    Args:
        starvation_s: Seconds without a token after which a request is starved.
    """

    def __init__(self, starvation_s: float) -> None:
        self._starvation_s = starvation_s
        self._order: list[QueueKey] = []
        self._waiting: dict[int, CoServedRequest] = {}
        self._keys: dict[str, QueueKey] = {}
        self._numbers: dict[str, int] = {}
        # In order of the last service: one that is served moves to the end.
        self._served_s: dict[str, float] = {}
        self._arrival_count = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[CoServedRequest]:
        """Waiting requests in order; the queue must not change meanwhile."""
        for key in self._order:
            yield self._waiting[key[3]]

    def get(self, request_id: str) -> CoServedRequest | None:
        """The request, if it waits."""
        key = self._keys.get(request_id)
        return None if key is None else self._waiting[key[3]]

    def add(self, request: CoServedRequest, now_s: float) -> None:
        """A request arrived, or left memory."""
        name = request.request_id
        if name not in self._numbers:
            self._numbers[name] = self._arrival_count
            self._arrival_count += 1
            self._served_s[name] = now_s
        key = (
            request.finish_by_s,
            not (request.computed_tokens or request.output_tokens),
            request.arrival_s,
            self._numbers[name],
        )
        assert name not in self._keys, name
        self._keys[name] = key
        self._waiting[key[3]] = request
        insort(self._order, key)

    def take(self, request_id: str) -> None:
        """A waiting request holds blocks now."""
        key = self._keys.pop(request_id)
        del self._order[bisect_left(self._order, key)]
        del self._waiting[key[3]]

    def served(self, request_id: str, now_s: float) -> None:
        """A request got tokens."""
        if self._served_s.pop(request_id, None) is not None:
            self._served_s[request_id] = now_s

    def remove(self, request_id: str) -> None:
        """A request finished or was aborted by its user, wherever it is."""
        if request_id in self._keys:
            self.take(request_id)
        self._served_s.pop(request_id, None)
        self._numbers.pop(request_id, None)

    def starved(self, now_s: float) -> str | None:
        """The request that has gone longest without a token, if that is too long."""
        name = next(iter(self._served_s), None)
        if name is None or now_s - self._served_s[name] < self._starvation_s:
            return None
        return name


def is_due(request: CoServedRequest, now_s: float, prompt_token_s: float, tpot_s: float) -> bool:
    """Whether a request must run from now on to make its deadline.

    Args:
        prompt_token_s: Seconds that a prompt token takes.
        tpot_s: Seconds that an output token takes at the objective's pace.
    """
    if request.finish_by_s == inf:
        return False
    needs_s = request.pending_tokens * prompt_token_s + request.remaining_tokens * tpot_s
    return now_s + needs_s >= request.finish_by_s
