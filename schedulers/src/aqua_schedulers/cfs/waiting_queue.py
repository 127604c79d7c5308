"""Requests outside the batch, in order.

Two heaps by the ranking's keys, prompts and decodes, and a queue by the time of leaving for those
who have waited too long. Entries of requests that went in are left in the heaps and skipped when
they surface, so that every event costs O(log n) and a decision looks only at those it may admit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator
from heapq import heappop, heappush

from aqua_schedulers.cfs.ranking import Ranking
from aqua_schedulers.cfs.views import RequestView

Entry = tuple[float, float, int, RequestView]
"""Key, arrival, a number that breaks ties, and the request."""

Inhabitants = OrderedDict[str, tuple[int, int, RequestView]]
"""Number, turn of leaving and view by id, in order of leaving; cheap to take from the front."""


class WaitingQueue:
    """Holds each outside request once."""

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        self._inhabitants: Inhabitants = OrderedDict()
        self._prompts: list[Entry] = []
        self._decodes: list[Entry] = []
        self._decode_keys: dict[str, float] = {}
        self._prompt_count = 0

    def __len__(self) -> int:
        return len(self._inhabitants)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._inhabitants

    @property
    def has_prompts(self) -> bool:
        """Whether somebody waits for a first token."""
        return self._prompt_count > 0

    def put(self, request: RequestView, number: int, turn_index: int) -> None:
        """A request is outside from now on."""
        assert request.request_id not in self._inhabitants, request.request_id
        self._inhabitants[request.request_id] = (number, turn_index, request)
        self._prompt_count += not request.output_tokens
        self._push(number, request)

    def take(self, request_id: str) -> RequestView | None:
        """It went in or away; its view, None if it was not here."""
        found = self._inhabitants.pop(request_id, None)
        if found is None:
            return None
        if self._decode_keys.pop(request_id, None) is None:
            self._prompt_count -= 1
        return found[2]

    def rank_by(self, ranking: Ranking) -> None:
        """Order everyone anew; O(n), for a change of policy."""
        self._ranking = ranking
        self._prompts.clear()
        self._decodes.clear()
        self._decode_keys.clear()
        for number, _, request in self._inhabitants.values():
            self._push(number, request)

    def overdue(self, since_turn: int) -> Iterator[RequestView]:
        """Those outside since `since_turn` or longer, longest first."""
        for _, left, request in self._inhabitants.values():
            if left > since_turn:
                return
            yield request

    @property
    def decode_keys(self) -> Collection[float]:
        """Keys of those with output tokens."""
        return self._decode_keys.values()

    def prompts(self) -> Queue:
        """Those without an output token."""
        return Queue(self._prompts, self._inhabitants)

    def decodes(self) -> Queue:
        """Those with output tokens."""
        return Queue(self._decodes, self._inhabitants)

    def _push(self, number: int, request: RequestView) -> None:
        if request.output_tokens:
            entry = (self._ranking.decode_key(request), request.arrival_s, number, request)
            heappush(self._decodes, entry)
            self._decode_keys[request.request_id] = entry[0]
        else:
            entry = (self._ranking.prompt_key(request), request.arrival_s, number, request)
            heappush(self._prompts, entry)


class Queue:
    """Looks through a heap in order during one decision; `close` puts back what it took."""

    def __init__(self, heap: list[Entry], inhabitants: Inhabitants) -> None:
        self._heap = heap
        self._inhabitants = inhabitants
        self._seen: list[Entry] = []

    def first(self) -> Entry | None:
        """The first not passed yet."""
        heap = self._heap
        while heap:
            entry = heap[0]
            found = self._inhabitants.get(entry[3].request_id)
            if found is not None and found[2] is entry[3]:
                return entry
            heappop(heap)
        return None

    def step(self) -> None:
        """Pass the first."""
        self._seen.append(heappop(self._heap))

    def close(self) -> None:
        """Put everything back."""
        for entry in self._seen:
            heappush(self._heap, entry)
        self._seen.clear()
