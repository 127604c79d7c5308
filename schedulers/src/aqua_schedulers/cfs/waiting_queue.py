"""Waiting requests in the ranking's order, prompts and decodes apart.

Two sorted lists by the ranking's keys, which a decision reads from the front as far as memory
reaches, and a queue by the time of leaving memory for those that have waited too long. An event
costs O(log n) comparisons and moves the list's pointers behind it: less than a heap's bookkeeping
while fewer than some 100,000 requests wait, and no decision has to put back what it looked at.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Iterator

from aqua_schedulers.cfs.ranking import Ranking
from aqua_schedulers.cfs.views import RequestView

RankedRequest = tuple[float, bool, float, int, RequestView]
"""Key, whether running ones of this key go first, arrival, number and request, lowest first.

Numbers count arrivals, so no two are equal. A plain tuple: a slice makes one for each running
request, and a named one takes eight times as long to make.
"""


class WaitingQueue:
    """Holds each waiting request once.

    Attributes:
        prompts: Requests without an output token, in order; read only.
        decodes: Requests with output tokens, likewise.
    """

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        # Slice of leaving memory and rank; ordered dictionaries are cheap to take from the front.
        self._waiting: OrderedDict[str, tuple[int, RankedRequest]] = OrderedDict()
        self._decode_keys: dict[str, float] = {}
        self.prompts: list[RankedRequest] = []
        self.decodes: list[RankedRequest] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def decode_keys(self) -> Collection[float]:
        """Keys of the requests with output tokens, in the order of leaving memory."""
        return self._decode_keys.values()

    def add(self, request: RequestView, number: int, slice_index: int) -> None:
        """A request waits from now, slice `slice_index`, on."""
        name = request.request_id
        assert name not in self._waiting, name
        ranking = self._ranking
        ranked = (ranking.key(request), ranking.keeps_equals, request.arrival_s, number, request)
        self._waiting[name] = (slice_index, ranked)
        if request.output_tokens:
            self._decode_keys[name] = ranked[0]
            insort(self.decodes, ranked)
        else:
            insort(self.prompts, ranked)

    def remove(self, request_id: str) -> RequestView | None:
        """A request was admitted or ended; its view, None if it was not waiting."""
        found = self._waiting.pop(request_id, None)
        if found is None:
            return None
        ranked = found[1]
        is_prompt = self._decode_keys.pop(request_id, None) is None
        ordered = self.prompts if is_prompt else self.decodes
        del ordered[bisect_left(ordered, ranked)]
        return ranked[4]

    def rank_by(self, ranking: Ranking) -> None:
        """Order all requests anew; O(n log n), for a change of ranking."""
        self._ranking = ranking
        waiting = list(self._waiting.values())
        for each in (self._waiting, self._decode_keys, self.prompts, self.decodes):
            each.clear()
        for since_slice, (_, _, _, number, request) in waiting:
            self.add(request, number, since_slice)

    def overdue(self, since_slice: int) -> Iterator[RequestView]:
        """Requests that wait since `since_slice` or longer, longest first."""
        for since, ranked in self._waiting.values():
            if since > since_slice:
                return
            yield ranked[4]
