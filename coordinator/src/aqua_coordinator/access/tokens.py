"""The tokens file: who may call, hashed at rest.

A token is `aqua_<id>_<secret>` with 256 random bits of secret. The file keeps the SHA-256 of the
whole and never the token itself: against that much randomness guessing is hopeless, so a slow
password hash would only slow down every request. The id finds the entry; the hash is compared in
constant time.

The file is JSON, readable by its owner only, replaced as a whole and under a lock, so `create`
and `revoke` may run at once and a coordinator never reads half a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import secrets
import time
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from aqua_cli import write_json
from aqua_protocol import ConfigError, UnknownResourceError
from aqua_protocol.ids import Name

PREFIX: Final = "aqua"
SECRET_BYTES: Final = 32
"""256 bits, beyond guessing; doubled, it adds nothing."""
ID_BYTES: Final = 6
"""Enough that ids differ by chance; they are no secret. Fixed by the pattern of `token_id`."""
MAX_TOKENS: Final = 65_536
"""One for each member of the largest cluster; doubled, reading the file takes a second."""
MAX_TOKEN_LENGTH: Final = 128
"""Characters that are hashed of what claims to be a token: ours have 61. Doubled, a forged one
costs a microsecond more."""


class Role(StrEnum):
    """What a token's bearer may do. Every role may read."""

    PRODUCER = "producer"
    """Report and remove producers, and change their offers."""
    CONSUMER = "consumer"
    """Report and remove consumers; ask for, renew and release leases."""
    OPERATOR = "operator"
    """Everything."""
    READER = "reader"
    """Read only."""


class TokenEntry(BaseModel):
    """One token as it is kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    token_id: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    roles: Annotated[list[Role], Field(min_length=1, max_length=len(Role))]
    member: Name | None = Field(None, description="The only member it may speak for.")
    tenant: Name | None = Field(None, description="Whose members it sees and speaks for alone.")
    note: Annotated[str, Field(max_length=256)] = ""
    created_s: float = Field(ge=0, description="Unix time.")
    expires_s: float | None = Field(None, ge=0, description="Unix time; null: never.")

    @model_validator(mode="after")
    def _operators_are_of_no_tenant(self) -> Self:
        if self.tenant is not None and Role.OPERATOR in self.roles:
            message = "an operator sees everything: its token has no tenant"
            raise ValueError(message)
        return self


class TokensFile(BaseModel):
    """The file's content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    tokens: list[TokenEntry] = Field(default_factory=list, max_length=MAX_TOKENS)

    @model_validator(mode="after")
    def _ids_are_distinct(self) -> Self:
        if len({entry.token_id for entry in self.tokens}) != len(self.tokens):
            message = "a token_id appears twice"
            raise ValueError(message)
        return self


def digest(token: str) -> str:
    """What is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def read_tokens(path: Path) -> TokensFile:
    """Read and check the whole file.

    Raises:
        ConfigError: Missing, unreadable, open to others, or not a tokens file.
    """
    try:
        mode = path.stat().st_mode
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the tokens file {path}: {error}",
            remedy=f"Make one with `aqua-coordinator token --file {path} --role operator`.",
        ) from error
    if mode & 0o022:
        raise ConfigError(
            f"others may write the tokens file {path}", remedy=f"Run `chmod 600 {path}`."
        )
    try:
        return TokensFile.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(
            f"{path} is not a tokens file: {error.errors(include_input=False)[0]['msg']}",
            remedy="Restore it from a backup, or delete it and make new tokens.",
        ) from error


def create_token(
    path: Path,
    *,
    roles: list[Role],
    member: str | None = None,
    tenant: str | None = None,
    expires_in_s: float | None = None,
    note: str = "",
) -> tuple[str, TokenEntry]:
    """Add a token to the file, making the file if needed.

    Returns:
        The token, which is nowhere kept, and its entry.

    Raises:
        ConfigError: The file or an argument is no good.
    """
    token_id = secrets.token_hex(ID_BYTES)
    token = f"{PREFIX}_{token_id}_{secrets.token_urlsafe(SECRET_BYTES)}"
    now_s = time.time()
    try:
        entry = TokenEntry(
            token_id=token_id,
            sha256=digest(token),
            roles=sorted(set(roles)),
            member=member,
            tenant=tenant,
            note=note,
            created_s=now_s,
            expires_s=None if expires_in_s is None else now_s + expires_in_s,
        )
    except ValidationError as error:
        fault = error.errors(include_input=False)[0]
        where = "".join(f"{part}: " for part in fault["loc"][:1])
        raise ConfigError(f"{where}{fault['msg']}") from error
    with _locked(path):
        present = read_tokens(path).tokens if path.exists() else []
        if len(present) >= MAX_TOKENS:
            raise ConfigError(f"{path} holds {MAX_TOKENS} tokens", remedy="Revoke some.")
        _write(path, [*present, entry])
    return token, entry


def parse_duration(text: str) -> float:
    """Seconds of `90s`, `15m`, `12h` or `30d`.

    Raises:
        ConfigError: Not a duration.
    """
    match = re.fullmatch(r"(\d{1,6})([smhd])", text)
    if match is None or int(match[1]) == 0:
        raise ConfigError(
            f"{text!r} is not a duration", remedy="Write a number and s, m, h or d: 12h."
        )
    return int(match[1]) * {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}[match[2]]


def revoke_token(path: Path, token_id: str) -> None:
    """Take a token out of the file; coordinators notice within a second.

    Raises:
        UnknownResourceError: No such token.
    """
    with _locked(path):
        present = read_tokens(path).tokens
        left = [entry for entry in present if entry.token_id != token_id]
        if len(left) == len(present):
            raise UnknownResourceError(
                f"there is no token {token_id} in {path}",
                remedy="`aqua-coordinator token list` shows the ids.",
            )
        _write(path, left)


def _write(path: Path, tokens: list[TokenEntry]) -> None:
    """Write the file, without what is unset: versions before do not know all of it."""
    content = TokensFile(tokens=tokens).model_dump(mode="json", exclude_none=True)
    write_json(path, content, mode=0o600)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other writers away: a lock beside the file, since the file itself is replaced."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"cannot write the tokens file {path}: {error}", remedy="Choose a writable directory."
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
