"""Settings: every variable bounded, every mistake named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aqua_protocol import MIB, ConfigError, TransportKind
from aqualib.producer.escalation import Escalation
from aqualib.settings import PREFIX, Settings, load_settings, socket_directory
from harness.other_user import STRANGER, needs_root


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"{PREFIX}{name.upper()}", raising=False)


def test_defaults_work_on_one_machine() -> None:
    settings = load_settings()
    assert settings.coordinator_url == "http://127.0.0.1:7700"
    assert settings.slab_bytes == 64 * MIB
    assert settings.escalation is Escalation.WAIT


def test_variables_are_read_in_words_people_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "AQUA_SLAB_BYTES": "2MiB",
        "AQUA_TRANSPORT": "memfd",
        "AQUA_TOKEN": "hush",
        "AQUA_ALLOWED_UIDS": "0,1000",
        "AQUA_ESCALATION": "kill",
        "AQUA_CHECKSUM": "true",
        "AQUA_EMULATED_HBM_BYTES": "1GiB",
        # Another service's variable in the same environment.
        "AQUA_REDIS_URL": "redis://host",
    }.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert settings.slab_bytes == 2 * MIB
    assert settings.transport is TransportKind.MEMFD
    assert settings.token is not None
    assert settings.token.get_secret_value() == "hush"
    assert settings.allowed_uids == frozenset({0, 1000})
    assert settings.escalation is Escalation.KILL
    assert settings.checksum
    assert "hush" not in repr(settings)


def test_an_override_wins_and_none_leaves_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUA_SLAB_BYTES", "2MiB")
    monkeypatch.setenv("AQUA_HEARTBEAT_S", "3")
    settings = load_settings(slab_bytes=4 * MIB, heartbeat_s=None)
    assert (settings.slab_bytes, settings.heartbeat_s) == (4 * MIB, 3.0)


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUA_TRANSPORT", "")
    monkeypatch.setenv("AQUA_ALLOWED_UIDS", "")
    assert load_settings() == load_settings(transport=None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AQUA_SLAB_BYTES", "64 parsecs"),
        ("AQUA_SLAB_BYTES", "1KiB"),
        ("AQUA_TRANSPORT", "carrier pigeon"),
        ("AQUA_ESCALATION", "nuke"),
        ("AQUA_RECLAIM_DEADLINE_S", "0"),
        ("AQUA_RECLAIM_DEADLINE_S", "inf"),
        ("AQUA_HEARTBEAT_S", "-1"),
        ("AQUA_ALLOWED_UIDS", "root"),
        ("AQUA_ALLOWED_UIDS", "0,"),
        ("AQUA_NODE", "no/slashes"),
        ("AQUA_CHECKSUM", "perhaps"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=name):
        load_settings()


def test_every_wrong_value_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUA_SLAB_BYTES", "x")
    monkeypatch.setenv("AQUA_ESCALATION", "x")
    with pytest.raises(ConfigError, match=r"AQUA_SLAB_BYTES.*AQUA_ESCALATION"):
        load_settings()


def test_a_misspelt_override_is_an_error() -> None:
    with pytest.raises(ConfigError, match="AQUA_SLABBYTES"):
        load_settings(slabbytes=1)


def test_every_setting_is_described() -> None:
    undescribed = [name for name, field in Settings.model_fields.items() if not field.description]
    assert undescribed == []


def test_the_socket_directory_is_made_for_this_user_alone(tmp_path: Path) -> None:
    directory = socket_directory(tmp_path / "new" / "aqua")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert socket_directory(directory) == directory


def test_a_directory_where_others_can_replace_sockets_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="others can replace"):
        socket_directory(tmp_path)
    tmp_path.chmod(0o1777)
    assert socket_directory(tmp_path) == tmp_path


def test_one_user_may_be_allowed_as_well_as_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUA_ALLOWED_UIDS", "1000")
    assert load_settings().allowed_uids == frozenset({1000})


@needs_root
@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o700])
def test_a_directory_of_another_user_is_refused(tmp_path: Path, mode: int) -> None:
    os.chown(tmp_path, STRANGER, STRANGER)
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match="others can replace"):
        socket_directory(tmp_path)


def test_a_symbolic_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "home")
    with pytest.raises(ConfigError, match="symbolic link"):
        socket_directory(tmp_path / "link")


def test_a_directory_that_cannot_be_made_is_an_error_that_names_the_variable(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="AQUA_SOCKET_DIR"):
        socket_directory(tmp_path / "file" / "aqua")


def test_the_default_directory_is_the_users_runtime_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert socket_directory() == tmp_path / "aqua"
