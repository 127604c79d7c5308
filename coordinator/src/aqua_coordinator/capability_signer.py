"""Signs capability tokens and hands producers the keys that check them.

One secret per life of the books signs everything, so all coordinators of one Redis agree without
talking; each producer's key is derived from it (`aqua_protocol.capability`). Keys are kept, since
deriving one costs as much as the rest of an answer.
"""

from __future__ import annotations

import base64
from functools import lru_cache
from typing import Final

from aqua_coordinator.store import Ledger
from aqua_coordinator.store.rows import Grant
from aqua_protocol.capability import Claims, producer_key, sign

MAX_CACHED_KEYS: Final = 4096
"""Producers whose key is kept, 100 bytes each: more than a coordinator serves. Without it each
grant derives a key anew, 4 us."""


class CapabilitySigner:
    """Signs for the books that granted; their secret is in the ledger, unless one is configured."""

    def __init__(self, ledger: Ledger, secret: bytes | None) -> None:
        self._ledger = ledger
        self._secret = secret
        self._key = lru_cache(MAX_CACHED_KEYS)(producer_key)

    async def capability(self, grant: Grant) -> str:
        """The token for a fresh lease; the same whenever the grant is the same."""
        secret = self._secret or await self._ledger.secret_of(grant.books_id)
        lease = grant.lease
        claims = Claims(
            lease_id=lease.lease_id,
            epoch=lease.epoch,
            producer_id=lease.producer_id,
            consumer_id=lease.consumer_id,
            bytes=lease.bytes,
            not_after_s=grant.not_after_s,
        )
        return sign(claims, self._key(secret, lease.producer_id, grant.incarnation))

    async def checking_key(self, books_id: str, producer_id: str, incarnation: str) -> str:
        """The key that one life of a producer checks its tokens with, in base64."""
        secret = self._secret or await self._ledger.secret_of(books_id)
        return base64.b64encode(self._key(secret, producer_id, incarnation)).decode()
