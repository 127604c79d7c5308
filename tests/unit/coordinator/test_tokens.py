"""Tokens: hashed at rest, compared whole, read anew, refused when in doubt."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aqua_cli.program import command_of, run
from aqua_coordinator.access.auth import ANONYMOUS, Authenticator, Caller
from aqua_coordinator.access.tokens import (
    Role,
    TokensFile,
    create_token,
    parse_duration,
    read_tokens,
    revoke_token,
)
from aqua_coordinator.cli import app
from aqua_protocol import ConfigError, UnknownResourceError
from aqua_protocol.errors import ForbiddenError, UnauthenticatedError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A tokens file that is not there yet."""
    return tmp_path / "deep" / "tokens.json"


def test_the_file_never_holds_a_token_and_belongs_to_its_owner(path: Path) -> None:
    token, entry = create_token(path, roles=[Role.READER], note="for the dashboard")
    assert token.split("_")[1] == entry.token_id
    assert token not in path.read_text()
    assert token.split("_", 2)[2] not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_caller_has_the_roles_and_the_member_of_its_token(path: Path) -> None:
    token, _ = create_token(path, roles=[Role.PRODUCER, Role.CONSUMER], member="llm-0")
    caller = Authenticator(path).authenticate(f"Bearer {token}")
    assert caller == Caller(frozenset({Role.PRODUCER, Role.CONSUMER}), "llm-0")
    assert Authenticator(path).authenticate(f"bearer {token}") == caller


def test_a_token_of_the_right_id_and_a_wrong_secret_is_unknown(path: Path) -> None:
    token, _ = create_token(path, roles=[Role.READER])
    other, _ = create_token(path, roles=[Role.OPERATOR])
    forged = "_".join([*token.split("_")[:2], other.split("_", 2)[2]])
    for wrong in (forged, token + "x", token[:-1], token.upper(), f"{token} {token}"):
        with pytest.raises(UnauthenticatedError):
            Authenticator(path).authenticate(f"Bearer {wrong}")


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Token x", "Bearer a_b", "é"])
def test_what_is_no_token_is_refused(path: Path, header: str | None) -> None:
    create_token(path, roles=[Role.READER])
    with pytest.raises(UnauthenticatedError):
        Authenticator(path).authenticate(header)


def test_expiry_is_checked_at_every_call(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token, _ = create_token(path, roles=[Role.READER], expires_in_s=60)
    authenticator = Authenticator(path)
    authenticator.authenticate(f"Bearer {token}")
    later_s = time.time() + 61
    monkeypatch.setattr(time, "time", lambda: later_s)
    with pytest.raises(UnauthenticatedError, match="expired"):
        authenticator.authenticate(f"Bearer {token}")


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(path: Path) -> None:
    first, entry = create_token(path, roles=[Role.READER])
    authenticator = Authenticator(path)
    second, _ = create_token(path, roles=[Role.READER])
    with pytest.raises(UnauthenticatedError):
        authenticator.authenticate(f"Bearer {second}")
    authenticator.refresh()
    authenticator.authenticate(f"Bearer {second}")
    revoke_token(path, entry.token_id)
    authenticator.refresh()
    with pytest.raises(UnauthenticatedError):
        authenticator.authenticate(f"Bearer {first}")
    path.write_text("{")
    authenticator.refresh()
    authenticator.authenticate(f"Bearer {second}")
    path.unlink()
    authenticator.refresh()
    authenticator.authenticate(f"Bearer {second}")


def test_without_a_file_everybody_is_operator() -> None:
    assert Authenticator(None).authenticate(None) == ANONYMOUS
    ANONYMOUS.require(Role.OPERATOR)
    ANONYMOUS.require(Role.PRODUCER, member="anybody")


def test_roles_and_bindings_are_enforced() -> None:
    bound = Caller(frozenset({Role.PRODUCER}), "mine")
    bound.require(Role.PRODUCER, member="mine")
    for role, member in ((Role.PRODUCER, "other"), (Role.CONSUMER, "mine")):
        with pytest.raises(ForbiddenError):
            bound.require(role, member=member)
    Caller(frozenset({Role.OPERATOR})).require(Role.CONSUMER, member="any")
    with pytest.raises(ForbiddenError):
        Caller(frozenset({Role.READER})).require(Role.OPERATOR)


def test_writers_at_the_same_time_lose_nothing(path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: create_token(path, roles=[Role.READER]), range(40)))
    assert {entry.token_id for _, entry in made} == {
        entry.token_id for entry in read_tokens(path).tokens
    }
    with pytest.raises(UnknownResourceError):
        revoke_token(path, "000000000000")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"version": 2, "tokens": []}',
        '{"tokens": [{"token_id": "x"}]}',
        '{"tokens": [], "extra": 1}',
    ],
)
def test_a_file_that_is_no_tokens_file_is_refused(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="is not a tokens file"):
        Authenticator(path)


def test_a_file_with_one_id_twice_or_open_to_others_is_refused(path: Path) -> None:
    create_token(path, roles=[Role.READER])
    content = json.loads(path.read_text())
    path.chmod(0o622)
    with pytest.raises(ConfigError, match="others may write"):
        Authenticator(path)
    path.chmod(0o600)
    content["tokens"] *= 2
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="appears twice"):
        Authenticator(path)
    os.truncate(path, 0)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("12h", 43_200), ("30d", 2_592_000)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "-1h", "1w", "1.5h", "h", "forever"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_duration(text)


@pytest.mark.parametrize("names", [[], ["king"], ["reader", "king"]])
def test_unknown_roles_or_none_are_refused_with_the_list(
    path: Path, names: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    options = [word for name in names for word in ("--role", name)]
    command = command_of(app, "aqua-coordinator")
    assert run(command, "aqua-coordinator", ["token", "--file", str(path), *options]) == 2
    assert "operator" in capfd.readouterr().err
    assert not path.exists()


def test_a_member_that_is_no_name_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="member"):
        create_token(path, roles=[Role.READER], member="a b")
    assert not path.exists()


def test_a_change_while_the_file_is_being_read_is_noticed_at_the_next_look(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, entry = create_token(path, roles=[Role.READER])
    parse = TokensFile.model_validate_json
    revocations = [entry.token_id]

    def parse_and_revoke(text: str) -> TokensFile:
        """The file as it was read; in the meantime a token has been revoked."""
        content = parse(text)
        if revocations:
            revoke_token(path, revocations.pop())
        return content

    monkeypatch.setattr(TokensFile, "model_validate_json", parse_and_revoke)
    authenticator = Authenticator(path)
    authenticator.authenticate(f"Bearer {token}")
    authenticator.refresh()
    with pytest.raises(UnauthenticatedError):
        authenticator.authenticate(f"Bearer {token}")
