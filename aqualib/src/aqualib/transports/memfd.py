"""Slabs in anonymous host memory behind a descriptor: CPU machines, tests, the demo.

`memfd_create` gives what CUDA's VMM gives on GPUs: memory without a name, reachable only through a
descriptor that travels by SCM_RIGHTS, freed by the kernel when the last mapping and descriptor are
gone, whichever process died. So everything above the transport behaves here as it does there.

A slab is sealed against shrinking and growing: a peer that could truncate it could kill us with
SIGBUS. So could one that punches a hole into reserved huge pages, once no page of them is left to
fill it. An importer refuses descriptors of these, without seals or of another size. What a seal
does not stop is a peer that overwrites or hole-punches bytes; lease channels admit only peers of
one user with a valid token, and the optional checksum catches the rest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
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
from aqualib.transports.host import CPU, HostCopier, host_slab
from aqualib.transports.host_pages import PAGE_BYTES, HostMapping

SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_MFD_NOEXEC_SEAL: Final = 0x0008
"""Fixed by the ABI of Linux 6.3. Hosts with `vm.memfd_noexec=2` refuse memory that could be run."""

_descriptors: set[int] = set()
"""Of the slabs that this process owns."""


class MemfdTransport(Transport):
    """Slabs in host memory; works on every Linux host. See the module docstring."""

    kind = TransportKind.MEMFD
    device = CPU

    @override
    def check(self) -> None:
        try:
            os.close(sealed_memory(PAGE_BYTES))
        except TransportError as error:
            raise TransportUnavailableError(
                f"memfd does not work here: {error.message}",
                remedy="Allow memfd_create and fcntl(F_ADD_SEALS) in the sandbox's seccomp filter.",
            ) from error

    @override
    def create(self, nbytes: int) -> OwnedSlab:
        require_multiple(nbytes, PAGE_BYTES)
        with contextlib.ExitStack() as undo:
            fd = sealed_memory(nbytes)
            _descriptors.add(fd)
            undo.callback(_drop, fd, os.getpid())
            mapping = HostMapping(nbytes, fd=fd)
            undo.callback(mapping.unmap)
            mapping.collapse(fd)  # What is lent is warm.
            mapping.populate()
            return OwnedSlab(mapping.address, nbytes, CPU, undo, lambda: _export(fd))

    @override
    def open(self, handle: Handle, nbytes: int) -> MappedSlab:
        with handle, contextlib.ExitStack() as undo:
            if handle.fd is None:
                raise TransportError("a memfd slab came without its descriptor")
            require_multiple(nbytes, PAGE_BYTES)
            _require_slab(handle.fd, nbytes)
            mapping = HostMapping(nbytes, fd=handle.fd)
            undo.callback(mapping.unmap)
            # Page tables now, not during the first copy; the pages themselves exist already.
            mapping.populate()
            return MappedSlab(mapping.address, nbytes, CPU, undo)

    @override
    def create_host(self, nbytes: int) -> MappedSlab:
        return host_slab(nbytes)

    @override
    def copier(self, *, is_background: bool = False) -> HostCopier:
        del is_background
        return HostCopier()

    @override
    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""


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
        page_bytes = os.fstatvfs(fd).f_bsize
    except OSError as error:
        raise TransportError(f"the descriptor is not a memfd slab: {error.strerror}") from error
    if seals & SEALS != SEALS:
        raise TransportError("the slab is not sealed: its owner could truncate it under us")
    if page_bytes != PAGE_BYTES:
        raise TransportError("the slab is of reserved huge pages: its owner could take them away")
    require_announced(size, nbytes)


def _cannot(verb: str, error: OSError) -> TransportError:
    exhausted = error.errno in {errno.EMFILE, errno.ENFILE}
    return TransportError(
        f"cannot {verb}: {error.strerror}",
        remedy="Raise the limit of open files: a producer holds one per slab." if exhausted else "",
    )


def _export(fd: int) -> Handle:
    try:
        return Handle(payload=b"", fd=os.dup(fd))
    except OSError as error:
        raise _cannot("export a slab", error) from error


def _drop(fd: int, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # In a forked child the number may mean something else by now.
        _descriptors.remove(fd)
        os.close(fd)


def _drop_all() -> None:
    """A forked child that kept a descriptor would pin memory that its parent gave back."""
    for fd in _descriptors:
        os.close(fd)
    _descriptors.clear()


os.register_at_fork(after_in_child=_drop_all)
