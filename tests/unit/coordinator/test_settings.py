"""Settings: bounded, from the environment, safe by default."""

from __future__ import annotations

from pathlib import Path

import pytest

from aqua_cli.service import is_loopback
from aqua_coordinator.settings import (
    CoordinatorSettings,
    default_data_dir,
    load_settings,
)
from aqua_protocol import ConfigError


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables of whoever runs the tests."""
    import os

    for name in list(os.environ):
        if name.startswith("AQUA_"):
            monkeypatch.delenv(name)


def test_defaults_are_a_coordinator_for_this_machine_alone() -> None:
    settings = load_settings()
    settings.require_safe_address()
    assert settings.listen_host == "127.0.0.1"
    assert settings.redis_url is None


def test_the_environment_is_read_and_arguments_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUA_LISTEN_PORT", "1234")
    monkeypatch.setenv("AQUA_REDIS_URL", "redis://u:hunter2@h:1/0")
    monkeypatch.setenv("AQUA_COORDINATOR_URL", "http://somewhere-else")
    assert load_settings().listen_port == 1234
    settings = load_settings(listen_port=4321, listen_host=None)
    assert (settings.listen_port, settings.listen_host) == (4321, "127.0.0.1")
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AQUA_LISTEN_PORT", "70000"),
        ("AQUA_LISTEN_PORT", "http"),
        ("AQUA_STORE_TIMEOUT_S", "0"),
        ("AQUA_SILENT_MEMBER_S", "3"),
        ("AQUA_ATTACH_WINDOW_S", "nan"),
        ("AQUA_FSYNC", "sometimes"),
        ("AQUA_LOG_LEVEL", "loud"),
        ("AQUA_MAX_CONCURRENT_REQUESTS", "0"),
    ],
)
def test_a_value_out_of_bounds_is_named_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        load_settings()


def test_a_secret_that_does_not_fit_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUA_CAPABILITY_SECRET", "too-short-hunter2")
    with pytest.raises(ConfigError) as caught:
        load_settings()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_tokens(host: str) -> None:
    assert is_loopback(host)
    CoordinatorSettings(listen_host=host).require_safe_address()


@pytest.mark.parametrize("host", ["192.168.0.1", "10.0.0.5", "::", "localhost.evil", "aqua"])
def test_any_other_address_does(host: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CoordinatorSettings(listen_host=host).require_safe_address()
    assert "aqua-coordinator token" in caught.value.remedy
    CoordinatorSettings(listen_host=host, tokens_file=Path("tokens.json")).require_safe_address()


def test_every_setting_is_described() -> None:
    for name, field in CoordinatorSettings.model_fields.items():
        assert field.description, name


def test_state_goes_where_state_belongs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/srv/state")
    assert default_data_dir() == Path("/srv/state/aqua")
