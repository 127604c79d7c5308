"""How a bearer token is shown to a service over HTTP (RFC 6750)."""

from __future__ import annotations

from aqua_protocol.errors import ConfigError


def bearer_headers(token: str | None) -> dict[str, str]:
    """The header that shows a token; empty without one.

    Raises:
        ConfigError: It has characters that no header carries. It is not repeated: it is a secret.
    """
    if not token:
        return {}
    if not (token.isascii() and token.isprintable()):
        raise ConfigError(
            "the bearer token has characters that no header carries",
            remedy="Look for a line end, or letters beyond ASCII, where the token is kept.",
        )
    return {"Authorization": f"Bearer {token}"}
