"""Host memory by the page: aligned, huge where the kernel allows it, faulted in beforehand.

What it promises: a mapping that is ready for memcpy speed when it has been populated, and that goes
away quickly, without the GIL. What it does not: huge pages. They are asked for and the mapping
works without them, only slower.

Why it is not `mmap.mmap`: that cannot place a mapping on a huge page boundary, and it keeps a
duplicate of the descriptor. Medians by benchmarks/host_pages.py on a 2-core virtual machine (Xeon,
Linux 6.18), 64 MiB of memfd:

    pages                         exporter faults in    importer maps    unmap      last close
    4 KiB, MADV_POPULATE_WRITE    16 ms                 5.4 ms           2.1 ms     4.1 ms
    2 MiB, MADV_COLLAPSE          4.5 ms                0.06 ms          0.02 ms    0.15 ms

Shared memory is seldom allowed huge pages by default (`shmem_enabled` is `never`), but
`MADV_COLLAPSE` (Linux 6.1) makes them on request wherever it is not `deny`. It wants one page
present in each huge page, and fills the holes around it with zeros.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from typing import Final, cast

from aqua_protocol import TransportError, format_bytes
from aqualib.transports.base import require_multiple

HUGE_PAGE_BYTES: Final = 2 << 20
"""Bytes of an x86-64 and 4 KiB-granule arm64 page-middle-directory entry. It is the processor's;
doubled, no mapping would be huge."""

PAGE_BYTES: Final = mmap.PAGESIZE

# Fixed by the ABI of Linux; `mmap` of Python 3.11 names none of the numbers.
_PROT_NONE: Final = 0
_PROT_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_MADV_POPULATE_WRITE: Final = 23
_MADV_COLLAPSE: Final = 25
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_MPOL_PREFERRED: Final = 1
_MBIND: Final = {"x86_64": 237, "aarch64": 235}.get(platform.machine())

NODE_LIMIT: Final = 1024
"""NUMA nodes that a mask has room for: Linux's own limit on x86-64 and arm64. Doubled, nothing
changes."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class HostMapping:
    """`nbytes` of readable, writable host memory at `address`, absent from forked children.

    A child that inherited the mapping would pin lent memory after its parent gave it back, and
    copy-on-write would undo the pre-faulting of private memory in the parent.

    Args:
        nbytes: Size, a positive multiple of the page size.
        fd: Shared memory to map from its start, or None for private zeroed memory. Not kept.

    Raises:
        TransportError: The size cannot be mapped, or memory ran out.
    """

    def __init__(self, nbytes: int, *, fd: int | None = None) -> None:
        require_multiple(nbytes, PAGE_BYTES)
        self.nbytes = nbytes
        self.address = _map_aligned(nbytes, fd)
        try:
            self._advise(mmap.MADV_DONTFORK)
            if fd is None:
                self._advise(mmap.MADV_HUGEPAGE)
        except TransportError:
            self.unmap()
            raise

    def collapse(self, fd: int) -> None:
        """Back fresh shared memory with huge pages, as far as the kernel can and will.

        Args:
            fd: What this mapping maps; its contents must be zeros.

        Raises:
            TransportError: Memory ran out.
        """
        whole = self.nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        if not whole:
            return
        try:
            for start in range(0, whole, HUGE_PAGE_BYTES):
                # By file offset: a page that is in no page table yet collapses twice as fast.
                os.pwrite(fd, b"\0", start)
        except OSError as error:
            raise _failure("allocate", self.nbytes, error.errno) from error
        if _libc.madvise(self.address, whole, _MADV_COLLAPSE) == 0:
            return
        if ctypes.get_errno() == errno.EINVAL:
            return  # `deny`, or an old kernel: small pages it is.
        # One piece found no contiguous memory or a page under way, and the kernel gave all later
        # ones up with it. One by one is slower, and leaves small pages only where it must.
        for start in range(0, whole, HUGE_PAGE_BYTES):
            _libc.madvise(self.address + start, HUGE_PAGE_BYTES, _MADV_COLLAPSE)

    def prefer_node(self, node: int) -> None:
        """Take pages that are not there yet from this NUMA node, as long as it has some.

        Where the kernel has no nodes, or a container's filter refuses the call, nothing changes.
        """
        if _MBIND is None or not 0 <= node < NODE_LIMIT:
            return
        mask = (ctypes.c_ubyte * (NODE_LIMIT // 8))()
        mask[node // 8] = 1 << node % 8
        arguments = (_MPOL_PREFERRED, mask, ctypes.c_ulong(NODE_LIMIT), 0)
        _libc.syscall(
            *(ctypes.c_long(_MBIND), ctypes.c_void_p(self.address), ctypes.c_size_t(self.nbytes)),
            *arguments,
        )

    def populate(self) -> None:
        """Fault every page in, writable, without changing a byte.

        Raises:
            TransportError: Memory ran out.
        """
        self._advise(_MADV_POPULATE_WRITE)

    def vacate(self, start: int, nbytes: int) -> None:
        """Give the pages of a stretch of private memory back; touching it is a crash from now on.

        Args:
            start: First byte, counted from `address`; a multiple of the page size, like `nbytes`.
            nbytes: Size of the stretch.

        Raises:
            TransportError: The kernel allows no more mappings (`vm.max_map_count`).
        """
        flags = _MAP_FIXED | _MAP_NORESERVE
        _map(self.address + start, nbytes, None, flags, _PROT_NONE)

    def refill(self, start: int, nbytes: int) -> None:
        """Put zeroed pages behind a vacated stretch.

        Raises:
            TransportError: Memory ran out; the stretch stays vacated.
        """
        _map(self.address + start, nbytes, None, _MAP_FIXED)
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
            self._advise(advice, start, nbytes)

    def unmap(self) -> None:
        """Give the address range back. Harmless when repeated; nothing may look at it any more."""
        if self.address:
            address, self.address = self.address, 0
            _require(_libc.munmap(address, self.nbytes), "unmap", self.nbytes)

    def _advise(self, advice: int, start: int = 0, nbytes: int | None = None) -> None:
        size = self.nbytes if nbytes is None else nbytes
        if _libc.madvise(self.address + start, size, advice) != 0:
            # A kernel that does not know the advice (MADV_POPULATE_WRITE came with 5.14) works
            # too: pages then appear on first touch.
            if ctypes.get_errno() == errno.EINVAL:
                return
            _require(-1, "fault in", size)


def _map_aligned(nbytes: int, fd: int | None) -> int:
    """Map at a huge page boundary: reserve more, place the mapping inside, trim the rest."""
    if nbytes < HUGE_PAGE_BYTES:
        return _map(None, nbytes, fd, 0)
    reserved = nbytes + HUGE_PAGE_BYTES
    start = _map(None, reserved, None, 0, _PROT_NONE if fd is not None else _PROT_READ_WRITE)
    address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    head, tail = address - start, start + HUGE_PAGE_BYTES - address
    if head:
        _libc.munmap(start, head)
    if tail:
        _libc.munmap(address + nbytes, tail)
    if fd is not None:
        try:
            _map(address, nbytes, fd, _MAP_FIXED)
        except TransportError:
            _libc.munmap(address, nbytes)
            raise
    return address


def _map(
    address: int | None, nbytes: int, fd: int | None, flags: int, rights: int = _PROT_READ_WRITE
) -> int:
    if fd is None:
        flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    else:
        flags |= mmap.MAP_SHARED
    got = _libc.mmap(address, nbytes, rights, flags, -1 if fd is None else fd, 0)
    _require(-1 if got == _MAP_FAILED else 0, "map", nbytes)
    return cast("int", got)


def _require(result: int, verb: str, nbytes: int) -> None:
    if result != 0:
        raise _failure(verb, nbytes, ctypes.get_errno())


def _failure(verb: str, nbytes: int, code: int | None) -> TransportError:
    return TransportError(
        f"cannot {verb} {format_bytes(nbytes)} of host memory: {os.strerror(code or 0)}",
        remedy="Lend or reserve less memory, or raise the memory limit of the process.",
    )
