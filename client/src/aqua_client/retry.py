"""When a call is repeated, and after which pause: one rule for both clients.

Only calls that may be repeated are, and only where a repetition can help: no answer, or an answer
that says "not now" (`UnavailableError` and its children, HTTP 429 and 503). The pause grows
fourfold each time, is jittered so that a cluster of clients does not come back in step, and is at
least what the answer asks for (`retry_after_s`, `Retry-After`), within the bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from aqua_protocol.errors import UnavailableError

GROWTH = 4
"""Factor from one pause to the next: the third attempt of a restart of the coordinator (about a
second) then falls behind it. Doubled, the bound of a pause is reached at once."""


@dataclass(frozen=True, slots=True)
class RetryRule:
    """Bounds of repetition.

    Attributes:
        max_attempts: Sendings of one call, the first included; 1 repeats nothing.
        first_pause_s: Before the second sending, before jitter.
        max_pause_s: Of any pause, also of one that the coordinator asks for.
    """

    max_attempts: int = 3
    first_pause_s: float = 0.05
    max_pause_s: float = 1.0

    def pause_s(self, error: UnavailableError, *, attempt: int, random: Random) -> float | None:
        """Return the seconds to wait before sending again, or None to give up.

        Args:
            error: Of the sending that failed.
            attempt: Its number, from 1.
            random: Source of the jitter.
        """
        if attempt >= self.max_attempts:
            return None
        grown_s: float = self.first_pause_s * GROWTH ** (attempt - 1)
        jittered_s = grown_s * random.uniform(0.5, 1.5)
        return min(max(jittered_s, error.retry_after_s or 0.0), self.max_pause_s)
