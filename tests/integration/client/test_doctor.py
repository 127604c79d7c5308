"""What the doctor says of a real coordinator, and of a token with each role."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from aqua_client import CoordinatorClient
from aqua_client.doctor import probe_coordinator
from aqua_coordinator.access.tokens import Role, create_token
from aqua_protocol.findings import Finding, FindingLevel
from harness.coordinator_process import CoordinatorProcess
from harness.store_servers import short_directory

TOKENS: dict[Role, str] = {}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A coordinator that wants tokens, one of each role in `TOKENS`."""
    with short_directory() as directory:
        file = directory / "tokens.json"
        TOKENS.update({role: create_token(file, roles=[role])[0] for role in Role})
        with CoordinatorProcess(directory / "d", AQUA_TOKENS_FILE=str(file)) as running:
            yield running.url


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AQUA_COORDINATOR_URL", "AQUA_TOKEN", "AQUA_TLS_CA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AQUA_REQUEST_TIMEOUT_S", "60")


def findings() -> dict[str, Finding]:
    return {finding.check: finding for finding in probe_coordinator()}


@pytest.mark.parametrize("role", list(Role))
def test_the_roles_of_a_token_are_told(
    url: str, role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AQUA_COORDINATOR_URL", url)
    monkeypatch.setenv("AQUA_TOKEN", TOKENS[role])
    found = findings()
    assert {finding.level for finding in found.values()} == {FindingLevel.OK}
    assert url in found["coordinator"].message
    assert role.value in found["token"].message


def test_a_missing_token_is_a_next_step_and_a_wrong_one_a_fault(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AQUA_COORDINATOR_URL", url)
    assert findings()["token"].level is FindingLevel.WARN
    monkeypatch.setenv("AQUA_TOKEN", "aqua_unknown_secret")
    found = findings()["token"]
    assert found.level is FindingLevel.FAIL
    assert "revoked" in found.message


def test_a_coordinator_of_another_version_is_told_apart(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AQUA_COORDINATOR_URL", url)
    monkeypatch.setattr("aqua_client.doctor.version", lambda _: "9.9")
    found = findings()["coordinator"]
    assert found.level is FindingLevel.WARN
    assert "here is 9.9" in found.message


def test_no_coordinator_is_a_next_step_and_a_named_one_that_is_away_a_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        away = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setattr("aqua_client.doctor.DEFAULT_URL", away)
        found = findings()["coordinator"]
        assert found.level is FindingLevel.WARN
        assert "aqua coordinator serve" in found.remedy
        monkeypatch.setenv("AQUA_COORDINATOR_URL", away)
        assert findings()["coordinator"].level is FindingLevel.FAIL


def test_an_address_that_is_none_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUA_COORDINATOR_URL", "coordinator:7700")
    assert findings()["coordinator"].level is FindingLevel.FAIL


def test_without_authentication_no_token_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with short_directory() as directory, CoordinatorProcess(Path(directory) / "d") as running:
        monkeypatch.setenv("AQUA_COORDINATOR_URL", running.url)
        assert findings()["token"].message == "none, and none is needed"


def test_a_coordinator_gets_the_time_that_members_give_it(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock(wraps=CoordinatorClient)
    monkeypatch.setattr("aqua_client.doctor.CoordinatorClient", made)
    monkeypatch.setenv("AQUA_COORDINATOR_URL", url)
    monkeypatch.setenv("AQUA_REQUEST_TIMEOUT_S", "59.5")
    assert findings()["coordinator"].level is FindingLevel.OK
    assert made.call_args.kwargs["timeout_s"] == 59.5


@pytest.mark.parametrize("text", ["soon", "0", "-1", "61", "nan", "inf"])
def test_a_time_that_is_none_is_a_fault(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUA_REQUEST_TIMEOUT_S", text)
    found = findings()["coordinator"]
    assert found.level is FindingLevel.FAIL
    assert "AQUA_REQUEST_TIMEOUT_S" in found.message
