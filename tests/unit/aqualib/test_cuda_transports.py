"""What the CUDA transports refuse, over the stand-in; the contract suite has what they do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aqua_protocol import MIB, TransportError, TransportKind, TransportUnavailableError
from aqualib.transports import Handle, Transport, cuda_ipc
from aqualib.transports.cuda_driver import CudaDriver
from aqualib.transports.cuda_vmm import PAYLOAD
from aqualib.transports.host import CPU
from harness import fake_cuda

GRANULE = 2 * MIB


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_cuda.build(tmp_path_factory.mktemp("fake"))


@pytest.fixture(params=[TransportKind.CUDA_VMM, TransportKind.CUDA_IPC])
def transport(request: pytest.FixtureRequest, library: Path) -> Transport:
    return fake_cuda.transport(request.param, library)


def test_check_lends_to_itself_and_leaves_nothing(transport: Transport, library: Path) -> None:
    before = fake_cuda.counts(library)
    transport.check()
    assert fake_cuda.counts(library) == before


def test_a_gpu_without_descriptor_export_points_to_the_fallback(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_POSIX", "0")
    with pytest.raises(TransportUnavailableError, match="cannot export") as refusal:
        fake_cuda.transport(TransportKind.CUDA_VMM, library).check()
    assert "cuda_ipc" in refusal.value.remedy


def test_a_sandbox_that_filters_the_driver_is_found_out_by_trying(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_MEMORY", "0")
    with pytest.raises(TransportUnavailableError, match="OUT_OF_MEMORY") as refusal:
        fake_cuda.transport(TransportKind.CUDA_VMM, library).check()
    assert refusal.value.details["call"] == "cuMemCreate"


def test_out_of_memory_is_a_typed_error_and_leaves_nothing(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = fake_cuda.transport(TransportKind.CUDA_VMM, library)
    before = fake_cuda.counts(library)
    monkeypatch.setenv("FAKE_CUDA_MEMORY", str(GRANULE))
    with pytest.raises(TransportError, match="OUT_OF_MEMORY"):
        transport.create(2 * GRANULE)
    assert fake_cuda.counts(library) == before


def test_memory_of_a_gpu_out_of_reach_is_refused_by_name(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "2")
    monkeypatch.setenv("FAKE_CUDA_PEERS", "0")
    driver = CudaDriver(str(library))
    near, gpu = fake_cuda.FakeVmmTransport(CPU, driver), driver.device(1)
    memory = gpu.allocate(GRANULE)
    before = fake_cuda.counts(library)
    handle = Handle(PAYLOAD.pack(GRANULE, gpu.uuid.encode()), gpu.export_fd(memory))
    with pytest.raises(TransportError, match="cannot reach") as refusal:
        near.open(handle, GRANULE)
    assert gpu.uuid in refusal.value.message
    assert "NVLink" in refusal.value.remedy
    assert fake_cuda.counts(library) == before

    monkeypatch.setenv("FAKE_CUDA_PEERS", "1")
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


def test_legacy_ipc_cannot_open_its_own_handle_and_says_so(library: Path) -> None:
    transport = fake_cuda.transport(TransportKind.CUDA_IPC, library)
    slab = transport.create(GRANULE)
    with pytest.raises(TransportError, match="in the process that made it"):
        transport.open(slab.export(), GRANULE)
    slab.close()


def test_legacy_ipc_refuses_slabs_that_would_share_a_block(library: Path) -> None:
    transport = fake_cuda.transport(TransportKind.CUDA_IPC, library)
    with pytest.raises(TransportError) as refusal:
        transport.create(MIB)
    assert "2 MiB" in refusal.value.remedy


def test_legacy_ipc_without_cupy_says_which_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(TransportUnavailableError, match="CuPy") as refusal:
        cuda_ipc.CupyRuntime(0)
    assert "cupy-cuda13x" in refusal.value.remedy


def test_errors_of_cuda_ipc_explain_their_usual_cause(library: Path) -> None:
    transport = fake_cuda.transport(TransportKind.CUDA_IPC, library)
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


def test_payloads_fit_the_wire(transport: Transport) -> None:
    assert PAYLOAD.size <= 256
    assert cuda_ipc.PAYLOAD.size <= 256
    slab = transport.create(GRANULE)
    with slab.export() as handle:
        assert len(handle.payload) <= 256
        assert handle.fd is not None
    slab.close()
