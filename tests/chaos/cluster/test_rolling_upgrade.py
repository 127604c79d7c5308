"""Coordinators over one Redis replaced one after the other, under load: no request fails.

What makes it so has two halves: a coordinator that is told to stop finishes what it has begun, and
a client that is given all of them goes on with another. The control has one coordinator only.
"""

from __future__ import annotations

import contextlib
import itertools
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

import httpx
import pytest

from aqua_client import CoordinatorClient
from aqua_protocol import AquaError
from aqua_protocol.leases import LeaseRenewal
from harness.bounds import HANG_S, until
from harness.coordinator_process import CoordinatorProcess
from harness.members_on_paper import PaperConsumer, PaperProducer
from harness.patience import patient_client
from harness.slices import IS_WHOLE
from harness.store_servers import running_store, short_directory

SETTINGS: Final[dict[str, Any]] = {"AQUA_SILENT_MEMBER_S": "3600", "AQUA_ATTACH_WINDOW_S": "300"}
THREADS: Final = 4
REQUESTS: Final = 10_000 if IS_WHOLE else 1_500
"""Of which none fails: what the promise says, and a slice of it."""


class Load:
    """Members that report, take leases, renew and release them as fast as they can.

    Attributes:
        answered: How many requests have been.
        failures: What the others ended with.
        leases: Every lease that was granted.
    """

    def __init__(self, urls: list[str]) -> None:
        self.failures: list[AquaError] = []
        self.leases: list[str] = []
        self._counts = [0] * THREADS
        self._urls = ",".join(urls)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(THREADS)
        ]

    def __enter__(self) -> Self:
        with patient_client(self._urls) as client:
            producer = PaperProducer(slabs=64)
            for _ in range(2):
                producer.books_id = client.report_producer(producer.report()).books_id
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(HANG_S)
            assert not thread.is_alive(), "the load hangs"

    @property
    def answered(self) -> int:
        return sum(self._counts)

    def wait_for(self, count: int) -> None:
        """Wait until so many more requests have been answered by every thread."""
        wanted = [done + count // THREADS for done in self._counts]
        until(
            lambda: all(done >= want for done, want in zip(self._counts, wanted, strict=True)),
            "the load stands",
        )

    def _run(self, number: int) -> None:
        consumer = PaperConsumer(name=f"consumer-{number}")
        with patient_client(self._urls) as client:
            while not self._stop.is_set():
                for _ in self._round(client, consumer):
                    self._counts[number] += 1

    def _round(self, client: CoordinatorClient, consumer: PaperConsumer) -> Iterator[object]:
        """One life of a lease, request by request, given up with the first that fails."""
        try:
            yield client.report_consumer(consumer.report())
            yield (grant := client.grant_lease(consumer.request()))
            lease_id, epoch = grant.lease.lease_id, grant.lease.epoch
            self.leases.append(lease_id)
            yield client.renew_lease(lease_id, LeaseRenewal(epoch=epoch, ttl_s=300))
            yield client.get_lease(lease_id)
            yield client.release_lease(lease_id, epoch)
        except AquaError as error:
            self.failures.append(error)


def stop(coordinator: CoordinatorProcess) -> None:
    """Ask it to stop, and wait until it has done so by itself."""
    coordinator.process.terminate()
    assert coordinator.process.wait(HANG_S) == 0
    coordinator.kill()


@contextlib.contextmanager
def coordinators(store_url: str, directory: Path, count: int) -> Iterator[list[CoordinatorProcess]]:
    """So many coordinators over one store."""
    settings = SETTINGS | {"AQUA_REDIS_URL": store_url}
    running: list[CoordinatorProcess] = []
    try:
        running.extend(CoordinatorProcess(directory / "unused", **settings) for _ in range(count))
        yield running
    finally:
        for coordinator in running:
            coordinator.kill()


def test_no_request_fails_while_coordinators_are_replaced_one_by_one() -> None:
    with (
        running_store() as store,
        short_directory() as directory,
        coordinators(store.url, directory, 2) as running,
        Load([one.url for one in running]) as load,
    ):
        for turn in itertools.cycle(range(2)):
            load.wait_for(REQUESTS // 6)
            port = running[turn].port
            stop(running[turn])
            # Every member has gone on with the other one before this one is back.
            load.wait_for(REQUESTS // 6)
            settings = SETTINGS | {"AQUA_REDIS_URL": store.url}
            running[turn] = CoordinatorProcess(directory / "unused", port=port, **settings)
            if turn == 1 and load.answered >= REQUESTS:
                break
    assert load.failures == []
    assert load.answered >= REQUESTS
    assert len({*load.leases}) == len(load.leases)


def test_with_one_coordinator_some_requests_fail() -> None:
    with (
        running_store() as store,
        short_directory() as directory,
        coordinators(store.url, directory, 1) as (only,),
        Load([only.url]) as load,
    ):
        load.wait_for(THREADS)
        stop(only)
        until(lambda: len(load.failures) >= THREADS, "nobody noticed that it was away")


def test_a_coordinator_that_is_told_to_stop_is_not_ready_and_serves_on_until_it_is_drained() -> (
    None
):
    with (
        short_directory() as directory,
        CoordinatorProcess(directory / "d", AQUA_DRAIN_S="300", **SETTINGS) as coordinator,
        httpx.Client(base_url=coordinator.url, trust_env=False, timeout=HANG_S) as http,
    ):
        assert http.get("/readyz").status_code == 200
        coordinator.process.send_signal(signal.SIGTERM)
        until(lambda: http.get("/readyz").status_code == 503, "it stays ready")
        with patient_client(coordinator.url) as newcomer:
            assert list(newcomer.list_producers()) == []
            assert newcomer.healthz().status == "ok"
            with pytest.raises(AquaError, match="stopping"):
                newcomer.readyz()
        coordinator.process.send_signal(signal.SIGINT)
        assert coordinator.process.wait(HANG_S) == 0
