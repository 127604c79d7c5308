"""The members of a soak, each in a process of its own, which work by themselves.

A consumer pages bytes of known content out and in and compares all of them; a producer lends and
takes back. Both go on, drawing by a seed, until told to rest, and note in a tally what they do.
"""

from __future__ import annotations

import logging
import os
import random
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import torch

import aqualib
from aqua_protocol import (
    CapacityError,
    ChecksumMismatchError,
    DataLostError,
    TransportError,
)
from aqualib.leasing import demand
from aqualib.tensor import AquaTensor
from harness.bounds import HANG_S
from harness.cluster import SLAB, serve_member
from harness.doom import Ledger
from harness.soak_process import Leaks, Tally, Worker, isolate, keep_nothing, tidy

HEARTBEAT_S: Final = 0.5
HOST_BYTES: Final = 32 * SLAB
TENSORS: Final = 20
"""That a consumer keeps at most."""
OFFERED: Final = 12
"""Slabs that a producer offers at rest; at work up to twice as many."""
BLOCK_BYTES: Final = SLAB // 8
BLOCKS: Final = 32


class SoakMember:
    """A producer or consumer that works; what both obey."""

    def __init__(self, _name: str, seed: str, tally: Path) -> None:
        self.random = random.Random(seed)
        self.tally = Tally(tally)
        self._worker = Worker(self.step, self.tally)
        self._leaks = Leaks()
        self.leak = self._leaks.leak

    def step(self) -> float:
        """Do something; returns the seconds until the next step."""
        raise NotImplementedError

    def begin(self) -> None:
        """Work from now on."""
        self._worker.begin()

    def stop(self) -> None:
        """Take no further step."""
        self._worker.end()
        tidy()


class SoakProducer(SoakMember):
    """Lends more and less, and at rest always the same."""

    def __init__(self, name: str, seed: str, tally: Path) -> None:
        super().__init__(name, seed, tally)
        self._open = ExitStack()
        self._producer = self._open.enter_context(aqualib.open_producer(name))
        self.begin()

    def step(self) -> float:
        """Offer or reclaim some slabs."""
        offered = self._producer.offered_bytes // SLAB
        try:
            if offered < OFFERED or self.random.random() < 0.5:
                self._producer.offer(min(offered + self.random.randint(1, 8), 2 * OFFERED) * SLAB)
            else:
                size = self.random.randint(1, offered) * SLAB
                self._producer.reclaim(size, deadline_s=1.0).wait(self.random.uniform(0, 2))
        except TransportError:  # Short of memory.
            self.tally.add("refused", 1)
        return self.random.uniform(0.1, 1.0)

    def settle(self) -> None:
        """Offer what is offered at rest."""
        excess = self._producer.offered_bytes - OFFERED * SLAB
        if excess > 0:
            assert self._producer.reclaim(excess).wait(HANG_S), "a reclaim does not end"
        self._producer.offer(OFFERED * SLAB)

    def state(self) -> dict[str, int]:
        """Slabs by what the producer says of them, after an audit of its pool."""
        self._producer.audit()
        sizes = {
            "offered": self._producer.offered_bytes,
            "free": self._producer.free_bytes,
            "held": self._producer.leased_bytes + self._producer.quarantined_bytes,
            "committed": self._producer.committed_bytes,
        }
        return {name: nbytes // SLAB for name, nbytes in sizes.items()}

    def close(self) -> None:
        """Leave."""
        self._open.close()


class SoakConsumer(SoakMember):
    """Stores tensors and blocks of known content, and compares."""

    def __init__(self, name: str, seed: str, tally: Path) -> None:
        super().__init__(name, seed, tally)
        is_checking = self.random.random() < 0.5
        self._aqua = aqualib.connect(name, host_bytes=HOST_BYTES, checksum=is_checking)
        self._seen = self._aqua.stats()
        self._tensors: list[tuple[AquaTensor, int]] = []
        self._number = self.random.randrange(1 << 40)
        self._steps = [self._store] * 3 + [self._rewrite, self._verify_one, self._verify_one]
        self._steps += [self._view_one, self._page_blocks, self._release_one]
        self.begin()

    def step(self) -> float:
        """Store, compare, change or release something."""
        self._aqua.step()
        try:
            self.random.choice(self._steps)()
        except CapacityError:
            self.tally.add("refused", 1)
            self._release_one()
        return self.random.uniform(0.005, 0.05)

    def rest(self) -> None:
        """Take no further step, compare everything, and release it."""
        self.stop()
        for entry in list(self._tensors):
            self._verify(entry)
        while self._tensors:
            self._drop(self._tensors[0])
        self._aqua.audit()
        stats = self._aqua.stats()
        self.tally.add("promoted", stats.promoted_bytes - self._seen.promoted_bytes)
        self.tally.add("drained", stats.drained_bytes - self._seen.drained_bytes)
        self._seen = stats
        tidy()

    def held_slabs(self) -> int:
        """Slabs of producers that are mapped, and frames that hold something."""
        stats = self._aqua.stats()
        return stats.leased_bytes // SLAB + stats.used_bytes

    def spoil(self, how: str) -> None:
        """Stop, and change one bit of what is stored, or lose a tensor, as Aqua never should."""
        self.stop()
        while not self._tensors:
            self._store()
        tensor, _ = self._tensors[0]
        if how == "bit":
            with tensor.pinned() as values:
                values[len(values) // 2] ^= 1
        else:
            tensor.release()

    def close(self) -> None:
        """Leave."""
        self._aqua.close()

    # --- Steps ----------------------------------------------------------------------------

    def _store(self) -> None:
        if len(self._tensors) >= TENSORS:
            self._release_one()
        self._number += 1
        values = _content(self._number, self.random.randint(1, 5 * SLAB // 2))
        try:
            entry = self._aqua.offload(values), self._number
        except TransportError:
            self.tally.add("refused", 1)
            return
        self._tensors.append(entry)
        self.tally.add("held", len(values))
        self.tally.add("stored", len(values))

    def _rewrite(self) -> None:
        if not self._tensors:
            return
        index = self.random.randrange(len(self._tensors))
        tensor, _ = self._tensors[index]
        self._number += 1
        try:
            tensor.store(_content(self._number, tensor.nbytes))
        except TransportError:
            self.tally.add("refused", 1)
            self._drop(self._tensors[index])
        except DataLostError as error:
            self._lose(error, self._tensors[index])
        else:
            self.tally.add("stored", tensor.nbytes)
            self._tensors[index] = tensor, self._number

    def _verify_one(self) -> None:
        if self._tensors:
            self._verify(self.random.choice(self._tensors))

    def _view_one(self) -> None:
        if not self._tensors:
            return
        entry = self.random.choice(self._tensors)
        tensor, number = entry
        try:
            with tensor.pinned(writes=False) as values:
                self._compare(values, number)
        except DataLostError as error:
            self._lose(error, entry)

    def _page_blocks(self) -> None:
        """Blocks in a store of their own, out and in again in another order."""
        with self._aqua.block_store(BLOCK_BYTES, BLOCKS) as store:
            count = self.random.randint(1, BLOCKS)
            generator = torch.Generator().manual_seed(self._number)
            shape = (count, BLOCK_BYTES)
            rows = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            order = torch.randperm(count, generator=generator)
            back = torch.zeros_like(rows)
            try:
                slots, transfer = store.page_out(rows, torch.arange(count))
                transfer.wait()
                time.sleep(self.random.uniform(0, 0.05))  # Frames move meanwhile.
                store.page_in(slots[order], back, order).wait()
            except TransportError:
                self.tally.add("refused", 1)
                return
            except DataLostError as error:
                self.tally.add(_kind_of(error), rows.numel())
                return
            self.tally.add("stored", rows.numel())
            self.tally.add("verified", rows.numel())
            self.tally.add("wrong", int((rows != back).sum()))

    def _release_one(self) -> None:
        if self._tensors:
            self._drop(self.random.choice(self._tensors))

    # --- Inside ---------------------------------------------------------------------------

    def _verify(self, entry: tuple[AquaTensor, int]) -> None:
        tensor, number = entry
        try:
            self._compare(tensor.load(), number)
        except DataLostError as error:
            self._lose(error, entry)
        except ValueError:  # It says that it was released.
            self.tally.add("missing", tensor.nbytes)
            self._drop(entry)

    def _compare(self, values: torch.Tensor, number: int) -> None:
        wanted = _content(number, len(values))
        self.tally.add("verified", len(wanted))
        if not torch.equal(values, wanted):
            self.tally.add("wrong", int((values != wanted).sum()))

    def _lose(self, error: DataLostError, entry: tuple[AquaTensor, int]) -> None:
        self.tally.add(_kind_of(error), entry[0].nbytes)
        self._drop(entry)

    def _drop(self, entry: tuple[AquaTensor, int]) -> None:
        self._tensors.remove(entry)
        self.tally.add("held", -entry[0].nbytes)
        try:
            entry[0].release()
        except TransportError:  # No memory to unmap a slab with; the store tries again.
            self.tally.add("refused", 1)


def _kind_of(error: DataLostError) -> str:
    return "wrong" if isinstance(error, ChecksumMismatchError) else "lost"


def _content(number: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def run_member(
    name: str,
    pipe: Connection,
    _: Ledger,
    *,
    kind: type[SoakMember],
    seed: str,
    tally: Path,
    url: str,
    sockets: Path,
) -> None:
    """A producer or a consumer that works until told otherwise."""
    isolate()
    keep_nothing()
    logging.disable(logging.NOTSET)
    logging.raiseExceptions = False  # A log cannot be written without memory.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.basicConfig(
        filename=tally.with_suffix(".log"), level=logging.INFO, format="%(asctime)s %(message)s"
    )
    os.environ |= {
        "AQUA_COORDINATOR_URL": url,
        "AQUA_SOCKET_DIR": str(sockets),
        "AQUA_TRANSPORT": "memfd",
        "AQUA_SLAB_BYTES": str(SLAB),
        "AQUA_HEARTBEAT_S": str(HEARTBEAT_S),
        "AQUA_GPU_UUID": f"GPU-{name}",
        **{f"AQUA_{what}": what.lower() for what in ("NODE", "DOMAIN")},
    }
    # A consumer waits after a reclaim so as not to thrash; here it is to thrash.
    demand.CALM_S = 0.2  # type: ignore[misc] # faster than real
    demand.MAX_CALM_S = 1.0  # type: ignore[misc] # as above
    serve_member(pipe, kind(name, seed, tally))
