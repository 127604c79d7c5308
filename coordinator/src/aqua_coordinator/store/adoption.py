"""Proofs of adoption: how books that were lost know a lease again without trusting who reports it.

Each capability token carries a proof, an HMAC over all that the grant was: lease, epoch, producer
and its life, consumer, bytes. The producer keeps it and reports it with the lease. It is made with
the *adoption key*, which no member ever holds and which is not in Redis: a member or a process that
writes to Redis cannot prove a lease that was never granted. A lease without a good proof names no
consumer; its bytes are booked as the producer's own.

All coordinators of one Redis need the same key (`AQUA_ADOPTION_KEY`, and the one before or to come
as `AQUA_ADOPTION_KEY_OTHER` while it is being replaced). Without one, a coordinator makes its own
and keeps it in its data directory; after a loss of the books it then knows only the leases that it
granted itself, and consumers of the others page back to host memory.

Not promised: that the lease still stood when the books were lost. A producer may report a lease
that it has truly had, in this life of it, once more; keeping it would have given it the same.

Source: HMAC by RFC 2104, truncated to half of its length as its section 5 allows.
"""

from __future__ import annotations

import base64
import hmac
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from aqua_protocol import ConfigError

if TYPE_CHECKING:
    from aqua_coordinator.settings import CoordinatorSettings
    from aqua_coordinator.store.rows import Grant
    from aqua_protocol.members import HeldLease, ProducerReport

KEY_BYTES: Final = 32
"""As long as the hash; doubled, it adds nothing."""
MAC_BYTES: Final = 16
"""Of a proof: 128 bits, beyond guessing. Doubled, each lease of a report has 22 characters more."""
FILE_NAME: Final = "adoption.key"


class AdoptionKeys:
    """Makes proofs with the first key, and takes those of any.

    Args:
        keys: At least one.
    """

    def __init__(self, keys: Sequence[bytes]) -> None:
        assert keys, "proofs need a key"
        self._keys = keys

    @classmethod
    def configured(cls, settings: CoordinatorSettings) -> Self | None:
        """Those of the settings; None when there are none."""
        given = (settings.adoption_key, settings.adoption_key_other)
        keys = [key.get_secret_value().encode() for key in given if key is not None]
        return cls(keys) if settings.adoption_key is not None else None

    @classmethod
    def of_this_process(cls) -> Self:
        """A key that ends with the process: leases of others are not known again."""
        return cls([secrets.token_bytes(KEY_BYTES)])

    @classmethod
    def in_directory(cls, directory: Path) -> Self:
        """The key of this directory, which is made if there is none.

        Raises:
            ConfigError: It cannot be read or written, or others may read it.
        """
        path = directory / FILE_NAME
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.exists():
                made = path.with_name(f".{FILE_NAME}.{os.getpid()}")
                made.touch(mode=0o600)
                made.write_text(secrets.token_hex(KEY_BYTES))
                # The first of several coordinators that start at once makes it for all of them.
                try:
                    os.link(made, path)
                except FileExistsError:
                    pass
                finally:
                    made.unlink()
            is_open = path.stat().st_mode & 0o077
            key = bytes.fromhex(path.read_text("ascii"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot keep the adoption key in {path}: {error}",
                remedy="Make AQUA_DATA_DIR writable, or set AQUA_ADOPTION_KEY.",
            ) from error
        if is_open or len(key) != KEY_BYTES:
            raise ConfigError(
                f"{path} is open to others, or no adoption key",
                remedy=f"Run `chmod 600 {path}`, or delete it to have another made.",
            )
        return cls([key])

    def prove(self, grant: Grant) -> str:
        """The proof of a grant: its bytes and the MAC."""
        lease = grant.lease
        facts = f"{lease.lease_id}\0{lease.epoch}\0{lease.producer_id}\0{grant.incarnation}"
        return f"{lease.bytes}.{_mac(self._keys[0], facts, lease.consumer_id, lease.bytes)}"

    def granted_bytes(self, report: ProducerReport, held: HeldLease) -> int:
        """What was granted under a lease by its proof; 0 when that is none."""
        size, _, mac = (held.proof or "").partition(".")
        facts = f"{held.lease_id}\0{held.epoch}\0{report.producer_id}\0{report.incarnation}"
        proven = any(
            hmac.compare_digest(mac, _mac(key, facts, held.consumer_id, size)) for key in self._keys
        )
        return int(size) if proven else 0

    def verdicts(self, report: ProducerReport, asked: Iterable[str]) -> dict[str, int]:
        """What was granted under each of these leases of the report, by its id."""
        held = {lease.lease_id: lease for lease in report.leases}
        return {name: self.granted_bytes(report, held[name]) for name in asked}


def _mac(key: bytes, facts: str, consumer_id: str, size: int | str) -> str:
    text = f"aqua-adoption\0{facts}\0{consumer_id}\0{size}"
    mac = hmac.digest(key, text.encode(), "sha256")[:MAC_BYTES]
    return base64.urlsafe_b64encode(mac).rstrip(b"=").decode()
