"""Who calls, and what they may do.

A request is authenticated once, from its `Authorization` header, into a `Caller`; operations then
ask the caller, in one line each, whether it may act for the member they touch. Without a tokens
file every caller is the operator, which is why such a coordinator listens on loopback only
(`CoordinatorSettings.require_safe_address`).
"""

from __future__ import annotations

import hmac
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aqua_coordinator.access.followed_file import FollowedFile
from aqua_coordinator.access.tokens import (
    MAX_TOKEN_LENGTH,
    PREFIX,
    Role,
    TokenEntry,
    digest,
    read_tokens,
)
from aqua_protocol.errors import ForbiddenError, UnauthenticatedError


@dataclass(frozen=True, slots=True)
class Caller:
    """The bearer of a token.

    Attributes:
        roles: What it may do.
        member: The only member it may speak for; None when it is not bound to one.
        tenant: Whose members it may see and speak for; '' for all.
        token: As it was in the tokens file when the caller called; None when there are no tokens.
    """

    roles: frozenset[Role]
    member: str | None = None
    tenant: str = ""
    token: TokenEntry | None = field(default=None, compare=False, repr=False)

    @property
    def token_id(self) -> str:
        """The id of its token, or nothing where there are no tokens."""
        return "" if self.token is None else self.token.token_id

    @property
    def is_bound(self) -> int:
        """1 if it speaks for one member only, 0 otherwise."""
        return int(self.member is not None)

    def require_no_tenant(self) -> None:
        """Refuse what shows members of all tenants.

        Raises:
            ForbiddenError: The token is of a tenant.
        """
        if self.tenant:
            raise ForbiddenError(
                "this shows what is not of one tenant alone",
                remedy="Use a token without a tenant.",
                tenant=self.tenant,
            )

    def require(self, role: Role, *, member: str | None = None) -> None:
        """Refuse unless the caller has `role` (or is an operator) and may speak for `member`.

        Raises:
            ForbiddenError: It has not, or may not.
        """
        if role not in self.roles and Role.OPERATOR not in self.roles:
            raise ForbiddenError(
                f"this needs a token with the role {role}",
                needs=[role, Role.OPERATOR],
                has=sorted(self.roles),
            )
        if member is not None and self.member is not None and member != self.member:
            raise ForbiddenError(
                "this token is bound to another member",
                remedy=f"Use a token bound to {member}, or one that is not bound.",
                member=member,
            )


ANONYMOUS: Final = Caller(frozenset(Role))
"""The caller when there are no tokens: some process on this machine."""


class Authenticator:
    """Turns `Authorization` headers into callers.

    Args:
        tokens_file: None to let every caller in as operator.

    Raises:
        ConfigError: The file cannot be used.
    """

    def __init__(self, tokens_file: Path | None) -> None:
        self._file = None if tokens_file is None else FollowedFile(tokens_file, _callers_in)

    @property
    def wants_tokens(self) -> bool:
        """Whether a request needs a token."""
        return self._file is not None

    def authenticate(self, header: str | None) -> Caller:
        """The caller behind an `Authorization` header.

        Raises:
            UnauthenticatedError: No token, an unknown or revoked one, or one that has expired.
        """
        if self._file is None:
            return ANONYMOUS
        if header is None:
            raise UnauthenticatedError("this needs a token")
        scheme, _, token = header.partition(" ")
        parts = token.split("_", 2)
        if scheme.lower() != "bearer" or len(parts) != 3 or parts[0] != PREFIX:  # noqa: PLR2004 - `aqua_<id>_<secret>`
            raise UnauthenticatedError("the Authorization header carries no token of Aqua's")
        caller = self._file.content.get(parts[1], _NOBODY)
        entry = caller.token
        # An unknown id is compared as well, so that time does not tell known ids from unknown.
        expected = _NO_DIGEST if entry is None else entry.sha256
        matches = hmac.compare_digest(digest(token[:MAX_TOKEN_LENGTH]), expected)
        if entry is None or not matches:
            raise UnauthenticatedError("the token is unknown or has been revoked")
        if entry.expires_s is not None and entry.expires_s <= time.time():
            raise UnauthenticatedError("the token has expired", token_id=entry.token_id)
        return caller

    def remaining_s(self, caller: Caller) -> float:
        """How long the caller's token is still good, unless it is revoked; 0 when it is not."""
        entry = caller.token
        if entry is None or self._file is None:
            return math.inf
        if self._file.content.get(entry.token_id, _NOBODY).token != entry:
            return 0.0
        return math.inf if entry.expires_s is None else max(0.0, entry.expires_s - time.time())

    def refresh(self) -> bool:
        """Read the tokens file again if it has changed, and tell whether there are other tokens.

        A bad one leaves them as they are.
        """
        return self._file is not None and self._file.refresh()


def _callers_in(path: Path) -> dict[str, Caller]:
    return {
        entry.token_id: Caller(frozenset(entry.roles), entry.member, entry.tenant or "", entry)
        for entry in read_tokens(path).tokens
    }


_NO_DIGEST: Final = "0" * 64
_NOBODY: Final = Caller(frozenset())
