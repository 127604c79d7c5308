from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqua_protocol.capability import Claims, producer_key, sign, verify
from aqua_protocol.errors import CapabilityError

KEY = producer_key(b"secret of the coordinator", "producer-0", "life-1")
CLAIMS = Claims(
    lease_id="lease-7",
    epoch=7,
    producer_id="producer-0",
    consumer_id="consumer-0",
    bytes=1 << 26,
    not_after_s=100.0,
)
TOKEN = sign(CLAIMS, KEY)


def check(
    token: str, *, producer_id: str = "producer-0", now_s: float = 99.0, min_epoch: int = 1
) -> Claims:
    return verify(token, KEY, producer_id=producer_id, now_s=now_s, min_epoch=min_epoch)


def test_a_signed_token_grants_what_was_claimed() -> None:
    assert check(TOKEN) == CLAIMS


@given(position=st.integers(0, len(TOKEN) - 1), letter=st.characters(codec="utf-8"))
def test_no_token_with_one_changed_letter_is_accepted(position: int, letter: str) -> None:
    forged = TOKEN[:position] + letter + TOKEN[position + 1 :]
    if forged == TOKEN:
        return
    try:
        claims = check(forged)
    except CapabilityError:
        return
    # The last letter of unpadded base64 has bits that decode to nothing; the claims stand.
    assert claims == CLAIMS
    assert position == len(TOKEN) - 1


@given(text=st.text(max_size=5000))
def test_garbage_is_refused_and_never_crashes(text: str) -> None:
    with pytest.raises(CapabilityError):
        check(text)


def test_a_token_of_another_key_producer_time_or_books_is_refused() -> None:
    other = producer_key(b"secret of the coordinator", "producer-0", "life-2")
    with pytest.raises(CapabilityError, match="not signed"):
        check(sign(CLAIMS, other))
    with pytest.raises(CapabilityError, match="another producer"):
        check(TOKEN, producer_id="producer-1")
    with pytest.raises(CapabilityError, match="expired"):
        check(TOKEN, now_s=100.5)
    with pytest.raises(CapabilityError, match="lost since"):
        check(TOKEN, min_epoch=8)


def test_keys_of_producers_and_their_lives_differ() -> None:
    names = [("a", "1"), ("a", "2"), ("b", "1"), ("a\0", "1")]
    assert len({producer_key(b"s", *name) for name in names}) == len(names)
