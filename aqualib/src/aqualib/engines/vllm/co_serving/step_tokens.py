"""StepTokens: what a plan leaves each request of the step that vLLM schedules."""

from __future__ import annotations

from collections.abc import Mapping


class StepTokens:
    """How many tokens each request may take in the step that vLLM schedules now.

    Args:
        offline: Of each offline request; one that is not named takes none.
        online: Of online requests together.
    """

    def __init__(self, offline: Mapping[str, int], online: int) -> None:
        self._offline = offline
        self._online_left = online

    def take(self, request_id: str, wanted: int, *, is_offline: bool, is_inside: bool) -> int:
        """Tokens for a request that wants so many.

        One that comes in now takes one at least: it has memory already, or was admitted by the
        plan, and at a request that takes nothing vLLM admits no other.
        """
        if is_offline:
            return min(wanted, max(self._offline.get(request_id, 0), 0 if is_inside else 1))
        tokens = min(wanted, self._online_left)
        self._online_left -= tokens
        return tokens
