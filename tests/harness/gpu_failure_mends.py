"""What was mended of what goes wrong beside an engine on a GPU; `gpu_mends` has the whole list."""

from __future__ import annotations

import re
from typing import Final

from aqualib import gpu_modes, topology
from aqualib.blocks import BlockStore
from aqualib.engines.vllm.lending.cuda_memory import CudaKvMemory
from aqualib.leasing.client import LeaseClient
from aqualib.memory import migrator
from aqualib.memory.frame_store import FrameStore
from aqualib.memory.transfers import CopyStream, RenewableCopier
from aqualib.producer import producer
from aqualib.transports import cuda_driver
from aqualib.transports.cuda_buffers import StagingBuffer
from aqualib.transports.cuda_driver import CudaDevice
from aqualib.transports.cuda_stream import CudaStream
from aqualib.transports.gpu_thresholds import CopyThresholds
from aqualib.transports.host_pages import HostMapping
from harness import bounds
from harness import gpu_failure_scenarios as failures
from harness.mend import Mend, changed

NO_PATIENCE: Final = (bounds, "HANG_S", 1.0)
"""Seconds for what then never happens. Doubled, the walk over the list takes as much longer."""


FAILURE_MENDS: Final = (
    Mend(
        "slabs of a lease whose path cannot be measured stay where they are",
        failures.a_path_cannot_be_measured,
        (changed(LeaseClient, "take_up", "if attachment.is_ending or", "if"),),
        defect=3,
    ),
    Mend(
        "what torch raises in a probe ends the leasing thread",
        failures.a_path_cannot_be_measured,
        (changed(LeaseClient, "_measure", "(RuntimeError, MemoryError)", "MemoryError"),),
        defect=3,
    ),
    Mend(
        "a release that fails half-way counts as not done",
        failures.a_cache_is_given_up_by_halves,
        (changed(CudaKvMemory, "release", "self.absent[self._within(run)] = True", "pass"),),
        defect=5,
        is_met_by_walks=True,
    ),
    Mend(
        "a restore that fails half-way leaves memory behind",
        failures.a_cache_is_taken_back_by_halves,
        (
            changed(
                CudaKvMemory,
                "restore",
                "undo.callback(self._gpu.unmap_at, run.start, run.size)",
                "pass",
            ),
        ),
        defect=5,
    ),
    Mend(
        "granules that get no rights stay mapped",
        failures.a_cache_is_taken_back_by_halves,
        (
            changed(
                CudaDevice,
                "map_run",
                'undo.callback(self.driver.call, "cuMemUnmap", at, nbytes)',
                "pass",
            ),
        ),
        defect=5,
    ),
    Mend(
        "a cache that could not be made keeps its addresses",
        failures.a_cache_is_made_by_halves,
        (
            changed(
                CudaKvMemory,
                "allocate",
                "self._gpu.free_reserved(region.start, whole)",
                "self._regions.append(region)",
            ),
        ),
    ),
    Mend(
        "a staging buffer whose ring cannot be pinned stays mapped",
        failures.buffers_are_made_by_halves,
        (changed(StagingBuffer, "__init__", "gpu.unmap(address, nbytes)", "pass"),),
    ),
    Mend(
        "a copier that failed goes with copies under way",
        failures.a_slab_is_copied_by_halves,
        (changed(RenewableCopier, "attempt", "failed.fence()", "pass"),),
    ),
    Mend(
        "a holder that the kernel does not let us kill ends the server's thread",
        failures.a_holder_cannot_be_killed,
        (changed(failures, "kill_process", "except OSError", "except PermissionError"),),
        defect=6,
    ),
    Mend(
        "the pins of a thread that has ended stay for ever",
        failures.a_thread_ends_with_a_copy_under_way,
        ((CopyStream, "abandon", lambda _: None), NO_PATIENCE),
        defect=7,
    ),
    Mend(
        "a checksum that fails frees slots with the copy under way",
        failures.blocks_are_summed_without_room,
        (
            changed(
                BlockStore,
                "page_out",
                "        if self._sums is not None:\n",
                "        transfer = self._transfers.start("
                "Direction.OUT, count * self.block_bytes, copy)\n"
                "        if self._sums is not None:\n",
            ),
        ),
        defect=8,
    ),
    Mend(
        "a block counts as free before its room is",
        failures.room_is_counted_when_it_is_there,
        (
            changed(
                BlockStore,
                "free",
                "        self._taken[wanted] = False\n",
                "        self._taken[wanted] = False\n        self._used_count -= len(wanted)\n",
            ),
        ),
        defect=9,
    ),
    Mend(
        "a slab that is still looked at keeps all others from going home",
        failures.a_view_outlives_its_block,
        (
            changed(migrator, "_unmap", "    except BufferError:\n        return None\n", ""),
            NO_PATIENCE,
        ),
        defect=10,
    ),
    Mend(
        "the name of a fabric over hosts is taken for a domain",
        failures.a_fabric_spans_hosts,
        ((topology, "_FABRIC", re.compile("(?!)")),),
        defect=13,
    ),
    Mend(
        "a GPU that is cut into slices is not noticed",
        failures.a_gpu_is_cut_into_slices,
        ((gpu_modes, "_is_cut", lambda *_: False),),
        defect=14,
    ),
    Mend(
        "a slice is looked for among whole GPUs",
        failures.a_gpu_is_cut_into_slices,
        (
            changed(
                topology, "place", "if any(gpu.uuid == uuid for gpu in topology.gpus):", "if uuid:"
            ),
        ),
        defect=14,
    ),
    Mend(
        "clients of MPS may be killed",
        failures.clients_of_mps_are_not_killed,
        ((producer, "require_harmless", lambda *_: None),),
        defect=14,
    ),
    Mend(
        "all our streams have the same priority",
        failures.copies_have_the_priority_of_who_waits,
        (
            changed(
                CudaStream,
                "__init__",
                "least.value if is_background else greatest.value",
                "least.value",
            ),
        ),
        defect=18,
    ),
    Mend(
        "host memory comes from any socket",
        failures.host_memory_is_near_the_gpu,
        ((CudaDevice, "host_node", None),),
        defect=20,
    ),
    Mend(
        "host memory comes in small pages",
        failures.host_memory_comes_in_huge_pages,
        (changed(HostMapping, "__init__", "self._advise(mmap.MADV_HUGEPAGE)", "pass"),),
        defect=20,
    ),
    Mend(
        "one thread pins everything",
        failures.host_memory_is_pinned_by_several,
        (changed(FrameStore, "reserve", "min(target", "0 * min(target"),),
        defect=20,
    ),
    Mend(
        "the length of rows that go directly is a constant",
        failures.rows_go_as_was_measured,
        ((cuda_driver, "thresholds_of", lambda _: CopyThresholds()),),
        defect=21,
    ),
)
