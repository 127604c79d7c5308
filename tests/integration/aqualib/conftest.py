"""One producer that lends, one consumer and one coordinator, for tests that need no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aqua_client import CoordinatorClient
from aqualib.consumer import Aqua
from aqualib.producer.producer import Producer
from harness.consumers import consuming
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.loans import COUNT
from harness.patience import patient_client
from harness.producers import lending, socket_dir
from harness.raw_consumer import TokenIssuer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def directory() -> Iterator[Path]:
    with socket_dir() as path:
        yield path


@pytest.fixture
def coordinator() -> Iterator[CoordinatorProcess]:
    with data_dir() as path, CoordinatorProcess(path) as process:
        yield process


@pytest.fixture
def link(coordinator: CoordinatorProcess) -> Iterator[CoordinatorClient]:
    with patient_client(coordinator.url) as link:
        yield link


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
