"""Capability tokens: how a producer knows, offline, that a stranger may have its slabs.

The coordinator signs one token per lease; the producer checks it without asking anyone, so a dead
coordinator stops no attach of a lease that was granted before. Each producer has its own key,
derived from the coordinator's secret, and gets it in the answer to its reports: a producer can
check tokens made for itself and can forge none for others.

Format: `base64url(claims JSON) "." base64url(HMAC-SHA-256)`, without padding. The token is a bearer
secret for at most `not_after_s`; it grants at most one live attachment and never more slabs than
the producer has free.

Skew: `not_after_s` is the coordinator's clock (Redis') plus its `attach_window_s`, and is compared
with the producer's. One that is ahead by the window refuses every token; one that is behind takes
tokens longer, and the books then fence what they had let expire. NTP keeps hosts close enough.

Source: HMAC by RFC 2104 and FIPS 198-1; the layout is a JWS compact form without the header, since
there is one algorithm and no negotiation to attack.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from typing import Final

from pydantic import Field, ValidationError

from aqua_protocol.errors import CapabilityError
from aqua_protocol.ids import MAX_EPOCH, Name
from aqua_protocol.units import MAX_BYTES
from aqua_protocol.wire import Proof, Wire

# Characters. Claims and signature take about 600; the rest is room for later claims. Doubled, an
# attach packet still holds the token.
MAX_TOKEN_LENGTH: Final = 4096
# Fixed: what HMAC-SHA-256 gives.
KEY_BYTES: Final = 32


class Claims(Wire):
    """What a token grants: these bytes, of this producer, to this consumer, under this epoch."""

    lease_id: Name
    epoch: int = Field(ge=1, le=MAX_EPOCH, description="Fencing token of the lease.")
    producer_id: Name
    consumer_id: Name
    bytes: int = Field(ge=1, le=MAX_BYTES)
    not_after_s: float = Field(
        description="Unix time, in seconds, after which attaching is refused."
    )
    proof: Proof | None = Field(default=None, description="Of the grant, for reports.")


def producer_key(secret: bytes, producer_id: str, incarnation: str) -> bytes:
    """The 32-byte key of one life of one producer, derived from the coordinator's secret."""
    label = f"aqua-producer-key\0{producer_id}\0{incarnation}".encode()
    return hmac.new(secret, label, hashlib.sha256).digest()


def sign(claims: Claims, key: bytes) -> str:
    """Sign `claims` with a producer's key."""
    payload = _encode(claims.__pydantic_serializer__.to_json(claims))
    return f"{payload}.{_encode(_sign(payload, key))}"


def verify(token: str, key: bytes, *, producer_id: str, now_s: float, min_epoch: int) -> Claims:
    """Check a token offline and return what it grants.

    Args:
        key: Of `producer_key`; or several, one after the other, while the secret is being replaced.
        producer_id: This producer; a token for another one is refused.
        now_s: Unix time in seconds, by this producer's clock.
        min_epoch: Tokens of older epochs were granted by books that are lost, and are refused.

    Raises:
        CapabilityError: Malformed, forged, for someone else, too late, or from lost books.
    """
    payload, _, signature = token.partition(".")
    if len(token) > MAX_TOKEN_LENGTH or not signature:
        raise CapabilityError("the lease token is malformed")
    # The signature is checked before the payload is parsed: unsigned input reaches no parser.
    sent = _decode(signature)
    keys = [key[at : at + KEY_BYTES] for at in range(0, len(key), KEY_BYTES)]
    if not any(hmac.compare_digest(sent, _sign(payload, each)) for each in keys):
        raise CapabilityError("the lease token is not signed for this producer")
    try:
        claims = Claims.model_validate_json(_decode(payload))
    except ValidationError as error:
        raise CapabilityError("the lease token carries unknown claims") from error
    if claims.producer_id != producer_id:
        raise CapabilityError("the lease token is for another producer")
    if claims.not_after_s < now_s:
        message = f"the lease token expired {now_s - claims.not_after_s:.1f} s ago"
        raise CapabilityError(message, lease_id=claims.lease_id)
    if claims.epoch < min_epoch:
        message = "the lease token was granted by books that have been lost since"
        raise CapabilityError(message, lease_id=claims.lease_id, epoch=claims.epoch)
    return claims


def _sign(payload: str, key: bytes) -> bytes:
    return hmac.digest(key, payload.encode(), "sha256")


def _encode(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise CapabilityError("the lease token is malformed") from error
