"""Every loop of a producer and a consumer, with a fault at each call that it makes.

The loops and their calls are found by running them (`harness/faults.py`); after each fault the
members still offer, lend, page, reclaim and leave, and no loop stays behind.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Final

import pytest
import torch

from aqua_protocol import TransportKind
from aqua_protocol.members import LoadReport
from aqua_protocol.supervision import Loop, RestartPolicy, restart_counts, running_loops
from aqualib.leasing import demand
from aqualib.memory import migrator
from aqualib.producer.informer import Informer
from aqualib.producer.producer import Producer
from aqualib.producer.profile import Profile
from aqualib.reporter import Identity
from aqualib.tensor import Location
from aqualib.transports import select
from harness.bounds import until
from harness.consumers import consuming
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.faults import FaultInjector, UnforeseenError, faults, have_rested
from harness.patience import patient_client
from harness.producers import SLAB, socket_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqualib.consumer import Aqua

COUNT: Final = 3
EXPECTED: Final = {
    "aqua-events",
    "aqua-handout",
    "aqua-informer",
    "aqua-lease-server",
    "aqua-leasing",
    "aqua-migrator",
    "aqua-report",
    "aqua-slab-copier",
    "aqua-slab-memory",
    "aqua-unmapper",
}
"""What must be found at least, lest the search finds nothing any more."""


class Engine:
    """Gives memory up while its queue is empty."""

    def __init__(self) -> None:
        self.queue_length = 0
        self.lent_bytes = 0

    def load(self) -> LoadReport:
        return LoadReport(
            queue_length=self.queue_length,
            memory_total_bytes=COUNT * SLAB,
            memory_used_bytes=COUNT * SLAB,
        )

    def shrink(self, nbytes: int) -> int:
        self.lent_bytes += nbytes
        return nbytes

    def grow(self, nbytes: int) -> None:
        self.lent_bytes -= nbytes


@pytest.fixture(scope="module")
def coordinator() -> Iterator[CoordinatorProcess]:
    with data_dir() as path, CoordinatorProcess(path) as process:
        yield process


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits are for clusters; here they would only be slow. Frames are small, and cut even so."""
    monkeypatch.setattr(Loop, "policy", RestartPolicy(0.001, 0.001, jitter=lambda _, most: most))
    monkeypatch.setattr(migrator, "MIN_PART_BYTES", SLAB // 4)
    for name in ("CALM_S", "MAX_CALM_S", "FIRST_PAUSE_S", "MAX_PAUSE_S"):
        monkeypatch.setattr(demand, name, 0.02)


def lend_and_take_back(coordinator: CoordinatorProcess, number: int) -> set[str]:
    """All that members are for, twice; returns the kinds of loops that ran meanwhile."""
    engine = Engine()
    kinds: set[str] = set()
    with _members(coordinator, number, engine) as (producer, aqua):
        torch.manual_seed(number)
        values = [torch.randint(0, 256, (SLAB,), dtype=torch.uint8) for _ in range(COUNT)]
        tensors = [aqua.offload(value) for value in values]
        for _ in range(2):
            engine.queue_length = 0
            until(
                lambda: all(tensor.location is Location.PEER for tensor in tensors),
                "everything is lent and filled",
            )
            kinds |= {loop.kind for loop in running_loops()}
            rested = set[Loop]()
            until(partial(have_rested, rested), "every loop has rested")
            engine.queue_length = 100
            until(lambda: not engine.lent_bytes, "the engine has everything back")
            for tensor, value in zip(tensors, values, strict=True):
                assert torch.equal(tensor.load(), value)
            producer.audit()
            assert not producer.quarantined_bytes
    until(lambda: not running_loops(), "every loop has ended")
    return kinds


@contextlib.contextmanager
def _members(
    coordinator: CoordinatorProcess, number: int, engine: Engine
) -> Iterator[tuple[Producer, Aqua]]:
    # Apart from those before, whose end the books may not know yet.
    identity = Identity(node="node", domain=f"domain-{number}", gpu_uuid=f"GPU-{number}")
    profile = Profile(SLAB, spare_bytes=COUNT * SLAB, least_offer_bytes=SLAB, calm_s=0.0)
    consumer = consuming(link=patient_client(coordinator.url), identity=identity, heartbeat_s=0.05)
    with (
        socket_dir() as directory,
        patient_client(coordinator.url) as link,
        Producer(
            f"producer-{number}",
            transport=select(TransportKind.MEMFD),
            link=link,
            endpoint=directory / "p.sock",
            identity=identity,
            slab_bytes=SLAB,
            heartbeat_s=0.05,
            deadline_s=30.0,
        ) as producer,
        consumer as aqua,
        Informer(producer, engine, profile, poll_s=0.005),
    ):
        yield producer, aqua


@pytest.mark.slow
def test_every_loop_of_members_outlives_a_fault_at_each_of_its_calls(
    coordinator: CoordinatorProcess,
) -> None:
    with FaultInjector() as clean:
        kinds = lend_and_take_back(coordinator, 0)
    assert kinds | {site.loop for site in clean.sites} >= EXPECTED
    assert kinds <= {site.loop for site in clean.sites}, "a loop runs at which no fault can be put"
    assert clean.unwatched == set(), "calls that may hang, and none would notice"
    hit: set[tuple[str, type[BaseException]]] = set()
    for number, (site, error) in enumerate(faults(clean.sites), 1):
        crashed = sum(restart_counts().values())
        with FaultInjector(site, error) as injector:
            lend_and_take_back(coordinator, number)
        if injector.planted is None:  # Not every call is made in every run.
            assert sum(restart_counts().values()) > crashed, f"{site} crashed unseen"
            hit.add((site.loop, type(error)))
    assert {loop for loop, error in hit if error is MemoryError} >= EXPECTED
    assert {loop for loop, error in hit if error is UnforeseenError} >= EXPECTED
