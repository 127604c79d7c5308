"""vLLM's queue of waiting requests, of which its scheduler sees those that the policy admits.

vLLM's scheduling loop admits from the head of `waiting` until it is empty or something does not
fit. `PolicyRequestQueue` has that queue's interface (`RequestQueue`), but its head is the order
that the policy decided, and it is "empty" when no other request is admitted, though it still counts
and yields all of them: what is unfinished, aborted or reported must not depend on the policy.

Requests that the loop takes and puts back stay admitted, at the head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any


class PolicyRequestQueue:
    """Holds all waiting requests and yields the admitted ones."""

    def __init__(self) -> None:
        self._waiting: dict[str, Any] = {}
        self._admitted: deque[Any] = deque()

    def admit(self, request_ids: Iterable[str]) -> None:
        """Show exactly these, in this order, until told otherwise; unknown ones are left out."""
        waiting = self._waiting
        self._admitted = deque(waiting[name] for name in request_ids if name in waiting)

    # --- vLLM's RequestQueue: the head is what is admitted ----------------------------------

    def __bool__(self) -> bool:
        return bool(self._admitted)

    def peek_request(self) -> Any:
        """The next admitted request; IndexError if there is none."""
        return self._admitted[0]

    def pop_request(self) -> Any:
        """Take the next admitted request; IndexError if there is none."""
        request = self._admitted.popleft()
        del self._waiting[request.request_id]
        return request

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Take back what the scheduling loop skipped; in reverse order, as vLLM's queue does."""
        for request in requests:
            self._waiting[request.request_id] = request
            self._admitted.appendleft(request)

    # --- vLLM's RequestQueue: all waiting requests ------------------------------------------

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._waiting.values()))

    def add_request(self, request: Any) -> None:
        """A request begins to wait."""
        self._waiting[request.request_id] = request

    def prepend_request(self, request: Any) -> None:
        """A preempted request begins to wait; the policy says when it is admitted."""
        self._waiting[request.request_id] = request

    def remove_request(self, request: Any) -> None:
        """A request waits no more."""
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Requests wait no more; those that never did are left out."""
        for request in requests:
            waiting = self._waiting.pop(request.request_id, None)
            if waiting in self._admitted:
                self._admitted.remove(waiting)
