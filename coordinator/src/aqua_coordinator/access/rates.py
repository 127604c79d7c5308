"""How often a token, and a tenant, may ask for grants and report: token buckets.

Honest members stay far below: one reports once in a heartbeat and when something changes, and asks
again after a refusal only when it may help. Each coordinator counts what it is asked itself, so a
token may use as many times the rate as there are coordinators. Without tokens nothing is counted.

A report counts for one, and each reclaim in it for one more: the books keep a record of each for
minutes, so this is also what bounds them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from aqua_coordinator.access.tokens import MAX_TOKENS
from aqua_protocol.errors import RateLimitedError

if TYPE_CHECKING:
    from prometheus_client import Counter

    from aqua_coordinator.access.auth import Caller
    from aqua_coordinator.access.quotas import Quotas
    from aqua_coordinator.settings import CoordinatorSettings

BURST_S: Final = 5.0
"""Seconds of a rate that may be used at once, by one that was idle: members that all start anew.
Doubled, a flood lasts 5 s longer."""


class RateKind(StrEnum):
    """What is counted."""

    GRANTS = "grants"
    REPORTS = "reports"


class _Bucket:
    __slots__ = ("at_s", "level_s")

    def __init__(self) -> None:
        self.level_s, self.at_s = BURST_S, 0.0

    def fill(self, now_s: float) -> float:
        """Let it fill with time, and give its level, in seconds of its rate."""
        self.level_s = min(BURST_S, self.level_s + max(0.0, now_s - self.at_s))
        self.at_s = now_s
        return self.level_s


class CallerRates:
    """The buckets of one coordinator.

    Args:
        settings: With the rates of each token.
        quotas: With the rates of tenants.
        refused: Counts refusals, by what was asked.
        clock: Seconds; replaced in tests.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        quotas: Quotas,
        refused: Counter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._of_token = {
            RateKind.GRANTS: settings.max_grants_per_s,
            RateKind.REPORTS: settings.max_reports_per_s,
        }
        self._quotas = quotas
        self._refused = refused
        self._clock = clock
        self._bucket = lru_cache(2 * len(RateKind) * MAX_TOKENS)(lambda *_: _Bucket())

    def take(self, caller: Caller, kind: RateKind, count: int = 1) -> None:
        """Count `count` requests of a caller, or none of them.

        Raises:
            RateLimitedError: The rate of its token, or of its tenant, is used up.
        """
        if caller.token is None:
            return
        rates = [("token", caller.token_id, self._of_token[kind])]
        quota = self._quotas.content.of(caller.tenant)
        of_tenant = quota and (
            quota.grants_per_s if kind is RateKind.GRANTS else quota.reports_per_s
        )
        if of_tenant:
            rates.append(("tenant", caller.tenant, of_tenant))
        now_s = self._clock()
        buckets = [(self._bucket(kind, whose, name), rate) for whose, name, rate in rates]
        for (bucket, rate), (whose, name, _) in zip(buckets, rates, strict=True):
            # What is more than a full bucket empties it further, instead of never being let in.
            missing_s = round(min(count / rate, BURST_S) - bucket.fill(now_s), 6)
            if missing_s > 0:
                self._refused.labels(kind).inc()
                raise RateLimitedError(
                    f"{whose} {name} may make {rate:g} {kind} a second",
                    retry_after_s=missing_s,
                    limit_per_s=rate,
                )
        for bucket, rate in buckets:
            bucket.level_s -= count / rate
