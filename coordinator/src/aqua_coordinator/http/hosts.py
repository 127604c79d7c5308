"""Names that a coordinator goes by: the `Host` of a request, against DNS rebinding.

A page from elsewhere may let its own name point to 127.0.0.1 and then speak to what listens there
as its own origin. A coordinator without a tokens file trusts every process on its machine, browsers
among them, so it answers only to names that no other site can have: loopback, the address it
listens on, and those of `AQUA_ALLOWED_HOSTS`. With a tokens file such a page has no token; names
are then checked only if some are configured.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from aqua_cli.service import is_loopback
from aqua_coordinator.settings import CoordinatorSettings
from aqua_protocol.errors import MisdirectedRequestError

MAX_CACHED_HOSTS: Final = 64
"""Headers whose answer is kept, which saves 3 us a request. Doubled, it saves nothing more."""
_HOST: Final = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[0-9a-z._-]{1,253})(:[0-9]{1,5})?")


class AllowedHosts:
    """Tells whether requests are meant for this coordinator."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self._names = {name.lower() for name in (settings.listen_host, *settings.allowed_hosts)}
        self._checks = settings.tokens_file is None or bool(settings.allowed_hosts)
        self._is_ours = lru_cache(MAX_CACHED_HOSTS)(self._look_up)

    def require(self, header: bytes | None) -> None:
        """Refuse a request to somebody else.

        Raises:
            MisdirectedRequestError: It names another host, or none.
        """
        if self._checks and not self._is_ours(header or b""):
            raise MisdirectedRequestError("the Host header names no host that is served here")

    def _look_up(self, header: bytes) -> bool:
        match = _HOST.fullmatch(header.decode("latin-1").lower())
        name = match[1].strip("[]") if match else ""
        return name in self._names or is_loopback(name)
