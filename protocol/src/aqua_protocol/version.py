"""The protocol version, and which versions can talk to each other.

`PROTOCOL_VERSION` counts incompatible changes of the wire: messages, tables, token format. Both
sides say it first and refuse loudly; guessing across versions is how memory gets corrupted.
"""

from __future__ import annotations

from typing import Final

from aqua_protocol.errors import VersionMismatchError

# Fixed: a count of changes.
PROTOCOL_VERSION: Final = 1


def require_protocol_version(theirs: int, *, who: str) -> None:
    """Refuse a peer that speaks another protocol version.

    Raises:
        VersionMismatchError: `theirs` differs; `details` carries both numbers.
    """
    if theirs != PROTOCOL_VERSION:
        message = f"{who} speaks protocol {theirs}, this side speaks {PROTOCOL_VERSION}"
        raise VersionMismatchError(message, theirs=theirs, ours=PROTOCOL_VERSION)
