"""What the contract suite cannot see: seals, huge pages, and descriptors running out."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
from collections.abc import Iterator

import pytest

from aqua_protocol import MIB, TransportError, TransportUnavailableError
from aqualib.transports import Handle, host_pages
from aqualib.transports.host_pages import HUGE_PAGE_BYTES, HostMapping
from aqualib.transports.memfd import SEALS, MemfdTransport
from harness.transport_peer import open_descriptors, pattern

NBYTES = 4 * MIB
MFD_NOEXEC_SEAL = 0x0008  # Fixed by the ABI of Linux 6.3; the os module has no name for it.


@pytest.fixture
def transport() -> MemfdTransport:
    return MemfdTransport()


@pytest.fixture
def plain_memory() -> Iterator[int]:
    """A memfd without seals."""
    fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    yield fd
    os.close(fd)


def test_a_borrower_cannot_truncate_a_slab_under_its_owner(transport: MemfdTransport) -> None:
    slab = transport.create(NBYTES)
    with slab.export() as handle:
        assert handle.fd is not None
        for size in (0, NBYTES // 2, 2 * NBYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(handle.fd, size)
        with pytest.raises(PermissionError):
            fcntl.fcntl(handle.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    slab.close()


def test_memory_that_its_owner_could_truncate_is_refused(
    transport: MemfdTransport, plain_memory: int
) -> None:
    with pytest.raises(TransportError, match="not sealed"):
        transport.open(Handle(b"", os.dup(plain_memory)), NBYTES)
    fcntl.fcntl(plain_memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    with pytest.raises(TransportError, match="not sealed"):
        transport.open(Handle(b"", os.dup(plain_memory)), NBYTES)


def test_memory_of_reserved_huge_pages_is_refused(transport: MemfdTransport) -> None:
    """Its owner may punch a hole, and take what is left of the pool: our next touch is a SIGBUS."""
    fd = os.memfd_create("huge", os.MFD_ALLOW_SEALING | os.MFD_HUGETLB)
    os.ftruncate(fd, NBYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    with pytest.raises(TransportError, match="huge pages"):
        transport.open(Handle(b"", fd), NBYTES)


def test_memory_that_cannot_be_written_is_refused(transport: MemfdTransport) -> None:
    slab = transport.create(NBYTES)
    with slab.export() as handle:
        read_only = os.open(f"/proc/self/fd/{handle.fd}", os.O_RDONLY)
    with pytest.raises(TransportError, match="cannot map"):
        transport.open(Handle(b"", read_only), NBYTES)
    slab.close()


def test_large_slabs_start_at_a_huge_page(transport: MemfdTransport) -> None:
    slab, host = transport.create(NBYTES), transport.create_host(NBYTES)
    mapped = transport.open(slab.export(), NBYTES)
    for memory in (slab, mapped, host):
        assert memory.tensor.data_ptr() % HUGE_PAGE_BYTES == 0
        memory.close()


def test_a_slab_works_where_the_kernel_refuses_huge_pages(
    transport: MemfdTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pages, "_MADV_COLLAPSE", 9999)
    slab = transport.create(NBYTES)
    slab.tensor.copy_(pattern(1, NBYTES))
    assert (slab.tensor == pattern(1, NBYTES)).all()
    slab.close()


def test_sizes_that_are_no_whole_number_of_huge_pages_work(transport: MemfdTransport) -> None:
    for nbytes in (64 * 1024, HUGE_PAGE_BYTES + 4096, 3 * HUGE_PAGE_BYTES - 4096):
        slab = transport.create(nbytes)
        slab.tensor.fill_(255)
        mapped = transport.open(slab.export(), nbytes)
        assert mapped.tensor.all()
        mapped.close()
        slab.close()


def test_memory_that_runs_out_is_a_typed_error(
    transport: MemfdTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_descriptors()

    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(host_pages._libc, "madvise", refuse)
    for make in (transport.create, transport.create_host):
        with pytest.raises(TransportError, match="Cannot allocate memory"):
            make(NBYTES)
    assert open_descriptors() == before


def test_descriptors_that_run_out_are_a_typed_error_that_says_so(
    transport: MemfdTransport,
) -> None:
    slab = transport.create(NBYTES)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(TransportError) as export_refused:
            slab.export()
        with pytest.raises(TransportError) as create_refused:
            transport.create(NBYTES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for refusal in (export_refused, create_refused):
        assert "limit of open files" in refusal.value.remedy
    slab.close()


def test_a_sandbox_without_memfd_is_unavailable_with_a_remedy(
    transport: MemfdTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    transport.check()
    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(TransportUnavailableError) as refusal:
        transport.check()
    assert "seccomp" in refusal.value.remedy


def test_an_older_kernel_without_noexec_seals_still_makes_slabs(
    transport: MemfdTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = os.memfd_create

    def without_noexec(name: str, flags: int) -> int:
        if flags & MFD_NOEXEC_SEAL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", without_noexec)
    slab = transport.create(NBYTES)
    assert not slab.tensor.any()
    slab.close()


def test_unmapping_twice_is_harmless() -> None:
    host = HostMapping(NBYTES)
    host.unmap()
    host.unmap()
    assert host.address == 0
