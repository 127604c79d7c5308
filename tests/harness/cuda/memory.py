"""Device memory of the stand-in: physical memory in memfds, and the addresses it is mapped at.

Handles, mappings and descriptors each keep the memory, over processes, because they keep the memfd.
A reserved address without memory, or without rights, is not readable: a host that looks there
crashes, as it would lose its context. Fresh memory is dirty.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from harness.cuda.accesses import AccessLog

GRANULE_BYTES: Final = 2 << 20
"""What every GPU so far maps at once."""

NAME: Final = "standin-cuda"

_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def reserve_addresses(nbytes: int) -> int:
    """Addresses with nothing behind them."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    at = _libc.mmap(None, nbytes, 0, flags, -1, 0)
    assert at not in {None, ctypes.c_void_p(-1).value}, "out of addresses"
    return int(at)


def free_addresses(at: int, nbytes: int) -> None:
    """Undo `reserve_addresses`."""
    _libc.munmap(at, nbytes)


@dataclass(eq=False, slots=True)
class Physical:
    """Memory on one device; in the books for as long as a handle or a mapping of ours keeps it.

    Attributes:
        is_ours: Whether this process made it, so that it counts as used here.
    """

    fd: int
    device: int
    nbytes: int
    is_ours: bool
    log: AccessLog = field(init=False)
    holders: int = 0
    is_rdma_capable: bool = False

    def __post_init__(self) -> None:
        self.log = AccessLog(self.nbytes, is_set=not self.is_ours)


@dataclass(eq=False, slots=True)
class Mapping:
    """A whole physical memory at an address; `readers` and `writers` are ordinals of GPUs."""

    at: int
    memory: Physical
    readers: set[int] = field(default_factory=set)
    writers: set[int] = field(default_factory=set)
    is_gone: bool = False

    @property
    def end(self) -> int:
        """The first address after it."""
        return self.at + self.memory.nbytes


class AddressSpace:
    """What is mapped where in this process."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._mappings: dict[int, Mapping] = {}
        self.reserved: dict[int, int] = {}

    def __len__(self) -> int:
        """Number of mappings."""
        return len(self._starts)

    def __iter__(self) -> Iterator[Mapping]:
        """The mappings."""
        return iter(self._mappings.values())

    def find(self, at: int) -> Mapping | None:
        """The mapping that holds this address."""
        index = bisect_right(self._starts, at) - 1
        if index < 0:
            return None
        mapping = self._mappings[self._starts[index]]
        return mapping if at < mapping.end else None

    def within(self, at: int, nbytes: int) -> list[Mapping] | None:
        """The mappings that make up exactly these bytes; None if there are holes or cuts."""
        found: list[Mapping] = []
        end = at + nbytes
        while at < end:
            mapping = self._mappings.get(at)
            if mapping is None:
                return None
            found.append(mapping)
            at = mapping.end
        return found if at == end and found else None

    def is_vacant(self, at: int, nbytes: int) -> bool:
        """Whether the bytes lie within one reservation and meet no mapping."""
        inside = any(
            start <= at and at + nbytes <= start + size for start, size in self.reserved.items()
        )
        index = bisect_right(self._starts, at + nbytes - 1) - 1
        before = self._mappings[self._starts[index]] if index >= 0 else None
        return inside and (before is None or before.end <= at)

    def is_device(self, at: int) -> bool:
        """Whether the address is the device's, with memory behind it or without."""
        return self.find(at) is not None or any(
            start <= at < start + size for start, size in self.reserved.items()
        )

    def map(self, at: int, memory: Physical) -> Mapping:
        """Put memory behind reserved addresses; nobody may use it yet."""
        flags = mmap.MAP_SHARED | _MAP_FIXED
        got = _libc.mmap(at, memory.nbytes, 0, flags, memory.fd, 0)
        assert got == at, "the kernel does not map the memory"
        _libc.madvise(at, memory.nbytes, mmap.MADV_DONTFORK)
        mapping = Mapping(at, memory)
        self._mappings[at] = mapping
        insort(self._starts, at)
        memory.holders += 1
        return mapping

    def allow(self, mapping: Mapping, device: int, *, writes: bool) -> None:
        """Let a GPU, and with it the host of this stand-in, use a mapping."""
        mapping.readers.add(device)
        if writes:
            mapping.writers.add(device)
        rights = mmap.PROT_READ | (mmap.PROT_WRITE if mapping.writers else 0)
        _libc.mprotect(mapping.at, mapping.memory.nbytes, rights)

    def unmap(self, mapping: Mapping) -> None:
        """Take the memory away; the addresses stay reserved."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _libc.mmap(mapping.at, mapping.memory.nbytes, 0, flags, -1, 0)
        del self._mappings[mapping.at]
        self._starts.remove(mapping.at)
        mapping.is_gone = True
        mapping.memory.holders -= 1


def make_memory(device: int, nbytes: int) -> int:
    """A descriptor of new, dirty memory, which says whose it is."""
    fd = os.memfd_create(f"{NAME}-{device}")
    os.ftruncate(fd, nbytes)
    os.pwrite(fd, b"dirt", 0)
    return fd


def home_of(fd: int) -> int | None:
    """The device whose memory a descriptor names; None if it names something else."""
    try:
        target = str(Path(f"/proc/self/fd/{fd}").readlink())
    except OSError:
        return None
    found = re.match(rf"/memfd:{NAME}-(\d+)", target)
    return int(found[1]) if found else None
