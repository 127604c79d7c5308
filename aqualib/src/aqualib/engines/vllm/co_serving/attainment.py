"""SLO attainment: how many online requests were served within their objectives; without vLLM.

A request is judged twice: when its first token comes, by the time since it came to the engine's
front end; and when it ends, by the mean time between its tokens. That is how both are usually
defined, and it keeps the cost away from steps: a token that is not a request's first is not looked
at, so a step of decodes costs one look for requests that still wait for theirs.

One whose client leaves is judged as far as it got. Without a token it has missed the objective once
that has passed, and is not judged before: else an engine on which all give up would look perfect.
With an answer begun, the gap under way counts as if its token had come now. Stop strings end so,
too: vLLM's front end finds them, and has the engine abort.

Not judged are sessions, which wait for their client between two turns, and requests for embeddings,
which have no tokens. Offline requests have neither objective.
"""

from __future__ import annotations

from collections.abc import Mapping

from aqua_schedulers.conserve import Objectives


class OnlineAttainment:
    """Online requests of one engine, judged by its objectives.

    Attributes:
        first_tokens: Requests whose first token came, or whose client left after `ttft_s` without.
        first_tokens_in_time: Of these, those that had it within `ttft_s`.
        answers: Requests that ended with two tokens or more.
        answers_in_time: Of these, those with no more than `tpot_s` between two of them, in the
            mean.
    """

    def __init__(self, objectives: Objectives) -> None:
        self.first_tokens = 0
        self.first_tokens_in_time = 0
        self.answers = 0
        self.answers_in_time = 0
        self._objectives = objectives
        # Of each request: when it came, until it has a token, and from then on when it had it.
        self._arrivals_s: dict[str, float] = {}
        self._first_tokens_s: dict[str, float] = {}

    def arrived(self, request_id: str, came_s: float) -> None:
        """A request arrived, which came to the front end at that time."""
        self._arrivals_s[request_id] = came_s

    def awaited(self, scheduled: Mapping[str, int]) -> set[str]:
        """Requests of a step, given with their tokens, that had none before it."""
        return self._arrivals_s.keys() & scheduled.keys()

    def first_token(self, request_id: str, now_s: float) -> None:
        """An awaited request has its first token."""
        waited_s = now_s - self._arrivals_s.pop(request_id)
        self._first_tokens_s[request_id] = now_s
        self.first_tokens += 1
        self.first_tokens_in_time += waited_s <= self._objectives.ttft_s

    def ended(self, request_id: str, tokens: int, now_s: float, *, is_left: bool) -> None:
        """A request of either class ended.

        Args:
            request_id: Whose.
            tokens: Of its answer.
            now_s: When it had the last of them, or was left.
            is_left: Whether its client left it.
        """
        if tokens and request_id in self._arrivals_s:
            self.first_token(request_id, now_s)
        came_s = self._arrivals_s.pop(request_id, now_s)
        self.first_tokens += now_s - came_s > self._objectives.ttft_s
        begun_s = self._first_tokens_s.pop(request_id, None)
        if begun_s is not None and tokens > 1:
            gaps = tokens - 1 + is_left
            self.answers += 1
            self.answers_in_time += now_s - begun_s <= gaps * self._objectives.tpot_s

    def forget(self, request_id: str) -> None:
        """A request goes on as a session: it is judged no further."""
        self._arrivals_s.pop(request_id, None)
        self._first_tokens_s.pop(request_id, None)
