"""Demand: when to ask for peer memory and when to give some back. Pure; time is a parameter.

The rules, and the trouble each prevents:

- Ask for what is spilled or wished for, as soon as the coordinator says that some is available:
  asking blindly would cost a call per heartbeat for nothing.
- After a reclaim, wait. The producer took memory back because it needs it; taking it again at the
  first sign of slack would move the same bytes to and fro. The wait doubles when a lease was
  reclaimed soon after it began, and falls back to the least once leases last again.
- After a refusal, wait as long as the refusal says, or with doubling pauses.
- Give back slabs that have held nothing for a while, all but what is wished for: somebody else may
  be spilling. The delay keeps a store that breathes from returning and asking in turns.

Source: the hysteresis is ours; Aqua section 6 moves tensors back as soon as a producer offers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

CALM_S: Final = 1.0
"""Seconds of the least wait after a reclaim: one heartbeat, so that the coordinator knows of it.
Doubled, peer memory stays empty a second longer after each burst."""

MAX_CALM_S: Final = 60.0
"""Seconds of the longest wait. A minute is long for a burst; doubled, memory that is free again is
found up to a minute later."""

SHORT_LEASE_S: Final = 10.0
"""Seconds. A lease that is reclaimed sooner did not pay for its promotion and its drain. Doubled,
producers with bursts every 10 to 20 s are asked more seldom."""

FIRST_PAUSE_S: Final = 0.5
"""Seconds of the first pause after a refusal that names none. Doubled, the second attempt comes
half a second later."""

MAX_PAUSE_S: Final = 30.0
"""Seconds of the longest such pause; bounds calls to a full cluster. Doubled, memory that comes
free is found up to 30 s later."""

SURPLUS_GRACE_S: Final = 5.0
"""Seconds that slabs may hold nothing before they go back: longer than a store breathes between
requests. Doubled, unused slabs are kept from others twice as long."""

MAX_ATTACHMENTS: Final = 64
"""Leases held at once. Each is a connection; a consumer uses a handful. Doubled, twice the
descriptors."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a consumer has and could use, at one instant, in slabs.

    Attributes:
        used_count: Frames, wherever they are.
        wished_count: Slabs to hold even when nothing is in them.
        limit_count: Frames there can ever be.
        kept_count: Leased slabs that are not asked back.
        available_count: What a lease could get now, as the coordinator said last.
        attachment_count: Leases in use.
    """

    used_count: int
    wished_count: int
    limit_count: int
    kept_count: int
    available_count: int
    attachment_count: int

    @property
    def target_count(self) -> int:
        """Slabs that would all be put to use."""
        return min(max(self.used_count, self.wished_count), self.limit_count)

    @property
    def missing_count(self) -> int:
        """Slabs that would be put to use if they were here."""
        return max(self.target_count - self.kept_count, 0)

    @property
    def surplus_count(self) -> int:
        """Slabs that hold nothing and are not wished for."""
        return max(self.kept_count - self.target_count, 0)


@dataclass(frozen=True, slots=True)
class RequestLease:
    """Ask the coordinator for this many slabs, or fewer."""

    slab_count: int


@dataclass(frozen=True, slots=True)
class ReturnSurplus:
    """Return this many slabs that hold nothing."""

    slab_count: int


class LeaseBackoff:
    """What the past says about asking again; not thread-safe."""

    def __init__(self) -> None:
        self._not_before_s = float("-inf")
        self._calm_s = CALM_S
        self._pause_s = FIRST_PAUSE_S
        self._attached_at_s: float | None = None
        self._surplus_since_s: float | None = None

    def note_attached(self, now_s: float) -> None:
        """A lease has begun."""
        self._attached_at_s = now_s
        self._pause_s = FIRST_PAUSE_S

    def note_reclaim(self, now_s: float) -> None:
        """A producer wants slabs back."""
        if self._attached_at_s is not None:  # The first since then; others belong to it.
            is_short = now_s - self._attached_at_s < SHORT_LEASE_S
            self._calm_s = min(self._calm_s * 2, MAX_CALM_S) if is_short else CALM_S
            self._attached_at_s = None
        self._not_before_s = max(self._not_before_s, now_s + self._calm_s)

    def note_refusal(self, now_s: float, retry_after_s: float | None) -> None:
        """The coordinator or a producer refused, or did not answer."""
        pause_s = self._pause_s if retry_after_s is None else retry_after_s
        self._not_before_s = max(self._not_before_s, now_s + min(pause_s, MAX_PAUSE_S))
        self._pause_s = min(self._pause_s * 2, MAX_PAUSE_S)

    def decide(self, need: Need, now_s: float) -> RequestLease | ReturnSurplus | None:
        """What to do now; None is to wait until something changes or `wake_s`."""
        if not need.surplus_count:
            self._surplus_since_s = None
        elif self._surplus_since_s is None:
            self._surplus_since_s = now_s
        elif now_s >= self._surplus_since_s + SURPLUS_GRACE_S:
            self._surplus_since_s = None
            return ReturnSurplus(need.surplus_count)
        count = min(need.missing_count, need.available_count)
        if not count or need.attachment_count >= MAX_ATTACHMENTS or now_s < self._not_before_s:
            return None
        return RequestLease(count)

    def wake_s(self, now_s: float) -> float | None:
        """When to decide again although nothing has changed; None for never."""
        times = [self._not_before_s]
        if self._surplus_since_s is not None:
            times.append(self._surplus_since_s + SURPLUS_GRACE_S)
        return min((time for time in times if time > now_s), default=None)
