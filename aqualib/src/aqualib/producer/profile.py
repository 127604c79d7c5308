"""What profiling found out about an engine, as the informer goes by it.

`aqua-profile` measures a `ModelProfile`; from it follow how much is lent, up to which rate of
requests, and how many may wait. The queue at the steady rate is given by two figures, the share of
the time in which any wait and how many wait on average; their geometric tail says which length is
reached by chance once an hour, and no longer queue is taken for chance.

Source: Aqua section 4.1; the geometric tail is that of M/M/1 and, in heavy traffic, of GI/G/1
(Kingman 1962).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, Self, TypeAlias

from aqua_protocol import ConfigError
from aqua_protocol.profile import (
    PRODUCER_THRESHOLD_BYTES,
    ModelProfile,
    ProfileKind,
    ProfileLabel,
    StableQueue,
)
from aqualib.producer.arrivals import FALSE_ALARM_ARRIVALS, FALSE_ALARM_SPACING_S

QUEUE_ALARM_SPACING: Final = 2.0
"""Mean time between false alarms by the queue, in terms of those by arrivals: one an hour. Doubled,
one more request waits before memory is taken back."""

CALM_QUEUE_SHARE: Final = 0.05
"""Share of the time in which the queue at the steady rate is longer than what counts as calm.
Doubled, memory is offered while fewer wait."""

LEAST_WAITING_SHARE: Final = 0.01
"""Share of the time in which requests wait at the steady rate, at least: a search looks some
hundred times. Doubled, less than one more request may wait."""

LEAST_WAITING: Final = 1.5
"""Requests that wait on average while any do, at least: they come in twos by chance. Doubled, twice
as many may wait before memory is taken back, where the profile saw hardly any."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What profiling found out about an engine, and how cautious to be.

    Attributes:
        slab_bytes: Unit of every decision.
        spare_bytes: Memory to offer in the steady state, for engines that reserve all memory for
            themselves and give it up on request (LLMs). None: whatever is not in use (batch).
        steady_requests_per_s: Highest rate within the objective; None where rate says nothing.
        steady_queue_length: Waiting requests that are normal at that rate.
        queue_margin: Waiting requests beyond it that mean pressure.
        reserve_bytes: Device memory that stays unused after an offer. When less than half of it
            is left, memory is taken back.
        least_offer_bytes: Do not begin to offer less than this.
        calm_s: How long the load must stay at or below the steady state before an offer.
    """

    slab_bytes: int
    spare_bytes: int | None = None
    steady_requests_per_s: float | None = None
    steady_queue_length: int = 0
    queue_margin: int = 2
    reserve_bytes: int = 0
    least_offer_bytes: int = PRODUCER_THRESHOLD_BYTES
    calm_s: float = 5.0

    @classmethod
    def followed(cls, measured: ModelProfile | None, slab_bytes: int) -> Self:
        """What an engine goes by that has given none itself: the books', or what it does not use.

        A model that is no producer lends nothing.
        """
        if measured is None:
            return cls(slab_bytes)
        if measured.label is not ProfileLabel.PRODUCER:
            return cls(slab_bytes, spare_bytes=0)
        return cls.measured(measured, slab_bytes)

    @classmethod
    def measured(cls, measured: ModelProfile, slab_bytes: int) -> Self:
        """What `aqua-profile` found out about a producer.

        Raises:
            ConfigError: The profile is not a whole one of a producer.
        """
        if measured.partial or measured.label is not ProfileLabel.PRODUCER:
            label = "partial" if measured.partial else measured.label.value
            raise ConfigError(
                f"the profile of {measured.model!r} is {label}, so nothing is lent by it",
                remedy="Profile a producer to the end, or write the informer's profile yourself.",
            )
        least_bytes = min(measured.threshold_bytes, measured.spare_bytes or 0)
        if measured.kind is ProfileKind.BATCH:
            return cls(slab_bytes, least_offer_bytes=least_bytes)
        profile = cls(slab_bytes, spare_bytes=measured.spare_bytes, least_offer_bytes=least_bytes)
        return profile.steady_as(measured)

    def steady_as(self, measured: ModelProfile) -> Self:
        """This profile with the steady state of another: its rate, and its queue if it has one."""
        rate_per_s = measured.stable_rate_per_s or None
        if rate_per_s is None or measured.queue is None:
            return replace(self, steady_requests_per_s=rate_per_s)
        calm, most = queue_levels(measured.queue, rate_per_s)
        return replace(
            self,
            steady_requests_per_s=rate_per_s,
            steady_queue_length=calm,
            queue_margin=most - calm,
        )

    def __post_init__(self) -> None:
        assert self.slab_bytes > 0, self
        assert self.steady_requests_per_s is None or self.steady_requests_per_s > 0, self
        assert min(self.reserve_bytes, self.queue_margin, self.calm_s) >= 0, self


ProfileRule: TypeAlias = Callable[[ModelProfile | None], Profile]
"""Makes an informer's profile of what the books have of the model; None: nothing that is usable."""


def queue_levels(queue: StableQueue, rate_per_s: float) -> tuple[int, int]:
    """Waiting requests that are calm, and most that are no pressure, by the queue at this rate.

    A queue's tail is geometric. A request that arrives while it is n long makes it longer, so it
    reaches a length as often as arrivals find it there.
    """
    share = max(queue.waiting_share, LEAST_WAITING_SHARE)
    waiting = max(queue.mean_length / share, LEAST_WAITING)
    falls = -math.log1p(-1.0 / waiting)
    spacing = max(FALSE_ALARM_SPACING_S * rate_per_s, FALSE_ALARM_ARRIVALS) * QUEUE_ALARM_SPACING
    calm = math.ceil(math.log(share / CALM_QUEUE_SHARE) / falls)
    most = math.ceil(math.log(share * spacing) / falls)
    return max(0, calm), max(0, calm, most)
