"""The pace of copies to and from one lender's memory, as it asks for.

Every copy is counted and none is stopped in the middle. What requests wait for goes on at once and
leaves a debt; the background waits until the debt is paid: promotions, and after them write-behind.
So of a rate that is too small for all, what no request waits for gives way first. It is never held
up for ever: where requests alone take more than the rate, the debt is never paid, and the
background makes a copy `MAX_DEBT_S` after the debt began, or after its own last copy is paid.

Any thread may count. Two that do so at once may count one copy in two, which a rate can bear; a
lock would be on the way of each page.
"""

from __future__ import annotations

from typing import Final

MAX_DEBT_S: Final = 1.0
"""Seconds of the rate that copies which requests wait for leave as a debt at most, so that the
background goes on a second after a burst. Doubled, it waits for up to two."""


class CopyPace:
    """What a lender asks for, and what has been copied; times in seconds of one monotonic clock.

    Attributes:
        bytes_per_s: The rate; None while there is none.
    """

    def __init__(self) -> None:
        self.bytes_per_s: float | None = None
        self._ends_at_s = 0.0
        self._paid_at_s = 0.0
        self._debt_since_s = 0.0
        # As if the background copied alone.
        self._background_paid_at_s = 0.0

    def ask(self, bytes_per_s: float, lasts_s: float, now_s: float) -> None:
        """The lender asks for a rate, for a while; 0 asks for no background copies."""
        self._ends_at_s = now_s + lasts_s
        self._paid_at_s = min(self._paid_at_s, now_s + MAX_DEBT_S)
        self._background_paid_at_s = min(self._background_paid_at_s, self._paid_at_s)
        self.bytes_per_s = bytes_per_s

    def copied(self, nbytes: int, now_s: float, *, is_awaited: bool) -> None:
        """Count a copy.

        Args:
            nbytes: Its size.
            now_s: When it was made, or is about to be.
            is_awaited: Whether a request waits for it.
        """
        if self.bytes_per_s:
            if self._paid_at_s <= now_s:
                self._debt_since_s = now_s
            paid_at_s = max(self._paid_at_s, now_s) + nbytes / self.bytes_per_s
            if is_awaited:
                paid_at_s = min(paid_at_s, max(self._paid_at_s, now_s + MAX_DEBT_S))
            else:
                begun_s = max(self._background_paid_at_s, now_s)
                self._background_paid_at_s = begun_s + nbytes / self.bytes_per_s
            self._paid_at_s = paid_at_s

    def ready_at_s(self, now_s: float) -> float:
        """When the background may copy again, if nothing else is copied; `now_s` or later."""
        if self.bytes_per_s is None:
            return now_s
        if now_s >= self._ends_at_s:
            self.bytes_per_s = None
            return now_s
        if not self.bytes_per_s:
            return self._ends_at_s
        held_since_s = max(self._debt_since_s, self._background_paid_at_s)
        paid_at_s = min(self._paid_at_s, held_since_s + MAX_DEBT_S)
        return max(now_s, min(paid_at_s, self._ends_at_s))
