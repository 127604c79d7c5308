"""Many threads over one consumer, whose producers take back and die meanwhile.

The other suites drive a consumer by one thread. Engines have several: one that schedules, one that
copies, one that watches. Here each thread pages blocks of a store that all share, and tensors of
its own, drawn by seeds and compared byte by byte, while producers take memory back, die and are
started again. It goes on until every thread has done its share.
"""

from __future__ import annotations

import random
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING, Final

import pytest
import torch

from aqua_protocol import CapacityError, TransportKind
from aqualib.consumer import Aqua
from aqualib.ranges import Range
from aqualib.reporter import Identity
from aqualib.tensor import Location
from aqualib.transports import select
from harness.bounds import HANG_S, until
from harness.cluster import HEARTBEAT_S, SLAB, Cluster, new_cluster
from harness.patience import patient_client
from harness.slices import IS_WHOLE

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from aqualib.blocks import BlockStore
    from aqualib.tensor import AquaTensor

THREADS: Final = 6
ROUNDS: Final = 4000 if IS_WHOLE else 100
"""Operations of each thread."""
PRODUCERS: Final = 3
OFFERED: Final = 8
BLOCK_BYTES: Final = SLAB // 8
BLOCKS: Final = 192
TENSORS: Final = 3
"""That a thread keeps at most, each of two slabs and so in three at most."""
HOST_SLABS: Final = BLOCKS * BLOCK_BYTES // SLAB + THREADS * TENSORS * 3 + 1


class PagingThread:
    """One thread's blocks and tensors, and what must be in them."""

    def __init__(self, seed: int, aqua: Aqua, store: BlockStore) -> None:
        self._random = random.Random(seed)
        self._numbers = count(seed << 32)
        self._aqua = aqua
        self._store = store
        self._blocks: dict[int, torch.Tensor] = {}
        self._tensors: deque[tuple[AquaTensor, torch.Tensor]] = deque()

    def run(self) -> None:
        """Do a share of the work, and give all back."""
        steps = [self._page_out] * 3 + [self._page_in] * 3 + [self._free, self._keep_a_tensor]
        steps += [self._compare_a_tensor, self._rewrite_a_tensor]
        for _ in range(ROUNDS):
            self._random.choice(steps)()
        while self._blocks:
            self._page_in()
            self._free()
        while self._tensors:
            self._compare_a_tensor()
            self._tensors.pop()[0].release()

    def _drawn(self, nbytes: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(next(self._numbers))
        return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)

    def _some(self, most: int) -> list[int]:
        return self._random.sample(sorted(self._blocks), min(most, len(self._blocks)))

    def _page_out(self) -> None:
        rows = self._drawn(self._random.randint(1, 16) * BLOCK_BYTES).view(-1, BLOCK_BYTES)
        try:
            slots, transfer = self._store.page_out(rows)
        except CapacityError:
            self._free()
            return
        transfer.wait()
        self._blocks |= zip(slots.tolist(), rows, strict=True)

    def _page_in(self) -> None:
        slots = self._some(24)
        columns = Range(0, BLOCK_BYTES)
        if not self._store.is_checking and self._random.random() < 0.5:
            start = self._random.randrange(BLOCK_BYTES)
            columns = Range(start, self._random.randint(1, BLOCK_BYTES - start))
        back = torch.empty((len(slots), columns.size), dtype=torch.uint8)
        part = None if self._store.is_checking else columns
        self._store.page_in(torch.tensor(slots, dtype=torch.int64), back, columns=part).wait()
        for slot, found in zip(slots, back, strict=True):
            wanted = self._blocks[slot][columns.start : columns.end]
            assert torch.equal(found, wanted), f"slot {slot} holds other bytes"

    def _free(self) -> None:
        slots = self._some(40)
        self._store.free(torch.tensor(slots, dtype=torch.int64))
        for slot in slots:
            del self._blocks[slot]

    def _keep_a_tensor(self) -> None:
        if len(self._tensors) == TENSORS:
            self._tensors.popleft()[0].release()
            return
        values = self._drawn(self._random.randint(1, 2 * SLAB))
        self._tensors.append((self._aqua.offload(values), values))

    def _compare_a_tensor(self) -> None:
        self._tensors.rotate()
        for tensor, values in list(self._tensors)[:1]:
            if self._random.random() < 0.5:
                assert torch.equal(tensor.load(), values), "a tensor holds other bytes"
            else:
                with tensor.pinned(writes=False) as view:
                    assert torch.equal(view, values), "a tensor's view holds other bytes"

    def _rewrite_a_tensor(self) -> None:
        if self._tensors:
            tensor, _ = self._tensors.popleft()
            values = self._drawn(tensor.nbytes)
            with tensor.pinned() as view:
                view.copy_(values)
            self._tensors.append((tensor, values))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A coordinator and producers that lend."""
    with new_cluster() as cluster:
        cluster.start_coordinator()
        for number in range(PRODUCERS):
            cluster.start_producer(f"producer-{number}").call("offer", OFFERED)
        yield cluster


def _disturb(cluster: Cluster, work: Collection[Future[None]]) -> None:
    """Trouble the producers until all the work is done."""
    drawn = random.Random(0)
    while not all(each.done() for each in work):
        name = f"producer-{drawn.randrange(PRODUCERS)}"
        producer = cluster.processes[name]
        match drawn.choices(("take back", "lend", "kill"), (5, 5, 1))[0]:
            case "take back":
                producer.call("reclaim", drawn.randint(1, OFFERED), 0.05, 0.05)
            case "lend":
                producer.call("offer", OFFERED)
            case "kill":
                producer.kill()
                cluster.start_producer(name).call("offer", OFFERED)


@pytest.mark.parametrize("writes_behind", [False, True], ids=["copied at once", "written behind"])
@pytest.mark.parametrize("is_checking", [False, True], ids=["unchecked", "checked"])
def test_no_thread_finds_other_bytes_than_its_own(
    cluster: Cluster, is_checking: bool, writes_behind: bool
) -> None:
    with (
        Aqua(
            "consumer",
            transport=select(TransportKind.MEMFD),
            link=patient_client(cluster.url),
            identity=Identity(node="node", domain="domain", gpu_uuid="GPU-consumer"),
            host_bytes=HOST_SLABS * SLAB,
            wanted_bytes=PRODUCERS * OFFERED * SLAB,
            slab_bytes=SLAB,
            is_checking=is_checking,
            heartbeat_s=HEARTBEAT_S,
            writes_behind=writes_behind,
        ) as aqua,
        aqua.block_store(BLOCK_BYTES, BLOCKS) as store,
        ThreadPoolExecutor(THREADS) as threads,
    ):
        until(lambda: aqua.stats().leased_bytes, "a producer lends")
        kept = aqua.offload(torch.arange(100))
        until(lambda: kept.location is Location.PEER, "a producer's memory is used")
        work = [
            threads.submit(PagingThread(seed, aqua, store).run) for seed in range(1, 1 + THREADS)
        ]
        _disturb(cluster, work)
        for each in work:
            each.result()
        for number in range(PRODUCERS):
            producer = cluster.processes[f"producer-{number}"]
            assert producer.call("reclaim", OFFERED, 0.05, HANG_S)["done"]
        assert kept.location is Location.HOST
        assert torch.equal(kept.load(), torch.arange(100))
        assert store.used_count == 0
        aqua.audit()
