"""A coordinator with a client, for plans that are walked and drift that is found on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aqua_client import CoordinatorClient
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.patience import patient_client


@pytest.fixture(scope="module")
def coordinator() -> Iterator[CoordinatorProcess]:
    with data_dir() as path, CoordinatorProcess(path, AQUA_SILENT_MEMBER_S="3600") as process:
        yield process


@pytest.fixture
def client(coordinator: CoordinatorProcess) -> Iterator[CoordinatorClient]:
    with patient_client(coordinator.url) as client:
        yield client
        for lease in client.list_leases():
            client.revoke_lease(lease.lease_id, lease.epoch)
