"""An engine that counts instead of computing, for tests that share one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.counting_server import CountingServer


@pytest.fixture(scope="module")
def engine() -> Iterator[CountingServer]:
    with CountingServer() as engine:
        yield engine
