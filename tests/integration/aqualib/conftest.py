"""One producer that lends and one consumer, for the tests that need no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aqualib.consumer import Aqua
from aqualib.producer.producer import Producer
from harness.consumers import consuming
from harness.loans import COUNT
from harness.producers import lending
from harness.raw_consumer import TokenIssuer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def issuer() -> TokenIssuer:
    return TokenIssuer()


@pytest.fixture
def producer(issuer: TokenIssuer) -> Iterator[Producer]:
    with lending(issuer, COUNT) as producer:
        yield producer


@pytest.fixture
def aqua() -> Iterator[Aqua]:
    with consuming() as aqua:
        yield aqua
