"""Who may attach: the checks between a Hello and the first slab.

The server has found the consumer's user to be trusted. The consumer proves, offline, that the
coordinator signed a token for this producer and that the token is fresh. What the checks need, a
key and the oldest epoch that still counts, comes with the coordinator's answer to the first report
and stays valid when the coordinator goes away.

A token opens one channel, once. Lease ids never come back, so remembering the spent ones would be
enough for ever; remembering them until their token expires is enough as well, and bounded.

Nothing here changes before a token has been found good. The latest time at which one was shown is
kept, so that a clock set back revives no token that was forgotten as expired. It was valid then, so
that time is at most the coordinator's clock plus its `attach_window_s`, however wrong this clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from aqua_protocol import CapacityError, UnavailableError, capability
from aqua_protocol.errors import CapabilityError

if TYPE_CHECKING:
    from aqua_protocol.capability import Claims
    from aqua_protocol.ids import ProducerId

MAX_SPENT_TOKENS: Final = 1 << 16
"""Tokens remembered at once. A lease's token lives for seconds, so this is thousands a second; past
it attaching is refused, since a forgotten one could be replayed. Doubled, twice the memory, some 10
MB."""


class Admission:
    """The checks of one producer, which is `producer_id`; not thread-safe."""

    def __init__(self, producer_id: ProducerId) -> None:
        self._producer_id = producer_id
        self._key: bytes | None = None
        self._min_epoch = 1
        self._spent: dict[str, float] = {}
        self._latest_s = 0.0

    def trust(self, key: bytes, min_epoch: int) -> None:
        """Take the coordinator's key and the oldest epoch that counts.

        The epoch never goes down: an answer that was delayed past a newer one must not reopen
        what the newer one has fenced.
        """
        self._key = key
        self._min_epoch = max(self._min_epoch, min_epoch)

    def admit(self, token: str, consumer_id: str, now_s: float) -> Claims:
        """Check everything and spend the token.

        Args:
            token: As presented.
            consumer_id: As claimed by the peer; must be the token's.
            now_s: Unix time in seconds.

        Raises:
            UnavailableError: No coordinator has answered this producer yet.
            CapabilityError: A token that is not good for this.
            CapacityError: Too many tokens are being remembered.
        """
        if self._key is None:
            raise UnavailableError(
                f"{self._producer_id} has not reached a coordinator yet, so it cannot check tokens",
                remedy="Start the coordinator or correct AQUA_COORDINATOR_URL, then attach again.",
                retry_after_s=1.0,
            )
        latest_s = max(self._latest_s, now_s)
        claims = capability.verify(
            token,
            self._key,
            producer_id=self._producer_id,
            now_s=latest_s,
            min_epoch=self._min_epoch,
        )
        if claims.consumer_id != consumer_id:
            raise CapabilityError("the lease token is for another consumer")
        self._latest_s = latest_s
        self._spend(claims)
        return claims

    def _spend(self, claims: Claims) -> None:
        if claims.lease_id in self._spent:
            raise CapabilityError(
                f"lease {claims.lease_id} was attached before; a token opens one channel, once",
                lease_id=claims.lease_id,
            )
        if len(self._spent) >= MAX_SPENT_TOKENS:
            self._spent = {i: until for i, until in self._spent.items() if until >= self._latest_s}
        if len(self._spent) >= MAX_SPENT_TOKENS:
            raise CapacityError(
                f"{self._producer_id} has attached {MAX_SPENT_TOKENS} leases within their tokens' "
                "lifetime",
                retry_after_s=1.0,
            )
        self._spent[claims.lease_id] = claims.not_after_s
