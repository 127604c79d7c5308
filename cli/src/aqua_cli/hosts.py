"""Names that a service goes by: the `Host` of a request, against DNS rebinding.

A page from elsewhere may let its own name point to 127.0.0.1 and then speak to what listens there
as its own origin. A service without tokens trusts every process on its machine, browsers among
them, so it answers only to names that no other site can have: loopback, the address it listens on,
and those that its operator names. With tokens such a page has none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from aqua_cli.service import is_loopback
from aqua_protocol.errors import MisdirectedRequestError

MAX_CACHED_HOSTS: Final = 64
"""Headers whose answer is kept, which saves 3 us a request. Doubled, it saves nothing more."""
_HOST: Final = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[0-9a-z._-]{1,253})(:[0-9]{1,5})?")


class AllowedHosts:
    """Tells whether requests are meant for a service.

    Args:
        names: Of it, beside those of loopback.
        variable: What its operator names further ones in.
    """

    def __init__(self, names: Iterable[str], *, variable: str) -> None:
        self._names = {name.lower() for name in names}
        self._variable = variable
        self._is_ours = lru_cache(MAX_CACHED_HOSTS)(self._look_up)

    def require(self, header: bytes | None) -> None:
        """Refuse a request to somebody else.

        Raises:
            MisdirectedRequestError: It names another host, or none.
        """
        if not self._is_ours(header or b""):
            raise MisdirectedRequestError(
                "the Host header names no host that is served here",
                remedy="Call it by an address that it listens on, or add the name: "
                f"{self._variable}.",
            )

    def _look_up(self, header: bytes) -> bool:
        match = _HOST.fullmatch(header.decode("latin-1").lower())
        name = match[1].strip("[]") if match else ""
        return name in self._names or is_loopback(name)
