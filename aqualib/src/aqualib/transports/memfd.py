"""Slabs in anonymous host memory behind a descriptor: CPU machines, tests, the demo.

`memfd_create` gives what CUDA's VMM gives on GPUs: memory without a name, reachable only through a
descriptor that travels by SCM_RIGHTS, freed by the kernel when the last mapping and descriptor are
gone, whichever process died. So everything above the transport behaves here as it does there.

A slab is sealed against shrinking and growing: a peer that could truncate it could kill us with
SIGBUS. An importer refuses descriptors without these seals or of another size. What a seal does not
stop is a peer that overwrites or hole-punches bytes; lease channels admit only peers of one user
with a valid token, and the optional checksum catches the rest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import weakref
from typing import Final

from typing_extensions import override

from aqua_protocol import TransportError, TransportKind, TransportUnavailableError
from aqualib.transports.base import (
    Handle,
    MappedSlab,
    OwnedSlab,
    Transport,
    require_announced,
    require_multiple,
)
from aqualib.transports.host import CPU, HostCopier, HostSlab
from aqualib.transports.host_pages import PAGE_BYTES, HostMapping

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_MFD_NOEXEC_SEAL: Final = 0x0008
"""Fixed by the ABI of Linux 6.3. Hosts with `vm.memfd_noexec=2` refuse memory that could be run."""


class MemfdSlab(MappedSlab):
    """A slab of another process, mapped here; use `MemfdTransport.open`."""

    def __init__(self, mapping: HostMapping) -> None:
        super().__init__(mapping.address, mapping.nbytes, CPU)
        self._mapping = mapping

    def _let_go(self) -> None:
        self._mapping.unmap()


class OwnedMemfdSlab(MemfdSlab, OwnedSlab):
    """A slab that this process made and may lend; use `MemfdTransport.create`."""

    def __init__(self, mapping: HostMapping, fd: int) -> None:
        super().__init__(mapping)
        self._fd = fd
        _owned_slabs.add(self)

    @override
    def export(self) -> Handle:
        with self._lock:
            if self._fd < 0:
                raise TransportError("a closed slab cannot be lent")
            try:
                return Handle(payload=b"", fd=os.dup(self._fd))
            except OSError as error:
                raise _cannot("export a slab", error) from error

    def _let_go(self) -> None:
        super()._let_go()
        self.drop_descriptor()

    def drop_descriptor(self) -> None:
        """Close the descriptor alone, without a lock; for `close` and for forked children."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class MemfdTransport(Transport):
    """Slabs in host memory; works on every Linux host. See the module docstring."""

    kind = TransportKind.MEMFD
    device = CPU

    @override
    def check(self) -> None:
        if not sys.platform.startswith("linux"):
            raise TransportUnavailableError(
                f"memfd does not exist on {sys.platform}", remedy="Run on Linux."
            )
        try:
            os.close(sealed_memory(PAGE_BYTES))
        except TransportError as error:
            raise TransportUnavailableError(
                f"memfd does not work here: {error.message}",
                remedy="Allow memfd_create and fcntl(F_ADD_SEALS) in the sandbox's seccomp filter.",
            ) from error

    @override
    def create(self, nbytes: int) -> OwnedMemfdSlab:
        require_multiple(nbytes, PAGE_BYTES)
        with contextlib.ExitStack() as undo:
            fd = sealed_memory(nbytes)
            undo.callback(os.close, fd)
            mapping = HostMapping(nbytes, fd=fd)
            undo.callback(mapping.unmap)
            mapping.collapse(fd)  # What is lent is warm.
            mapping.populate()
            slab = OwnedMemfdSlab(mapping, fd)
            undo.pop_all()
        return slab

    @override
    def open(self, handle: Handle, nbytes: int) -> MemfdSlab:
        with handle:
            if handle.fd is None:
                raise TransportError("a memfd slab came without its descriptor")
            require_multiple(nbytes, PAGE_BYTES)
            _require_slab(handle.fd, nbytes)
            mapping = HostMapping(nbytes, fd=handle.fd)
        try:
            # Page tables now, not during the first copy; the pages themselves exist already.
            mapping.populate()
        except TransportError:
            mapping.unmap()
            raise
        return MemfdSlab(mapping)

    @override
    def create_host(self, nbytes: int) -> HostSlab:
        return HostSlab(nbytes)

    @override
    def copier(self) -> HostCopier:
        return HostCopier()


def sealed_memory(nbytes: int) -> int:
    """A descriptor of `nbytes` of fresh zeroed memory, owned by the caller."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        try:
            fd = os.memfd_create("aqua-slab", flags | _MFD_NOEXEC_SEAL)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fd = os.memfd_create("aqua-slab", flags)
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        except OSError:
            os.close(fd)
            raise
    except OSError as error:
        raise _cannot("create a slab", error) from error
    return fd


def _require_slab(fd: int, nbytes: int) -> None:
    """Refuse what is not exactly a slab of this size, before anything is mapped."""
    try:
        # Fails on everything but memory files. Only a memfd can carry these seals: a file on a
        # tmpfs is sealed against sealing from birth.
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        size = os.fstat(fd).st_size
    except OSError as error:
        raise TransportError(f"the descriptor is not a memfd slab: {error.strerror}") from error
    if seals & SEALS != SEALS:
        raise TransportError("the slab is not sealed: its owner could truncate it under us")
    require_announced(size, nbytes)


def _cannot(verb: str, error: OSError) -> TransportError:
    exhausted = error.errno in {errno.EMFILE, errno.ENFILE}
    return TransportError(
        f"cannot {verb}: {error.strerror}",
        remedy="Raise the limit of open files: a producer holds one per slab." if exhausted else "",
    )


_owned_slabs: weakref.WeakSet[OwnedMemfdSlab] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """A forked child that kept a descriptor would pin memory that its parent gave back."""
    for slab in list(_owned_slabs):
        # No lock: the thread that held it does not exist in the child.
        slab.drop_descriptor()


os.register_at_fork(after_in_child=_let_go_in_child)
