"""Offline requests that wait: in which order they come in, and which has waited too long.

Deadlines first, earliest first; then requests that have begun before those that have not (their
checkpoints take room, and their end frees it); then by arrival. A later request overtakes only by
its deadline, and a preempted one comes back before any new one.

A request is *due* when what it still has to compute, one token a step at the objective's pace,
takes as long as is left until its deadline. The *eldest* request, the first to arrive of those that
have not ended, is *starved* when it got no token for `starvation_s`, and stays so until it ends: a
token now and then would be no help. No other request is, however long it waits: it waits for those
before it, and a long queue is no emergency. Either kind goes before all other offline work; one
that is due may use the whole objective, the starved one besides gets tokens that online prompts
would have taken (`policy`).

Costs: O(log n) for each that comes or goes, O(1) for the starved one, O(k) for the k first.

Source: the paper has no order and no bound ("best-effort", section 2.2); all of this is ours.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from aqua_schedulers.conserve.views import CoServedRequest

QueueKey = tuple[float, bool, float, int]
"""Deadline, whether it is new, arrival, number."""


class OfflineQueue:
    """Waiting offline requests in order, and when the eldest offline request was last served.

    Args:
        starvation_s: Seconds without a token after which it is starved.
    """

    def __init__(self, starvation_s: float) -> None:
        self._starvation_s = starvation_s
        self._order: list[QueueKey] = []
        self._waiting: dict[int, CoServedRequest] = {}
        self._keys: dict[str, QueueKey] = {}
        # Of all that have not ended, by arrival.
        self._numbers: dict[str, int] = {}
        self._arrival_count = 0
        self._eldest: str | None = None
        self._eldest_served_s = 0.0
        self._is_starved = False

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
            self._find_eldest(now_s)
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
        if request_id == self._eldest:
            self._eldest_served_s = now_s

    def remove(self, request_id: str) -> None:
        """A request finished or was aborted by its user, wherever it is."""
        if request_id in self._keys:
            self.take(request_id)
        self._numbers.pop(request_id, None)

    def starved(self, now_s: float) -> str | None:
        """The eldest request, if it is starved."""
        self._find_eldest(now_s)
        if self._eldest is not None and now_s - self._eldest_served_s >= self._starvation_s:
            self._is_starved = True
        return self._eldest if self._is_starved else None

    def _find_eldest(self, now_s: float) -> None:
        """Let the next request be the eldest, from now on, when the last one has ended."""
        eldest = next(iter(self._numbers), None)
        if eldest != self._eldest:
            self._eldest, self._eldest_served_s, self._is_starved = eldest, now_s, False


def is_due(request: CoServedRequest, now_s: float, prompt_token_s: float, tpot_s: float) -> bool:
    """Whether a request must run from now on to make its deadline.

    Args:
        prompt_token_s: Seconds that a prompt token takes.
        tpot_s: Seconds that an output token takes at the objective's pace.
    """
    needs_s = request.pending_tokens * prompt_token_s + request.remaining_tokens * tpot_s
    return now_s + needs_s >= request.finish_by_s
