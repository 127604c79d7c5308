"""One suite over every transport: what `transports.base` promises, between two processes.

The `-on-stand-in` cases are the real CUDA transports over a stand-in for the driver, whose streams
run late (`harness/cuda`): calls, order, counts and descriptors on machines without a GPU.
"""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from aqua_protocol import MIB, TransportError, TransportKind, TransportUnavailableError
from aqualib import probe
from aqualib.transports import Handle, MappedSlab, OwnedSlab, Transport, select
from aqualib.transports.release_pipe import DEFERRED_FREE
from harness import fork_server
from harness.bounds import until
from harness.cuda.stand_in import StandIn, stand_in
from harness.transport_peer import Peer, open_descriptors, pattern

NBYTES = 4 * MIB
"""Two CUDA granules, two huge pages."""

LARGE_BYTES = 256 * MIB
"""Stands out from what the rest of the machine allocates meanwhile."""

CASES = [
    pytest.param((TransportKind.MEMFD, False), id="memfd"),
    pytest.param((TransportKind.CUDA_VMM, True), id="cuda_vmm-on-stand-in"),
    pytest.param((TransportKind.CUDA_IPC, True), id="cuda_ipc-on-stand-in"),
    pytest.param((TransportKind.CUDA_VMM, False), id="cuda_vmm", marks=pytest.mark.gpu),
    pytest.param((TransportKind.CUDA_IPC, False), id="cuda_ipc", marks=pytest.mark.gpu),
]


class Case:
    """A transport under test, and how to start a second process that uses it."""

    def __init__(self, kind: TransportKind, standing: StandIn | None) -> None:
        self.standing = standing
        self.transport = select(kind) if standing is None else standing.transport(kind)

    def start_peer(self) -> Peer:
        return Peer(self.transport.kind, stands_in=self.standing is not None)

    def free_bytes(self) -> int:
        """Memory of the transport's kind that the machine has left, as the system tells it."""
        if self.standing is None and self.transport.device.type == "cuda":
            return int(torch.cuda.mem_get_info(self.transport.device)[0])
        with Path("/proc/meminfo").open() as lines:
            shmem = next(line for line in lines if line.startswith("Shmem:"))
        return -int(shmem.split()[1]) * 1024

    def wait_for_free_bytes(self, at_least: int) -> None:
        """Poll: the kernel frees a killed process's memory some time after it is reaped."""
        until(lambda: self.free_bytes() >= at_least, "free again")


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    kind, stands_in = request.param
    fork_server.start_server()
    if stands_in:
        with stand_in() as standing:
            yield Case(kind, standing)
        return
    try:
        yield Case(kind, None)
    except TransportUnavailableError as refusal:
        if kind is TransportKind.MEMFD:
            raise  # Works everywhere, so that is a bug.
        pytest.skip(str(refusal))


@pytest.fixture(scope="module")
def transport(case: Case) -> Transport:
    return case.transport


@pytest.fixture(scope="module")
def peer(case: Case) -> Iterator[Peer]:
    """A second process, shared by the tests that do not kill it."""
    with case.start_peer() as peer:
        yield peer


@pytest.fixture(autouse=True)
def _nothing_leaks(case: Case) -> Iterator[None]:
    """Descriptors, and what the stand-in counts, are the same after each test.

    Not on a real GPU, whose driver opens descriptors of its own when it pleases; a test of its own
    counts them there over many rounds.
    """
    if case.standing is None and case.transport.device.type == "cuda":
        yield
        return
    case.transport.copier().fence()
    warmed_up = case.transport.create(NBYTES)
    warmed_up.export().close()
    warmed_up.close()
    before = driver_counts(case), open_descriptors()
    yield
    gc.collect()
    until(lambda: DEFERRED_FREE.waiting_count == 0, "all is freed")
    # In this order: counting gives back what torch has cached.
    assert (driver_counts(case), open_descriptors()) == before
    if case.standing is not None:
        case.standing.machine.check()


def driver_counts(case: Case) -> dict[str, int]:
    return case.standing.counts() if case.standing is not None else {}


def fill(transport: Transport, tensor: torch.Tensor, seed: int) -> None:
    copier = transport.copier()
    copier.copy(tensor, pattern(seed, tensor.numel()).to(tensor.device))
    copier.fence()


def holds(tensor: torch.Tensor, seed: int) -> bool:
    return bool((tensor.cpu() == pattern(seed, tensor.numel())).all())


def test_a_fresh_slab_is_zeros_on_the_transports_own_device(transport: Transport) -> None:
    slab = transport.create(NBYTES)
    assert isinstance(slab, OwnedSlab)
    assert slab.nbytes == NBYTES
    assert slab.tensor.shape == (NBYTES,)
    assert slab.tensor.dtype == torch.uint8
    assert slab.tensor.device == transport.device
    assert not slab.tensor.any()
    slab.close()


def test_importer_sees_what_the_exporter_writes_and_the_other_way_round(
    transport: Transport, peer: Peer
) -> None:
    slab = transport.create(NBYTES)
    peer.open("both-ways", slab.export(), NBYTES)
    fill(transport, slab.tensor, 1)
    assert peer.call("matches", name="both-ways", seed=1).value
    peer.call("fill", name="both-ways", seed=2)
    assert holds(slab.tensor, 2)
    peer.call("close", name="both-ways")
    slab.close()


def test_slabs_of_many_sizes_arrive_whole(transport: Transport, peer: Peer) -> None:
    for mebibytes in (2, 6, 64):
        nbytes = mebibytes * MIB
        peer.call("create", name="sized", nbytes=nbytes)
        peer.call("fill", name="sized", seed=mebibytes)
        mapped = transport.open(peer.export("sized"), nbytes)
        assert isinstance(mapped, MappedSlab)
        assert mapped.tensor.device == transport.device
        assert holds(mapped.tensor, mebibytes)
        mapped.close()
        peer.call("close", name="sized")


def test_importer_keeps_the_bytes_after_the_exporter_closes(
    transport: Transport, peer: Peer
) -> None:
    slab = transport.create(NBYTES)
    fill(transport, slab.tensor, 3)
    peer.open("kept", slab.export(), NBYTES)
    slab.close()
    successor = transport.create(NBYTES)
    fill(transport, successor.tensor, 4)
    assert peer.call("matches", name="kept", seed=3).value
    peer.call("fill", name="kept", seed=5)
    assert holds(successor.tensor, 4)
    successor.close()
    peer.call("close", name="kept")


def test_importer_keeps_the_bytes_after_the_exporter_is_killed(case: Case) -> None:
    if case.transport.kind is TransportKind.CUDA_IPC:
        pytest.skip("legacy IPC does not promise it; cuda_ipc says so")
    with case.start_peer() as exporter:
        exporter.call("create", name="lent", nbytes=NBYTES)
        exporter.call("fill", name="lent", seed=6)
        mapped = case.transport.open(exporter.export("lent"), NBYTES)
        exporter.kill()
    assert holds(mapped.tensor, 6)
    fill(case.transport, mapped.tensor, 7)
    assert holds(mapped.tensor, 7)
    mapped.close()


def test_memory_comes_back_after_the_importer_is_killed(case: Case) -> None:
    with case.start_peer() as importer:
        importer.call("open_fds")  # It is up: what its runtime takes is not counted below.
        at_first = case.free_bytes()
        slab = case.transport.create(LARGE_BYTES)
        importer.open("held", slab.export(), LARGE_BYTES)
        slab.close()
        assert case.free_bytes() <= at_first - LARGE_BYTES // 2, "the importer holds it alone"
        importer.kill()
        case.wait_for_free_bytes(at_first - LARGE_BYTES // 2)


def test_memory_comes_back_when_both_have_closed(case: Case, peer: Peer) -> None:
    at_first = case.free_bytes()
    slab = case.transport.create(LARGE_BYTES)
    peer.open("shared", slab.export(), LARGE_BYTES)
    peer.call("close", name="shared")
    assert case.free_bytes() <= at_first - LARGE_BYTES // 2, "the exporter holds it alone"
    slab.close()
    case.wait_for_free_bytes(at_first - LARGE_BYTES // 2)


def test_one_importer_killed_leaves_the_others_alone(case: Case, peer: Peer) -> None:
    slab = case.transport.create(NBYTES)
    fill(case.transport, slab.tensor, 8)
    with case.start_peer() as doomed:
        doomed.open("first", slab.export(), NBYTES)
        peer.open("second", slab.export(), NBYTES)
        doomed.kill()
    assert peer.call("matches", name="second", seed=8).value
    peer.call("close", name="second")
    slab.close()


@pytest.mark.parametrize(
    "derive",
    [
        lambda tensor: tensor,
        lambda tensor: tensor[5:9].view(2, 2),
        lambda tensor: tensor.view(torch.int64)[1:],
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: tensor.numpy() if tensor.is_cpu else tensor.detach(),
    ],
    ids=["itself", "view", "words", "storage", "array"],
)
@pytest.mark.parametrize("side", ["owned", "mapped", "host"])
def test_close_refuses_while_something_refers_to_the_memory(
    transport: Transport, peer: Peer, side: str, derive: Callable[[torch.Tensor], object]
) -> None:
    slab: MappedSlab
    if side == "owned":
        slab = transport.create(NBYTES)
    elif side == "host":
        slab = transport.create_host(NBYTES)
    else:
        peer.call("create", name="viewed", nbytes=NBYTES)
        slab = transport.open(peer.export("viewed"), NBYTES)
    view = derive(slab.tensor)
    with pytest.raises(BufferError):
        slab.close()
    fill(transport, slab.tensor, 9)
    assert holds(slab.tensor, 9)
    del view
    slab.close()
    slab.close()
    assert "closed" in repr(slab)
    with pytest.raises(ValueError, match="closed"):
        _ = slab.tensor
    if side == "mapped":
        peer.call("close", name="viewed")


def test_a_closed_slab_is_not_lent(transport: Transport) -> None:
    slab = transport.create(NBYTES)
    slab.close()
    with pytest.raises(TransportError):
        slab.export()


def test_a_handle_of_another_size_is_refused_and_consumed(transport: Transport, peer: Peer) -> None:
    peer.call("create", name="sized", nbytes=NBYTES)
    for announced in (NBYTES // 2, 2 * NBYTES):
        handle = peer.export("sized")
        with pytest.raises(TransportError):
            transport.open(handle, announced)
        assert handle.fd is None
    peer.call("close", name="sized")


def test_foreign_descriptors_are_refused_and_closed(transport: Transport, peer: Peer) -> None:
    peer.call("create", name="genuine", nbytes=NBYTES)
    with peer.export("genuine") as genuine:
        payload = genuine.payload
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as file:
        file.truncate(NBYTES)
        for impostor in (file.fileno(), ours.fileno()):
            if transport.kind is TransportKind.CUDA_IPC:
                # The descriptor is only a tether there; the payload says all.
                handle = Handle(payload=bytes(len(payload)), fd=os.dup(impostor))
            else:
                handle = Handle(payload=payload, fd=os.dup(impostor))
            with pytest.raises(TransportError):
                transport.open(handle, NBYTES)
            assert handle.fd is None
    with pytest.raises(TransportError):
        transport.open(Handle(payload=payload, fd=None), NBYTES)
    peer.call("close", name="genuine")


@pytest.mark.parametrize("nbytes", [0, -NBYTES, 4095, NBYTES + 1])
def test_sizes_that_cannot_be_mapped_are_refused(transport: Transport, nbytes: int) -> None:
    with pytest.raises(TransportError) as refusal:
        transport.create(nbytes)
    assert "multiple" in refusal.value.remedy


def test_descriptors_are_not_inherited(transport: Transport, peer: Peer) -> None:
    peer.call("create", name="private", nbytes=NBYTES)
    slab = transport.create(NBYTES)
    mapped = transport.open(peer.export("private"), NBYTES)
    with slab.export() as handle:
        if handle.fd is not None:
            assert not os.get_inheritable(handle.fd)
        listing = subprocess.run(
            ["ls", "-l", "/proc/self/fd"], close_fds=False, check=True, capture_output=True
        ).stdout.decode()
    assert "memfd" not in listing
    mapped.close()
    slab.close()
    peer.call("close", name="private")


def test_lending_back_and_forth_leaks_no_descriptor_on_either_side(
    transport: Transport, peer: Peer
) -> None:
    def round_trip() -> None:
        slab = transport.create(NBYTES)
        peer.open("there", slab.export(), NBYTES)
        peer.call("close", name="there")
        slab.close()
        peer.call("create", name="here", nbytes=NBYTES)
        transport.open(peer.export("here"), NBYTES).close()
        peer.call("close", name="here")

    round_trip()
    before = open_descriptors(), peer.call("open_fds").value
    for _ in range(10):
        round_trip()
    assert (open_descriptors(), peer.call("open_fds").value) == before


def test_host_memory_is_ready_and_goes_back(transport: Transport) -> None:
    host = transport.create_host(NBYTES)
    assert host.tensor.device.type == "cpu"
    assert host.tensor.shape == (NBYTES,)
    if transport.device.type == "cuda":
        assert host.tensor.is_pinned()
    fill(transport, host.tensor, 10)
    assert holds(host.tensor, 10)
    host.close()
    host.close()


def test_probe_measures_both_directions_and_keeps_the_bytes(
    transport: Transport, peer: Peer
) -> None:
    peer.call("create", name="probed", nbytes=NBYTES)
    peer.call("fill", name="probed", seed=11)
    mapped = transport.open(peer.export("probed"), NBYTES)
    link = probe.measure(transport, mapped)
    assert link.transport is transport.kind
    assert link.read_bytes_per_s > 0
    assert link.write_bytes_per_s > 0
    assert transport.kind.value in str(link)
    assert peer.call("matches", name="probed", seed=11).value
    mapped.close()
    peer.call("close", name="probed")


ROWS = st.integers(1, 24)
SHAPES = st.sampled_from([(), (1,), (7,), (64,), (3, 5), (2, 1, 32)])
DTYPES = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex64])


@st.composite
def tables_and_rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A table, dense or strided, and distinct rows of it, alone or in runs."""
    rows, shape, dtype = draw(ROWS), draw(SHAPES), draw(DTYPES)
    stride = draw(st.integers(1, 3))
    table = torch.randn(rows * stride, *shape).to(dtype)[::stride]
    if len(shape) > 1 and draw(st.booleans()):
        table = table.transpose(1, 2)
    index = draw(st.lists(st.integers(0, rows - 1), unique=True, max_size=rows))
    if draw(st.booleans()):
        index.sort()
    return table, torch.tensor(index, dtype=torch.int64)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(drawn=tables_and_rows())
def test_gather_and_scatter_do_what_torch_indexing_does(
    transport: Transport, drawn: tuple[torch.Tensor, torch.Tensor]
) -> None:
    table, index = drawn
    table = like_on(transport.device, table)
    copier = transport.copier()
    packed = torch.empty(len(index), *table.shape[1:], dtype=table.dtype, device=table.device)
    copier.gather(packed, table, index)
    copier.fence()
    assert torch.equal(packed.cpu(), table.cpu()[index])

    target = like_on(transport.device, torch.zeros_like(table))
    copier.scatter(target, packed, index)
    copier.fence()
    expected = torch.zeros_like(table).cpu()
    expected[index] = packed.cpu()
    assert torch.equal(target.cpu(), expected)


def like_on(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """The same values and strides on `device`."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return copy.copy_(tensor)


@pytest.mark.parametrize("rows", [[-1], [0, 8], [3, -9]])
def test_rows_out_of_range_are_refused_before_anything_moves(
    transport: Transport, rows: list[int]
) -> None:
    copier = transport.copier()
    table = torch.zeros(8, 64, dtype=torch.uint8, device=transport.device)
    packed = torch.ones(len(rows), 64, dtype=torch.uint8, device=transport.device)
    with pytest.raises(IndexError):
        copier.scatter(table, packed, torch.tensor(rows))
    with pytest.raises(IndexError):
        copier.gather(packed, table, torch.tensor(rows))
    copier.fence()
    assert not table.any()
    assert packed.all()


def test_rows_travel_between_a_slab_and_host_memory(transport: Transport) -> None:
    slab, host = transport.create(NBYTES), transport.create_host(NBYTES)
    copier = transport.copier()
    fill(transport, slab.tensor, 12)
    pages = slab.tensor.view(-1, 64 * 1024)
    landed = host.tensor.view(-1, 64 * 1024)
    index = torch.randperm(len(pages), generator=torch.Generator().manual_seed(0))
    copier.gather(landed, pages, index)
    copier.fence()
    assert torch.equal(landed, pages.cpu()[index])
    pages.zero_()
    copier.scatter(pages, landed, index)
    copier.fence()
    assert holds(slab.tensor, 12)
    del pages, landed
    host.close()
    slab.close()


def test_ranges_of_bytes_travel_between_a_slab_and_a_tensor_of_any_dtype(
    transport: Transport,
) -> None:
    slab, copier = transport.create(NBYTES), transport.copier()
    try:
        src = torch.arange(1000, dtype=torch.int32, device=transport.device)
        copier.copy_bytes(slab.tensor, 4096, src, 8, 2000)
        copier.fence()
        landed = torch.zeros(2001, dtype=torch.uint8, device=transport.device)
        copier.copy_bytes(landed, 1, slab.tensor, 4096, 2000)
        copier.fence()
        assert torch.equal(landed[1:], src.view(torch.uint8)[8:2008])
        assert not slab.tensor[:4096].any()
        assert not slab.tensor[6096:].any()
    finally:
        slab.close()
