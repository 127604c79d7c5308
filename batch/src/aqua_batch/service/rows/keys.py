"""API keys: who calls, and as which tenant.

A key is `sk-aqua-<id>-<secret>` with 256 random bits of secret; the database keeps its SHA-256.
Against that much randomness guessing is hopeless, so a slow password hash would only slow down each
request. A revoked key is refused from the next request on, by every service of the database.

Keys are made here one by one, or elsewhere and loaded from a folder, as a Secret is mounted. Of
those the folder is the whole list: leaving one out revokes it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Connection, delete, insert, select
from sqlalchemy.dialects import postgresql, sqlite

from aqua_batch.service.refusals import ApiKeyError
from aqua_batch.service.rows.schema import API_KEYS
from aqua_protocol.errors import ConfigError, UnknownResourceError
from aqua_protocol.ids import Name

PREFIX: Final = "sk-aqua"
SECRET_BYTES: Final = 32
"""256 bits, beyond guessing; doubled, it adds nothing."""
ID_BYTES: Final = 6
"""Enough that ids differ by chance; they are no secret. Doubled, a key is 12 letters longer."""
LONGEST_KEY: Final = 128
"""Characters of what claims to be a key: ours have 71. Doubled, a forged one costs a microsecond
more."""
KEY: Final = re.compile(rf"{PREFIX}-[0-9A-Za-z]{{6,24}}-[0-9A-Za-z_-]{{32,88}}")
"""Fixed, as part of the interface: long enough a secret, and no longer than `LONGEST_KEY`."""
LOADED_NOTE: Final = "loaded from a folder"
"""Fixed: rows of older versions bear it."""
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


def read_key_folder(folder: Path) -> dict[str, str]:
    """The tenant by key of a folder as a Secret is mounted: a file a tenant, a key a line.

    Raises:
        ConfigError: There is no such folder, a name is no tenant's, or a line is no key.
    """
    if not folder.is_dir():
        raise ConfigError(f"no folder {folder}", remedy="Name one with a file for each tenant.")
    tenants: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.is_dir():  # Kubernetes keeps its links there.
            continue
        tenant = tenant_name(path.name)
        for number, line in enumerate(path.read_text().splitlines(), 1):
            key = line.strip()
            if key and (KEY.fullmatch(key) is None or tenants.setdefault(key, tenant) != tenant):
                raise ConfigError(
                    f"line {number} of {path} is no key, or another tenant's",
                    remedy=f"A key is {PREFIX}-$(openssl rand -hex 6)-$(openssl rand -hex 32).",
                )
    return tenants


def replace_loaded_keys(connection: Connection, tenants: Mapping[str, str], now_s: float) -> None:
    """Let the keys of a folder be those of the last one that was loaded; others stay.

    Harmless when repeated, and when several services do it at once.
    """
    digests = {_digest(key): (key, tenant) for key, tenant in tenants.items()}
    loaded = delete(API_KEYS).where(API_KEYS.c.note == LOADED_NOTE)
    connection.execute(loaded.where(API_KEYS.c.sha256.not_in(digests)))
    insert_of = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    for sha256, (key, tenant) in digests.items():
        row = insert_of(API_KEYS).values(
            key_id=_id_in(key), sha256=sha256, tenant=tenant, note=LOADED_NOTE, created_s=int(now_s)
        )
        is_ours = API_KEYS.c.note == LOADED_NOTE
        connection.execute(
            row.on_conflict_do_update(
                index_elements=[API_KEYS.c.key_id], set_={"tenant": tenant}, where=is_ours
            )
        )


def tenant_name(text: str) -> str:
    """A tenant's name as it was given.

    Raises:
        ConfigError: It is none.
    """
    try:
        return str(TypeAdapter(Name).validate_python(text))
    except ValidationError as error:
        raise ConfigError(
            f"{text!r} is no name of a tenant", remedy="Letters, digits, and . _ : - inside."
        ) from error


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
    key_id = _id_in(key[:LONGEST_KEY])
    row = connection.execute(select(API_KEYS).where(API_KEYS.c.key_id == key_id)).one_or_none()
    expected = row.sha256 if row is not None else "0" * 64
    # An unknown id is compared as well, so that time does not tell known ids from unknown.
    if not hmac.compare_digest(_digest(key[:LONGEST_KEY]), expected) or row is None:
        raise ApiKeyError("Incorrect API key provided: it is unknown or has been revoked")
    return str(row.tenant)


def has_keys(connection: Connection) -> bool:
    """Whether there is any key, so that callers have to show one."""
    return connection.execute(select(API_KEYS.c.key_id).limit(1)).first() is not None


def _id_in(key: str) -> str:
    return key.removeprefix(f"{PREFIX}-").split("-", 1)[0]


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
