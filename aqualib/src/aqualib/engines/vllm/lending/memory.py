"""Memory under an engine's KV cache that can leave and come back, address by address.

The engine gets one tensor and keeps it for life; what changes is whether there is memory behind an
address. Released granules go back to the device at once, which can then make slabs of them: what is
lent are those slabs, never the cache's own memory. That costs a few milliseconds and spares a
promise that cannot be kept, that a borrower's mapping ends when the engine wants its bytes back.
Memory that returns reads as zeros.

An access to a released address is a crash on a CPU as on a GPU. So a caller that releases must know
that nothing running or queued touches it; see `kv_lending`.

Which device: `HostKvMemory` here, `CudaKvMemory` in `cuda_memory`. `LendableCache` is a KV cache in
such memory, and where its blocks lie in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
import torch

from aqua_protocol import ConfigError
from aqualib.engines.vllm.lending.granules import GranuleMap
from aqualib.engines.vllm.paging.rows import block_rows
from aqualib.producer.device import EmulatedMemory
from aqualib.ranges import Range, runs_of
from aqualib.transports.base import tensor_at
from aqualib.transports.host import CPU
from aqualib.transports.host_pages import PAGE_BYTES, HostMapping

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqualib.engines.vllm.lending.granules import GranuleMask


class KvMemory(Protocol):
    """The memory that a KV cache is made of."""

    @property
    def granule_bytes(self) -> int:
        """Unit of release and restore."""

    @property
    def account(self) -> EmulatedMemory | None:
        """Budget shared with the slabs, once everything is allocated; None: the driver accounts."""

    @property
    def regions(self) -> list[Range]:
        """Ranges that `allocate` handed out, in order; granules are numbered over all of them."""

    @property
    def absent(self) -> GranuleMask:
        """Granules that may have no memory, as it really is: also after a call that failed."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A zeroed tensor of shape (nbytes,), int8, that lives as long as the process.

        Raises:
            TransportError: The device has no more.
        """

    def release(self, granules: GranuleMask) -> None:
        """Give the memory of these granules, all present, back to the device.

        Raises:
            TransportError: Some may have left; `absent` tells.
        """

    def restore(self, granules: GranuleMask) -> None:
        """Put zeroed memory behind these granules, all absent; all of them or none.

        Raises:
            TransportError: The device has not got it. What could not be undone, `absent` tells.
        """

    def close(self) -> None:
        """Give everything back; the tensors must not be touched any more."""


class HostKvMemory:
    """KV memory of a CPU: private pages, dropped and made unreachable while they are lent.

    Args:
        granule_bytes: A multiple of the page size.
        budget_bytes: Stands in for the device's memory; as large as the cache itself if None.
    """

    def __init__(self, granule_bytes: int, budget_bytes: int | None = None) -> None:
        assert granule_bytes % PAGE_BYTES == 0, granule_bytes
        self.granule_bytes: Final = granule_bytes
        self._budget_bytes = budget_bytes
        self._mappings: list[HostMapping] = []
        self.absent: GranuleMask = np.zeros(0, np.bool_)
        self._account: EmulatedMemory | None = None

    @property
    def account(self) -> EmulatedMemory:
        """See `KvMemory.account`.

        Raises:
            TransportError: The cache is larger than the budget.
        """
        if self._account is None:
            nbytes = sum(mapping.nbytes for mapping in self._mappings)
            account = EmulatedMemory(self._budget_bytes or nbytes)
            account.take(nbytes)
            self._account = account
        return self._account

    @property
    def regions(self) -> list[Range]:
        """See `KvMemory.regions`."""
        return [Range(mapping.address, mapping.nbytes) for mapping in self._mappings]

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `KvMemory.allocate`."""
        assert self._account is None, "all is allocated before any is lent"
        mapping = HostMapping(-(-nbytes // self.granule_bytes) * self.granule_bytes)
        self._mappings.append(mapping)
        self.absent = np.pad(self.absent, (0, mapping.nbytes // self.granule_bytes))
        return tensor_at(mapping.address, nbytes, CPU, torch.int8)

    def release(self, granules: GranuleMask) -> None:
        """See `KvMemory.release`."""
        self.account.give_back(int(granules.sum()) * self.granule_bytes)
        # All before the first: a kernel that refuses may have dropped the pages nevertheless.
        self.absent |= granules
        for mapping, start, nbytes in self._runs(granules):
            mapping.vacate(start, nbytes)

    def restore(self, granules: GranuleMask) -> None:
        """See `KvMemory.restore`."""
        wanted_bytes = int(granules.sum()) * self.granule_bytes
        self.account.take(wanted_bytes)
        with ExitStack() as undo:
            undo.callback(self.account.give_back, wanted_bytes)
            for mapping, start, nbytes in self._runs(granules):
                undo.callback(mapping.vacate, start, nbytes)
                mapping.refill(start, nbytes)
            undo.pop_all()
        self.absent &= ~granules

    def close(self) -> None:
        """See `KvMemory.close`."""
        for mapping in self._mappings:
            mapping.unmap()
        self._mappings.clear()

    def _runs(self, granules: GranuleMask) -> Iterator[tuple[HostMapping, int, int]]:
        """Mapping, offset and size of each run of neighbours."""
        before = 0
        for mapping in self._mappings:
            count = mapping.nbytes // self.granule_bytes
            for run in runs_of(granules[before : before + count]):
                yield mapping, run.start * self.granule_bytes, run.size * self.granule_bytes
            before += count


@dataclass(frozen=True, slots=True)
class LendableCache:
    """A KV cache to be lent from: its memory, and where its blocks, all layers, are in it."""

    memory: KvMemory
    granules: GranuleMap
    block_bytes: int
    device: torch.device


def lendable_cache(
    memory: KvMemory, caches: Iterable[torch.Tensor], block_count: int
) -> LendableCache:
    """Find the blocks of KV caches in the memory that they were made of.

    Raises:
        ConfigError: Some lie elsewhere, or in a layout that is not known here.
    """
    pieces = block_rows(caches, block_count)
    if not all(piece.is_contiguous() for piece in pieces):
        raise ConfigError(
            "other layers' bytes, or gaps, lie between the blocks of a KV cache",
            remedy='Run without "lend".',
        )
    rows = [Range(piece.data_ptr(), piece.nbytes) for piece in pieces]
    regions = memory.regions
    strays = [
        row
        for row in rows
        if not any(region.start <= row.start and row.end <= region.end for region in regions)
    ]
    if strays or not rows:
        raise ConfigError(
            f"{len(strays)} of {len(rows)} parts of the KV cache were not made of memory that can "
            "be lent",
            remedy='Run without "lend", and report the model and the exact version of vLLM.',
        )
    granules = GranuleMap(
        regions, rows, block_count=block_count, granule_bytes=memory.granule_bytes
    )
    block_bytes = sum(row.size for row in rows) // block_count
    return LendableCache(memory, granules, block_bytes, pieces[0].device)
