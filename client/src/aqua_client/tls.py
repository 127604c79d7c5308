"""TLS files, followed while they change: certificates are renewed under a process that goes on.

A context is made anew once one of its files is another one, and handshakes take the newest: no
restart, no signal, and an authority that was taken out is trusted no longer. While files do not fit
together, as half-way through a replacement, the last good ones serve. Kubernetes' secrets, and so
cert-manager's (`ca.crt`, `tls.crt`, `tls.key`), are replaced all at once.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path
from typing import Any, Self

from aqua_protocol.errors import ConfigError

log = logging.getLogger(__name__)


class TlsFiles(ssl.SSLContext):
    """PEM files of one side, as a context to give away once: each handshake takes them as they are.

    Safe to share between threads.

    Args:
        ca: Authorities to trust; a client's are the system's without.
        cert: Our own certificate, and its chain.
        key: Its key, without a password; None where it is in the same file.
        server: Whether we are a server: its clients' certificates are then checked against `ca`.
    """

    def __new__(cls, *_: object, **__: object) -> Self:
        """Make what handshakes are begun on; none takes anything else of it."""
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(
        self,
        ca: Path | None = None,
        cert: Path | None = None,
        key: Path | None = None,
        *,
        server: bool = False,
    ) -> None:
        self._ca, self._cert, self._key, self._server = ca, cert, key, server
        self._paths = [path for path in (ca, cert, key) if path is not None]
        self._versions: list[tuple[int, ...] | None] = []
        self._context: ssl.SSLContext | None = None

    def __str__(self) -> str:
        return ", ".join(map(str, self._paths))

    @classmethod
    def from_environment(cls) -> Self:
        """A client's, of the variables that members, commands and the doctor read."""
        names = ("AQUA_TLS_CA", "AQUA_TLS_CLIENT_CERT", "AQUA_TLS_CLIENT_KEY")
        return cls(*(Path(path) if (path := os.environ.get(name)) else None for name in names))

    def context(self) -> ssl.SSLContext:
        """The context for a handshake that begins now.

        Raises:
            ConfigError: The files are no good, and have not been before.
        """
        # Versions before contents: a change in between shows as another version the next time.
        versions = [file_version(path) for path in self._paths]
        if self._context is None or versions != self._versions:
            try:
                self._context = self._make()
            except (OSError, ValueError) as error:
                if self._context is None:
                    raise ConfigError(
                        f"cannot use the TLS files {self}: {error}",
                        remedy="Let the variables AQUA_TLS_... name PEM files that this user may "
                        "read: authorities, a certificate, and its key without a password.",
                    ) from error
                log.warning("TLS files not usable, keeping the old: %s: %s", self, error)
            self._versions = versions
        return self._context

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:  # noqa: ANN401 - ssl's
        """Begin a handshake in memory."""
        return self.context().wrap_bio(*arguments, **options)

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:  # noqa: ANN401 - ssl's
        """Begin a handshake on a socket."""
        return self.context().wrap_socket(*arguments, **options)

    def _make(self) -> ssl.SSLContext:
        purpose = ssl.Purpose.CLIENT_AUTH if self._server else ssl.Purpose.SERVER_AUTH
        context = ssl.create_default_context(purpose, cafile=self._ca)
        if self._server:
            # Each connection is checked in full, none resumes one that was.
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.num_tickets = 0
            # Who asks for /healthz has no certificate. Who needs one is told so in words.
            context.verify_mode = ssl.CERT_OPTIONAL if self._ca else ssl.CERT_NONE
        if self._cert or self._key:
            # With a password: without one, OpenSSL would ask for it on the terminal.
            context.load_cert_chain(self._cert or "", self._key, password="")
        return context


def file_version(path: Path) -> tuple[int, ...] | None:
    """What differs once a file has been written or replaced; None when it is not there."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size
