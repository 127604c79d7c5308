"""Rates: bursts are let in, floods are not, and each token and tenant is counted alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from prometheus_client import Counter

from aqua_coordinator.access.auth import ANONYMOUS, Authenticator, Caller
from aqua_coordinator.access.quotas import Quotas
from aqua_coordinator.access.rates import BURST_S, CallerRates, RateKind
from aqua_coordinator.access.tokens import Role, create_token
from aqua_coordinator.settings import CoordinatorSettings
from aqua_protocol.errors import RateLimitedError


class Asked:
    """Rates with a clock that is told."""

    def __init__(self, directory: Path) -> None:
        self.now_s = 1000.0
        self._tokens = directory / "tokens.json"
        quotas = directory / "quotas.json"
        quotas.write_text(json.dumps({"tenants": {"team": {"grants_per_s": 2.0}}}))
        self.rates = CallerRates(
            CoordinatorSettings(max_grants_per_s=10.0, max_reports_per_s=20.0),
            Quotas(quotas),
            Counter("refused", "In a test.", ("kind",), registry=None),
            lambda: self.now_s,
        )

    def caller(self, tenant: str | None = None) -> Caller:
        """The bearer of a fresh token."""
        token, _ = create_token(self._tokens, roles=[Role.CONSUMER], tenant=tenant)
        return Authenticator(self._tokens).authenticate(f"Bearer {token}")

    def take_all(self, caller: Caller, kind: RateKind = RateKind.GRANTS) -> int:
        """Ask until it is refused."""
        count = 0
        with pytest.raises(RateLimitedError) as caught:  # noqa: PT012 - the last of them
            while count < 1000:
                self.rates.take(caller, kind)
                count += 1
        self.now_s += caught.value.retry_after_s or math.inf
        self.rates.take(caller, kind)
        return count


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


def test_a_token_may_use_some_seconds_of_its_rate_at_once_and_then_its_rate(asked: Asked) -> None:
    one, other = asked.caller(), asked.caller()
    assert asked.take_all(one) == 10 * BURST_S
    assert asked.take_all(other) == 10 * BURST_S
    assert asked.take_all(one, RateKind.REPORTS) == 20 * BURST_S
    asked.now_s += 3600.0
    assert asked.take_all(one) == 10 * BURST_S


def test_tokens_of_a_tenant_share_its_rate(asked: Asked) -> None:
    one, other = asked.caller("team"), asked.caller("team")
    assert asked.take_all(one) == 2 * BURST_S
    assert asked.take_all(other) == 0
    assert asked.take_all(asked.caller("others")) == 10 * BURST_S
    assert asked.take_all(one, RateKind.REPORTS) == 20 * BURST_S


def test_a_heartbeat_of_more_than_a_burst_is_let_in_and_paid_for(asked: Asked) -> None:
    caller = asked.caller()
    asked.rates.take(caller, RateKind.REPORTS, 256)
    with pytest.raises(RateLimitedError) as caught:
        asked.rates.take(caller, RateKind.REPORTS, 256)
    assert caught.value.retry_after_s == pytest.approx(256 / 20)


def test_without_tokens_nothing_is_counted(asked: Asked) -> None:
    asked.rates.take(ANONYMOUS, RateKind.GRANTS, 10**9)
    assert math.isinf(Authenticator(None).remaining_s(ANONYMOUS))
