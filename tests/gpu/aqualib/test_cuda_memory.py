"""Device memory as the driver sees it: who holds it, when it comes back, how clean it is."""

from __future__ import annotations

import pytest
import torch

from aqua_protocol import MIB, TransportError, TransportKind, TransportUnavailableError
from aqualib import topology
from aqualib.transports import Transport, select
from aqualib.transports.cuda_driver import load_driver
from aqualib.transports.cuda_vmm import CudaVmmTransport
from aqualib.transports.release_pipe import DEFERRED_FREE
from harness.bounds import until
from harness.threads import in_thread
from harness.transport_peer import Peer, pattern

NBYTES = 64 * MIB


def test_memory_that_was_used_before_comes_back_clean(transport: Transport) -> None:
    for _ in range(3):
        slab = transport.create(NBYTES)
        assert not slab.tensor.any()
        slab.tensor.fill_(255)
        torch.cuda.synchronize()
        slab.close()


def test_kernels_of_both_processes_work_on_one_slab(transport: Transport) -> None:
    with Peer(transport.kind) as exporter:
        exporter.call("create", name="lent", nbytes=NBYTES)
        exporter.call("fill", name="lent", seed=1)
        mapped = transport.open(exporter.export("lent"), NBYTES)
        words = mapped.tensor.view(torch.int32)
        words.bitwise_xor_(-1)
        torch.cuda.synchronize()
        assert not exporter.call("matches", name="lent", seed=1).value
        words.bitwise_xor_(-1)
        torch.cuda.synchronize()
        assert exporter.call("matches", name="lent", seed=1).value
        del words
        mapped.close()


def test_a_thread_that_never_used_cuda_may_create_copy_and_close(transport: Transport) -> None:
    def work() -> None:
        slab = transport.create(NBYTES)
        copier = transport.copier()
        copier.copy(slab.tensor, pattern(2, NBYTES).to(transport.device))
        copier.fence()
        assert torch.equal(slab.tensor.cpu(), pattern(2, NBYTES))
        slab.close()

    in_thread(work)


def test_a_deferred_free_happens_when_the_importer_dies() -> None:
    try:
        transport = select(TransportKind.CUDA_IPC)
    except TransportUnavailableError as refusal:
        pytest.skip(str(refusal))
    with Peer(TransportKind.CUDA_IPC) as importer:
        slab = transport.create(NBYTES)
        importer.open("held", slab.export(), NBYTES)
        slab.close()
        assert DEFERRED_FREE.waiting_count == 1
        importer.kill()
        until(lambda: DEFERRED_FREE.waiting_count == 0, "all is freed")


def test_more_memory_than_the_gpu_has_is_a_typed_error_and_costs_nothing(
    transport: Transport,
) -> None:
    before, total = torch.cuda.mem_get_info()
    too_much = (total // NBYTES + 1) * NBYTES
    with pytest.raises(TransportError):
        transport.create(too_much)
    until(lambda: torch.cuda.mem_get_info()[0] >= before - NBYTES, "its memory is back")


def test_the_driver_and_torch_and_nvml_name_the_gpu_alike() -> None:
    here = topology.place(torch.device("cuda", 0))
    assert here.gpu_uuid == load_driver().device(0).uuid
    named_by_torch = str(torch.cuda.get_device_properties(0).uuid)
    assert here.gpu_uuid.removeprefix("GPU-") == named_by_torch.removeprefix("GPU-")


def test_two_gpus_share_a_slab() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    if not load_driver().device(0).can_access(1):
        pytest.skip("the GPUs do not reach each other")
    owner = CudaVmmTransport(torch.device("cuda", 0))
    borrower = CudaVmmTransport(torch.device("cuda", 1))
    slab = owner.create(NBYTES)
    mapped = borrower.open(slab.export(), NBYTES)
    assert mapped.tensor.device == torch.device("cuda", 1)
    copier = borrower.copier()
    copier.copy(mapped.tensor, pattern(3, NBYTES).to("cuda:1"))
    copier.fence()
    assert torch.equal(slab.tensor.cpu(), pattern(3, NBYTES))
    mapped.close()
    slab.close()
