"""What the CUDA transports refuse, over the stand-in; the contract suite has what they do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from unittest import mock

import pytest

from aqua_protocol import MIB, TransportError, TransportKind, TransportUnavailableError
from aqualib.transports import Handle, Transport, cuda_ipc
from aqualib.transports.cuda_vmm import PAYLOAD
from harness.cuda.ipc import CupyOver
from harness.cuda.stand_in import StandIn, stand_in
from harness.transport_peer import Peer, open_descriptors

GRANULE = 2 * MIB


@pytest.fixture
def standing() -> Iterator[StandIn]:
    with stand_in(gpu_count=2) as standing:
        yield standing


@pytest.fixture(params=[TransportKind.CUDA_VMM, TransportKind.CUDA_IPC])
def transport(request: pytest.FixtureRequest, standing: StandIn) -> Transport:
    return standing.transport(request.param)


def test_check_lends_to_itself_and_leaves_nothing(transport: Transport, standing: StandIn) -> None:
    before = standing.counts()
    transport.check()
    assert standing.counts() == before


def test_a_gpu_without_descriptor_export_points_to_the_fallback(
    standing: StandIn,
) -> None:
    standing.machine.exports_descriptors = False
    with pytest.raises(TransportUnavailableError, match="cannot export") as refusal:
        standing.transport().check()
    assert "cuda_ipc" in refusal.value.remedy


def test_a_sandbox_that_filters_the_driver_is_found_out_by_trying(
    standing: StandIn,
) -> None:
    standing.machine.memory_bytes = 0
    with pytest.raises(TransportUnavailableError, match="OUT_OF_MEMORY") as refusal:
        standing.transport().check()
    assert refusal.value.details["call"] == "cuMemCreate"


def test_out_of_memory_is_a_typed_error_and_leaves_nothing(
    standing: StandIn,
) -> None:
    transport = standing.transport()
    before = standing.counts()
    standing.machine.memory_bytes = GRANULE
    with pytest.raises(TransportError, match="OUT_OF_MEMORY"):
        transport.create(2 * GRANULE)
    assert standing.counts() == before


def test_memory_of_a_gpu_out_of_reach_is_refused_by_name(
    standing: StandIn,
) -> None:
    standing.machine.has_peers = False
    near, gpu = standing.transport(), standing.driver.device(1)
    memory = gpu.allocate(GRANULE)
    before = standing.counts()
    handle = Handle(PAYLOAD.pack(GRANULE, gpu.uuid.encode()), gpu.export_fd(memory))
    with pytest.raises(TransportError, match="cannot reach") as refusal:
        near.open(handle, GRANULE)
    assert gpu.uuid in refusal.value.message
    assert "NVLink" in refusal.value.remedy
    assert standing.counts() == before

    standing.machine.has_peers = True
    handle = Handle(PAYLOAD.pack(GRANULE, gpu.uuid.encode()), gpu.export_fd(memory))
    near.open(handle, GRANULE).close()
    gpu.release(memory)


@pytest.mark.parametrize("payload", [b"", b"x", bytes(500)])
def test_payloads_that_are_not_the_transports_own_are_refused(
    transport: Transport, payload: bytes
) -> None:
    slab = transport.create(GRANULE)
    handle = slab.export()
    handle.payload = payload
    with pytest.raises(TransportError):
        transport.open(handle, GRANULE)
    assert handle.fd is None
    slab.close()


def test_legacy_ipc_cannot_open_its_own_handle_and_says_so(standing: StandIn) -> None:
    transport = standing.transport(TransportKind.CUDA_IPC)
    slab = transport.create(GRANULE)
    with pytest.raises(TransportError, match="in the process that made it"):
        transport.open(slab.export(), GRANULE)
    slab.close()


def test_legacy_ipc_refuses_slabs_that_would_share_a_block(standing: StandIn) -> None:
    transport = standing.transport(TransportKind.CUDA_IPC)
    with pytest.raises(TransportError) as refusal:
        transport.create(MIB)
    assert "2 MiB" in refusal.value.remedy


def test_legacy_ipc_without_cupy_says_which_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TransportUnavailableError, match="CuPy") as refusal:
        cuda_ipc.CupyRuntime(0)
    assert "cupy-cuda13x" in refusal.value.remedy


def test_errors_of_cuda_ipc_explain_their_usual_cause(standing: StandIn) -> None:
    transport = standing.transport(TransportKind.CUDA_IPC)
    slab = transport.create(GRANULE)
    handle = slab.export()
    size, _, name = cuda_ipc.PAYLOAD.unpack(handle.payload)
    # As if another process had it, which has our pid in its own namespace.
    handle.payload = cuda_ipc.PAYLOAD.pack(size, bytes(16), name)
    with pytest.raises(TransportError, match="ipcOpenMemHandle failed") as failure:
        transport.open(handle, GRANULE)
    assert "pid namespaces" in failure.value.remedy
    assert failure.value.details["result_code"] == 201
    assert handle.fd is None
    slab.close()


def test_an_importer_says_that_it_has_let_go_when_it_has(standing: StandIn) -> None:
    transport = standing.transport(TransportKind.CUDA_IPC)
    close, pipes = CupyOver.ipcCloseMemHandle, list[int]()

    def noted(self: CupyOver, at: int) -> None:
        pipes.append(open_descriptors()["pipe"])
        close(self, at)

    with Peer(TransportKind.CUDA_IPC, stands_in=True) as lender:
        lender.call("create", name="lent", nbytes=GRANULE)
        slab = transport.open(lender.export("lent"), GRANULE)
        before = open_descriptors()["pipe"]
        with mock.patch.object(CupyOver, "ipcCloseMemHandle", noted):
            slab.close()
        assert pipes == [before], "the lender may free it now, and it is mapped"
        assert open_descriptors()["pipe"] == before - 1


def test_payloads_fit_the_wire(transport: Transport) -> None:
    assert PAYLOAD.size <= 256
    assert cuda_ipc.PAYLOAD.size <= 256
    slab = transport.create(GRANULE)
    with slab.export() as handle:
        assert len(handle.payload) <= 256
        assert handle.fd is not None
    slab.close()
