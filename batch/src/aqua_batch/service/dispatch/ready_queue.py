"""Leased requests that wait for a place at an engine, by model.

An engine takes only requests of the models that it has, so each model has a queue of its own: one
whose engines are full holds none of the others up, and costs them no look at what it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from typing import NamedTuple

from aqua_batch.service.rows.request_rows import LeasedRequest


class ReadyRequest(NamedTuple):
    """A leased request with what is sent to an engine that has its model."""

    request: LeasedRequest
    body: bytes
    model: str


class ReadyQueue:
    """Requests of each model in the order in which they came."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[ReadyRequest]] = {}

    def __iter__(self) -> Iterator[ReadyRequest]:
        for queue in self._queues.values():
            yield from queue

    @property
    def models(self) -> tuple[str, ...]:
        """Those that have requests, the one first that has waited longest for its turn."""
        return tuple(self._queues)

    def count(self, model: str | None) -> int:
        """Requests of a model; of all for None."""
        if model is None:
            return sum(map(len, self._queues.values()))
        return len(self._queues.get(model, ()))

    def put(self, ready: ReadyRequest) -> None:
        """Add a request behind the others of its model."""
        self._queues.setdefault(ready.model, deque()).append(ready)

    def put_back(self, ready: ReadyRequest) -> None:
        """Add a request before the others of its model: it has had its turn."""
        self._queues.setdefault(ready.model, deque()).appendleft(ready)

    def take(self, model: str) -> ReadyRequest:
        """Take a model's next request; its next turn comes after those of the other models.

        Raises:
            KeyError: It has none.
        """
        queue = self._queues.pop(model)
        ready = queue.popleft()
        if queue:
            self._queues[model] = queue
        return ready

    def drop(self, batches: Collection[int]) -> None:
        """Forget the requests of these batches."""
        kept = [each for each in self if each.request.batch not in batches]
        self.clear()
        for each in kept:
            self.put(each)

    def clear(self) -> None:
        """Forget all."""
        self._queues.clear()
