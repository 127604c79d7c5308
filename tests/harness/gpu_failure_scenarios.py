"""What goes wrong beside an engine on a GPU, and what it must not take with it.

Scenarios like those of `gpu_scenarios`: of calls that fail half-way, threads that end, memory and
machines that are not what the product would like them to be.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import re
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from threading import get_ident
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import numpy as np
import torch

from aqua_protocol import AquaError, ConfigError, TransportError
from aqua_protocol.ids import LeaseId
from aqualib import blocks, doctor, gpu_modes, probe, topology
from aqualib.engines.vllm.lending.cuda_memory import CudaKvMemory
from aqualib.memory.frame_store import FrameStore
from aqualib.memory.migrator import SlabCopier
from aqualib.producer.escalation import Escalation, KillRefusedError, kill_process
from aqualib.ranges import Range
from aqualib.settings import Settings
from aqualib.topology import Gpu, Topology
from aqualib.transports import cuda_buffers, gpu_thresholds
from aqualib.transports.cuda_copier import CudaCopier
from aqualib.transports.gpu_thresholds import CopyThresholds
from aqualib.transports.host_pages import HUGE_PAGE_BYTES
from harness.bounds import until
from harness.consumers import consuming
from harness.cuda.results import NAME
from harness.cuda.stand_in import stand_in
from harness.gpu_scenarios import BLOCK_BYTES, GPU, SLAB, borrowing, granting
from harness.producers import lending
from harness.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqualib.transports.base import MappedSlab

KEPT: Final = np.array([False, True, False, True])
"""Granules of four that leave and come back: two runs."""

FABRIC: Final = "0f3ea26b-9d2c-4f3c-8d3c-5b1c2a7e9f10.1"
"""What a fabric manager calls a clique on all hosts that it joins."""


# --- Calls that fail ----------------------------------------------------------------------------


def a_path_cannot_be_measured(seed: int) -> None:
    """Torch fails in the probe of a lease: all of its slabs are on their way back."""
    with stand_in(seed=seed) as standing, granting(standing) as (aqua, _, granted):
        failure = RuntimeError("CUDA error: out of memory")
        with mock.patch.object(probe, "measure", side_effect=failure):
            try:
                aqua.attach(granted)
            except RuntimeError as error:
                raise AssertionError("the leasing thread ends of it") from error
            except TransportError:
                pass
        kept = sum(attachment.kept_bytes for attachment in aqua.attachments)
        assert not kept, f"{kept} bytes stay mapped, and no frame may use them"


def a_cache_is_given_up_by_halves(seed: int) -> None:
    """The second run of granules cannot be unmapped; the books say so, and all comes back."""
    with stand_in(seed=seed) as standing:
        memory = CudaKvMemory(GPU)
        tensor = memory.allocate(4 * SLAB)
        standing.machine.refusing["cuMemUnmap"] = 2
        with contextlib.suppress(TransportError):
            memory.release(KEPT)
        left = memory.absent.copy()
        assert left.tolist() == [False, True, False, False], f"{left} is said to have left"
        memory.restore(left)
        tensor.fill_(3)
        assert (tensor.cpu() == 3).all()
        memory.close()


def a_cache_is_taken_back_by_halves(seed: int) -> None:
    """The second run of granules is not had; nothing has changed, and the next try works."""
    for name in ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemsetD8Async"):
        with stand_in(seed=seed) as standing:
            memory = CudaKvMemory(GPU)
            tensor = memory.allocate(4 * SLAB)
            memory.release(KEPT)
            before = standing.machine.used[0]
            standing.machine.refusing[name] = 2
            with contextlib.suppress(TransportError):
                memory.restore(KEPT)
            assert (memory.absent == KEPT).all()
            assert standing.machine.used[0] == before, "memory stays behind that no block uses"
            assert not tensor[SLAB : 2 * SLAB].any(), "zeros are not shown again"
            memory.restore(KEPT)
            tensor.fill_(3)
            assert (tensor.cpu() == 3).all()
            memory.close()


def a_cache_is_made_by_halves(seed: int) -> None:
    """Its granule of zeros cannot be made; the next try is a cache of its own addresses."""
    with stand_in(seed=seed) as standing:
        memory = CudaKvMemory(GPU)
        before = standing.counts()
        standing.machine.refusing["cuMemCreate"] = 1
        with contextlib.suppress(TransportError):
            memory.allocate(2 * SLAB)
        assert standing.counts() == before, "addresses stay behind that no cache has"
        tensor = memory.allocate(2 * SLAB)
        tensor.fill_(3)
        memory.release(np.array([True, False]))
        assert (tensor[SLAB:].cpu() == 3).all()
        memory.close()


def buffers_are_made_by_halves(seed: int) -> None:
    """Any one call fails when a GPU's buffers are made: nothing stays, and the next try works."""
    makers = ("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemHostRegister_v2", "cuEventCreate")
    with stand_in(seed=seed) as standing:
        staging = standing.driver.device(0).staging
        standing.machine.calls.clear()
        staging.prepare(GPU)
        calls = standing.machine.calls
    for name in makers:
        for number in range(1, calls[name] // cuda_buffers.BUFFERS + 1):  # Of the first of them.
            with stand_in(seed=seed) as standing:
                staging = standing.driver.device(0).staging
                before, machine = standing.counts(), standing.machine
                machine.refusing[name] = number
                said = ""
                try:
                    staging.prepare(GPU)
                except TransportError as error:
                    said = error.remedy
                assert ("ulimit" in said) == (name == "cuMemHostRegister_v2"), said
                gc.collect()
                assert standing.counts() == before, f"{name} failed, and not all was given back"
                staging.prepare(GPU)


def a_slab_is_copied_by_halves(seed: int) -> None:
    """The second piece is refused; the first has ended when all is tried again, or unmapped."""
    copy, copied = CudaCopier.copy, itertools.count()
    with stand_in(seed=seed) as standing:
        transport = standing.transport()
        slab, host = transport.create(SLAB), transport.create_host(SLAB)

        def copy_once(self: CudaCopier, dst: torch.Tensor, src: torch.Tensor) -> None:
            if next(copied):
                raise RuntimeError("CUDA error: out of memory")
            copy(self, dst, src)

        copies = SlabCopier(transport)
        pieces = [Range(0, BLOCK_BYTES), Range(SLAB - BLOCK_BYTES, BLOCK_BYTES)]
        with mock.patch.object(CudaCopier, "copy", copy_once):
            assert copies.copy(host, slab, pieces)
        assert not copies.copy(host, slab, pieces)
        slab.close()
        host.close()


def a_holder_cannot_be_killed(seed: int) -> None:
    """A consumer in another PID namespace overran its deadline; the kernel says EINVAL."""
    del seed
    refusal = OSError(errno.EINVAL, "Invalid argument")
    with mock.patch.object(signal, "pidfd_send_signal", side_effect=refusal):
        try:
            kill_process(3, pid=0, lease_id=LeaseId("lease"))
        except KillRefusedError:
            return
        except OSError as error:
            raise AssertionError("the server's thread ends of it") from error


# --- Threads and views ----------------------------------------------------------------------------


def a_thread_ends_with_a_copy_under_way(seed: int) -> None:
    """Nobody waits for what it started; a reclaim gets the slab nevertheless."""
    with stand_in(seed=seed) as standing, borrowing(standing) as (aqua, producer):
        store = aqua.block_store(BLOCK_BYTES, 4)
        until(lambda: store.location().value == "peer", "promoted")
        source = torch.full((1, BLOCK_BYTES), 7, dtype=torch.uint8, device=GPU)
        in_thread(lambda: store.page_out(source))
        producer.reclaim(2 * SLAB)
        until(lambda: not aqua.attachments, "given back")
        store.close()


def a_view_outlives_its_block(seed: int) -> None:
    """One slab cannot be unmapped; the other one of the reclaim goes home."""
    with stand_in(seed=seed) as standing, borrowing(standing) as (aqua, producer):
        slabs = aqua.attachments[0].slabs
        view = slabs[seed % 2].memory.tensor[:10]
        try:
            producer.reclaim(2 * SLAB)
            until(lambda: producer.leased_bytes == SLAB, "one is home")
        finally:
            del view, slabs
        until(lambda: not aqua.attachments, "given back")


def blocks_are_summed_without_room(seed: int) -> None:
    """The checksum of a block fails; its slots are another's at once, and no copy goes to them."""
    with (
        stand_in(seed=seed) as standing,
        consuming(8, SLAB, transport=standing.transport(), is_checking=True) as aqua,
        aqua.block_store(BLOCK_BYTES, 1) as store,
    ):
        source = torch.full((1, BLOCK_BYTES), 7, dtype=torch.uint8, device=GPU)
        torch.cuda.synchronize()
        with (
            mock.patch.object(blocks, "row_checksums", side_effect=MemoryError),
            contextlib.suppress(MemoryError),
        ):
            store.page_out(source)

        def page_out() -> None:
            store.page_out(source).transfer.wait()

        in_thread(page_out)
        store.free(torch.tensor([0]))


def room_is_counted_when_it_is_there(seed: int) -> None:
    """One thread frees a block while another pages out: there is no room yet, and nothing lost."""
    give_back = FrameStore.give_back
    with (
        stand_in(seed=seed) as standing,
        consuming(8, SLAB, transport=standing.transport()) as aqua,
        aqua.block_store(SLAB, 1) as store,
    ):
        source = torch.full((1, SLAB), 7, dtype=torch.uint8, device=GPU)
        store.page_out(source)[1].wait()

        def beside(self: FrameStore, runs: Any) -> None:  # noqa: ANN401 - as the method's
            said = ""
            try:
                in_thread(partial(store.page_out, source))
            except AquaError as error:
                said = error.code
            assert said == "capacity_exhausted", f"{said}, of a store that has only been full"
            give_back(self, runs)

        with mock.patch.object(FrameStore, "give_back", beside):
            store.free(torch.tensor([0]))


# --- Machines -------------------------------------------------------------------------------------


def copies_have_the_priority_of_who_waits(seed: int) -> None:
    """An engine's copies go before its kernels, those in the background after."""
    with stand_in(seed=seed) as standing:
        made, _ = {}, standing.driver.device(0)
        for is_background in (False, True):
            before = set(standing.machine.streams)
            copier = standing.transport().copier(is_background=is_background)
            (handle,) = set(standing.machine.streams) - before
            made[is_background] = standing.machine.streams[handle]
            copier.fence()
        assert made[False].priority < made[True].priority, "lower goes first"
        assert not any(stream.is_blocking for stream in made.values())


def rows_go_as_was_measured(seed: int) -> None:
    """On a GPU whose copy engines are good at rows of this length, they are copied as they lie."""
    found = {NAME: CopyThresholds(device_run_bytes=512, host_run_bytes=512)}
    with (
        mock.patch.object(gpu_thresholds, "read_thresholds", return_value=found),
        stand_in(seed=seed) as standing,
    ):
        copier = standing.transport().copier()
        table = torch.zeros((64, 512), dtype=torch.uint8, device=GPU)
        packed = torch.empty((32, 512), dtype=torch.uint8, device=GPU)
        copier.gather(packed, table, torch.arange(0, 64, 2))
        copier.fence()
        assert standing.machine.calls["cuMemcpyBatchAsync"] == 1


def _policy_of(slab: MappedSlab) -> str:
    """What the kernel says about where pages of a slab come from."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    address = slab.tensor.data_ptr()
    found = [line for line in lines if int(line.split()[0], 16) <= address]
    return max(found, key=lambda line: int(line.split()[0], 16)).split()[1]


def host_memory_is_near_the_gpu(seed: int) -> None:
    """What a GPU copies to is on its own socket."""
    with stand_in(seed=seed) as standing:
        standing.machine.host_node = 0
        slab = standing.transport().create_host(HUGE_PAGE_BYTES)
        policy = _policy_of(slab)
        slab.close()
        assert re.fullmatch(r"prefer.*:0", policy), f"pages come from {policy}"


def _flags_of(slab: MappedSlab) -> list[str]:
    """What the kernel was told of the mapping that a slab is in."""
    address, is_here = slab.tensor.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_here = int(found[1], 16) <= address < int(found[2], 16)
        elif is_here and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping has {address:#x}")


def host_memory_comes_in_huge_pages(seed: int) -> None:
    """What a GPU copies to is faulted in and pinned by as few pages as the kernel can."""
    with stand_in(seed=seed) as standing:
        slab = standing.transport().create_host(HUGE_PAGE_BYTES)
        address, flags = slab.tensor.data_ptr(), _flags_of(slab)
        slab.close()
        assert "hg" in flags, f"huge pages are not asked for: {flags}"
        assert address % HUGE_PAGE_BYTES == 0, "no huge page fits"


def host_memory_is_pinned_by_several(seed: int) -> None:
    """The landing place of many slabs is faulted in and registered by several threads."""
    with stand_in(seed=seed) as standing:
        transport, threads = standing.transport(), set()
        make = transport.create_host

        def noted(nbytes: int) -> MappedSlab:
            threads.add(get_ident())
            return make(nbytes)

        with (
            consuming(4, SLAB, transport=transport) as aqua,
            mock.patch.object(transport, "create_host", noted),
        ):
            aqua.block_store(SLAB, 4).close()
        assert get_ident() not in threads, "slab after slab, on the thread that asked"


@contextlib.contextmanager
def _nvml(*, is_cut: bool) -> Iterator[None]:
    """A management library that lists one GPU."""
    fake = SimpleNamespace(
        NVMLError=type("NVMLError", (Exception,), {}),
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580",
        nvmlDeviceGetCount=lambda: 1,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetUUID=lambda _: "GPU-cut",
        nvmlDeviceGetMigMode=lambda _: (int(is_cut), 0),
    )
    with (
        mock.patch.dict(sys.modules, pynvml=fake),
        mock.patch.object(doctor, "find_spec", return_value=None),
        mock.patch.dict("os.environ", {topology.TOPOLOGY_FILE_VARIABLE: "/none"}),
    ):
        yield


def a_gpu_is_cut_into_slices(seed: int) -> None:
    """A doctor says so, and a process on a slice is alone in its domain."""
    with _nvml(is_cut=True):
        assert "MIG" in {finding.check for finding in doctor.probe_machine()}
    with stand_in(seed=seed) as standing:
        whole = Gpu(uuid="GPU-whole", model="H100", memory_bytes=1 << 30)
        here = Topology(node="node", boot_id="boot", gpus=[whole])
        with mock.patch.object(topology, "discover", return_value=here):
            try:
                found = topology.place(GPU)
            except ConfigError as error:
                raise AssertionError("a slice has no name") from error
        assert found.domain == f"boot.GPU-{standing.machine.uuid_of(0)}"


def clients_of_mps_are_not_killed(seed: int) -> None:
    """Where a kill may end the work of others, a producer that would kill does not open."""
    with tempfile.TemporaryDirectory() as directory, stand_in(seed=seed) as standing:
        (Path(directory) / "control").touch()
        options = {"transport": standing.transport(), "slab_bytes": SLAB}
        with (
            mock.patch.dict("os.environ", {gpu_modes.MPS_DIRECTORY_VARIABLE: directory}),
            contextlib.ExitStack() as opened,
        ):
            try:
                opened.enter_context(lending(None, 1, policy=Escalation.KILL, **options))
            except ConfigError:
                return
        raise AssertionError("it kills among the clients of one context")


def a_fabric_spans_hosts(seed: int) -> None:
    """Its name is no domain: lease channels do not leave a host."""
    del seed
    settings = Settings(node="node", domain=FABRIC, gpu_uuid="GPU-1")
    try:
        topology.find_identity(settings, torch.device("cpu"))
    except ConfigError:
        return
    raise AssertionError("slabs of another host are granted, and never mapped")


FAILURE_SCENARIOS: Final = (
    a_path_cannot_be_measured,
    a_cache_is_given_up_by_halves,
    a_cache_is_taken_back_by_halves,
    a_cache_is_made_by_halves,
    buffers_are_made_by_halves,
    a_slab_is_copied_by_halves,
    a_holder_cannot_be_killed,
    a_thread_ends_with_a_copy_under_way,
    a_view_outlives_its_block,
    blocks_are_summed_without_room,
    room_is_counted_when_it_is_there,
    copies_have_the_priority_of_who_waits,
    rows_go_as_was_measured,
    host_memory_is_near_the_gpu,
    host_memory_comes_in_huge_pages,
    host_memory_is_pinned_by_several,
    a_gpu_is_cut_into_slices,
    clients_of_mps_are_not_killed,
    a_fabric_spans_hosts,
)
