"""Waiting requests in the ranking's order, prompts and decodes apart.

Two heaps by the ranking's keys, and a queue by the time of leaving memory for those that have
waited too long. The entry of a request that was admitted stays in its heap and is dropped when it
surfaces, so that every event costs O(log n) and a decision looks only at those it may admit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from heapq import heappop, heappush
from typing import NamedTuple

from aqua_schedulers.cfs.ranking import Ranking
from aqua_schedulers.cfs.views import RequestView

RankedRequest = tuple[float, float, int, RequestView]
"""Key, arrival, number and request, lowest first; numbers count arrivals, so no two are equal.

A plain tuple: a slice makes one for each running request, and a named one takes eight times as
long to make.
"""


class _Waiting(NamedTuple):
    number: int
    since_slice: int
    request: RequestView


class WaitingQueue:
    """Holds each waiting request once."""

    def __init__(self, ranking: Ranking) -> None:
        self._ranking = ranking
        # In the order of leaving memory; ordered dictionaries are cheap to take from the front.
        self._waiting: OrderedDict[str, _Waiting] = OrderedDict()
        self._prompts: list[RankedRequest] = []
        self._decodes: list[RankedRequest] = []
        self._decode_keys: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def has_prompts(self) -> bool:
        """Whether some request waits for its first token."""
        return len(self._waiting) > len(self._decode_keys)

    @property
    def decode_keys(self) -> Collection[float]:
        """Keys of the requests with output tokens."""
        return self._decode_keys.values()

    def add(self, request: RequestView, number: int, slice_index: int) -> None:
        """A request waits from now, slice `slice_index`, on."""
        assert request.request_id not in self._waiting, request.request_id
        self._waiting[request.request_id] = _Waiting(number, slice_index, request)
        self._push(number, request)

    def remove(self, request_id: str) -> RequestView | None:
        """A request was admitted or ended; its view, None if it was not waiting."""
        self._decode_keys.pop(request_id, None)
        found = self._waiting.pop(request_id, None)
        return None if found is None else found.request

    def rank_by(self, ranking: Ranking) -> None:
        """Order all requests anew; O(n), for a change of ranking."""
        self._ranking = ranking
        self._prompts.clear()
        self._decodes.clear()
        self._decode_keys.clear()
        for each in self._waiting.values():
            self._push(each.number, each.request)

    def overdue(self, since_slice: int) -> Iterator[RequestView]:
        """Requests that wait since `since_slice` or longer, longest first."""
        for each in self._waiting.values():
            if each.since_slice > since_slice:
                return
            yield each.request

    @contextmanager
    def scan(self) -> Iterator[tuple[HeapScan, HeapScan]]:
        """Look through prompts and decodes, in the ranking's order, during one decision."""
        prompts, decodes = (
            HeapScan(heap, self._waiting) for heap in (self._prompts, self._decodes)
        )
        yield prompts, decodes
        prompts.restore()
        decodes.restore()

    def _push(self, number: int, request: RequestView) -> None:
        key = self._ranking.key(request)
        if request.output_tokens:
            self._decode_keys[request.request_id] = key
        heap = self._decodes if request.output_tokens else self._prompts
        heappush(heap, (key, request.arrival_s, number, request))


class HeapScan(Iterator[RankedRequest]):
    """Yields a heap's waiting requests in order; `restore` puts back those that it passed."""

    def __init__(self, heap: list[RankedRequest], waiting: Mapping[str, _Waiting]) -> None:
        self._heap = heap
        self._waiting = waiting
        self._passed: list[RankedRequest] = []
        self._has_begun = False
        self._is_stopped = False

    def __next__(self) -> RankedRequest:
        heap = self._heap
        if self._is_stopped:
            raise StopIteration
        if self._has_begun:
            self._passed.append(heappop(heap))
        self._has_begun = True
        while heap:
            request = heap[0][3]
            found = self._waiting.get(request.request_id)
            if found is not None and found.request is request:
                return heap[0]
            heappop(heap)
        self._is_stopped = True
        raise StopIteration

    def stop(self) -> None:
        """End the scan: no request behind the last one is wanted."""
        self._is_stopped = True

    def restore(self) -> None:
        """Put all entries back."""
        for entry in self._passed:
            heappush(self._heap, entry)
        self._passed.clear()
