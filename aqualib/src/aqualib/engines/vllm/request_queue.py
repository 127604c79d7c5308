"""The waiting line: all waiting requests, of which the scheduler sees those whose turn it is.

vLLM's scheduling loop admits from the head of `waiting` until it is empty or something does not
fit. The line has the interface of that queue, but its head is the order that the policy decided,
and it is "empty" when nobody else is admitted, though it still counts and yields everyone: what is
unfinished, aborted or reported must not depend on whose turn it is.

Requests that the loop takes and puts back stay admitted, at the head.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any


class PolicyRequestQueue:
    """A queue of vLLM's requests behind a gate."""

    def __init__(self) -> None:
        self._everyone: dict[str, Any] = {}
        self._admitted: deque[Any] = deque()

    # --- The gate -------------------------------------------------------------------------

    def admit(self, request_ids: Iterable[str]) -> None:
        """Show exactly these, in this order, until told otherwise; unknown ones are left out."""
        everyone = self._everyone
        self._admitted = deque(everyone[name] for name in request_ids if name in everyone)

    # --- vLLM's RequestQueue: the head is what is admitted ----------------------------------

    def __bool__(self) -> bool:
        return bool(self._admitted)

    def peek_request(self) -> Any:
        """The next request whose turn it is.

        Raises:
            IndexError: It is nobody's turn.
        """
        return self._admitted[0]

    def pop_request(self) -> Any:
        """Take the next request whose turn it is.

        Raises:
            IndexError: It is nobody's turn.
        """
        request = self._admitted.popleft()
        del self._everyone[request.request_id]
        return request

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Take back what the scheduling loop skipped; in reverse order, as vLLM's queue does."""
        for request in requests:
            self._everyone[request.request_id] = request
            self._admitted.appendleft(request)

    # --- vLLM's RequestQueue: everyone ------------------------------------------------------

    def __len__(self) -> int:
        return len(self._everyone)

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._everyone.values()))

    def add_request(self, request: Any) -> None:
        """A request begins to wait."""
        self._everyone[request.request_id] = request

    def prepend_request(self, request: Any) -> None:
        """A preempted request begins to wait; its turn is for the policy to say."""
        self._everyone[request.request_id] = request

    def remove_request(self, request: Any) -> None:
        """A request waits no more."""
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Requests wait no more; those that never did are left out."""
        names = {request.request_id for request in requests} & self._everyone.keys()
        for name in names:
            del self._everyone[name]
        if any(request.request_id in names for request in self._admitted):
            self._admitted = deque(
                request for request in self._admitted if request.request_id not in names
            )
