"""An authority of one's own, and certificates that are replaced as operators replace them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from aqua_client.tls import TlsFiles

HOSTS: Final = ("127.0.0.1", "localhost")


class Authority:
    """Issues certificates.

    Args:
        directory: Where its own certificate goes, as `<name>.pem`.
    """

    def __init__(self, directory: Path, name: str = "authority") -> None:
        import trustme

        self._authority: Final = trustme.CA(organization_name=name)
        self.file: Final = directory / f"{name}.pem"
        self.pem: Final = self._authority.cert_pem.bytes()
        replace(self.file, self.pem)

    def issue(
        self,
        directory: Path,
        *,
        hosts: tuple[str, ...] = HOSTS,
        good_for_s: float = 3600,
        trusted: bytes | None = None,
    ) -> TlsFiles:
        """Put a certificate and its key into a directory, in place of those that are there.

        Gives the files of a client that shows it and trusts this authority, or those of `trusted`.
        With the names of cert-manager's secrets.
        """
        now = datetime.now(UTC)
        issued = self._authority.issue_cert(
            *hosts,
            not_before=now - timedelta(days=2),
            not_after=now + timedelta(seconds=good_for_s),
        )
        directory.mkdir(exist_ok=True)
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        # One after the other, as a script does: in between they do not fit together.
        replace(directory / "tls.crt", chain)
        replace(directory / "tls.key", issued.private_key_pem.bytes())
        replace(directory / "ca.crt", trusted or self.pem)
        return files_in(directory)


def files_in(directory: Path) -> TlsFiles:
    """A client's files in a directory."""
    return TlsFiles(directory / "ca.crt", directory / "tls.crt", directory / "tls.key")


def replace(path: Path, content: bytes) -> None:
    """Write a file in one step."""
    fresh = path.with_suffix(".new")
    fresh.write_bytes(content)
    fresh.replace(path)
