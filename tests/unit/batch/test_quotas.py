"""A tenant's rate of online requests: a minute's worth at once, then as they come free."""

from __future__ import annotations

import pytest

from aqua_batch.service.refusals import RateLimitError
from aqua_batch.service.rows.quotas import RequestRates, TenantLimits


def test_a_minutes_requests_may_come_at_once_and_then_one_by_one() -> None:
    now_s = [1000.0]
    rates = RequestRates(lambda: now_s[0])
    red = TenantLimits("red", requests_per_minute=30)
    for _ in range(30):
        rates.count(red)
    for _ in range(3):  # Refused requests cost nothing.
        with pytest.raises(RateLimitError) as caught:
            rates.count(red)
        assert caught.value.retry_after_s == pytest.approx(2.0)
    now_s[0] += 2.0
    rates.count(red)
    with pytest.raises(RateLimitError):
        rates.count(red)
    now_s[0] += 3600.0
    for _ in range(30):
        rates.count(red)


def test_tenants_are_counted_apart_and_without_a_limit_not_at_all() -> None:
    rates = RequestRates(lambda: 0.0)
    rates.count(TenantLimits("red", requests_per_minute=1))
    rates.count(TenantLimits("blue", requests_per_minute=1))
    for _ in range(100):
        rates.count(TenantLimits("green"))
    with pytest.raises(RateLimitError):
        rates.count(TenantLimits("red", requests_per_minute=1))
