"""API keys: who calls, and as which tenant.

A key is `sk-aqua-<id>-<secret>` with 256 random bits of secret; the database keeps its SHA-256.
Against that much randomness guessing is hopeless, so a slow password hash would only slow down each
request. A revoked key is refused from the next request on, by every service of the database.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Connection, delete, insert, select

from aqua_batch.service.refusals import ApiKeyError
from aqua_batch.service.schema import API_KEYS
from aqua_protocol.errors import UnknownResourceError

PREFIX: Final = "sk-aqua"
SECRET_BYTES: Final = 32
"""256 bits, beyond guessing; doubled, it adds nothing."""
ID_BYTES: Final = 6
"""Enough that ids differ by chance; they are no secret. Doubled, a key is 12 letters longer."""
LONGEST_KEY: Final = 128
"""Characters of what claims to be a key: ours have 71. Doubled, a forged one costs a microsecond
more."""
ANONYMOUS_TENANT: Final = "default"
"""The tenant of all callers of a service without keys."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is kept."""

    key_id: str
    sha256: str
    tenant: str
    note: str
    created_s: int


def add_key(connection: Connection, tenant: str, note: str, now_s: float) -> tuple[str, ApiKey]:
    """Make a key; the key itself, which is nowhere kept, and its row."""
    key_id = secrets.token_hex(ID_BYTES)
    key = f"{PREFIX}-{key_id}-{secrets.token_urlsafe(SECRET_BYTES)}"
    row = ApiKey(key_id, _digest(key), tenant, note, int(now_s))
    connection.execute(
        insert(API_KEYS).values(
            key_id=key_id, sha256=row.sha256, tenant=tenant, note=note, created_s=row.created_s
        )
    )
    return key, row


def list_keys(connection: Connection) -> list[ApiKey]:
    """All keys, oldest first."""
    query = select(API_KEYS).order_by(API_KEYS.c.created_s, API_KEYS.c.key_id)
    return [ApiKey(**row) for row in connection.execute(query).mappings()]


def revoke_key(connection: Connection, key_id: str) -> None:
    """Let a key be refused from now on.

    Raises:
        UnknownResourceError: There is no such key.
    """
    gone = connection.execute(delete(API_KEYS).where(API_KEYS.c.key_id == key_id))
    if gone.rowcount == 0:
        raise UnknownResourceError(
            f"there is no key {key_id}", remedy="`aqua batch key list` shows the ids."
        )


def tenant_of(connection: Connection, authorization: str | None) -> str:
    """The tenant behind an `Authorization` header.

    Raises:
        ApiKeyError: No key, or one that is unknown or revoked.
    """
    scheme, _, key = (authorization or "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        raise ApiKeyError(
            "You didn't provide an API key", remedy="Send it as `Authorization: Bearer KEY`."
        )
    parts = key[:LONGEST_KEY].removeprefix(f"{PREFIX}-").split("-", 1)
    row = connection.execute(select(API_KEYS).where(API_KEYS.c.key_id == parts[0])).one_or_none()
    expected = row.sha256 if row is not None else "0" * 64
    # An unknown id is compared as well, so that time does not tell known ids from unknown.
    if not hmac.compare_digest(_digest(key[:LONGEST_KEY]), expected) or row is None:
        raise ApiKeyError("Incorrect API key provided: it is unknown or has been revoked")
    return str(row.tenant)


def has_keys(connection: Connection) -> bool:
    """Whether there is any key, so that callers have to show one."""
    return connection.execute(select(API_KEYS.c.key_id).limit(1)).first() is not None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
