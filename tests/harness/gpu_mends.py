"""What was mended for GPUs, each with a patch that takes the mend back and a scenario that minds.

A mend that no scenario needs is one that a later change could lose without a failing test. Most are
taken back by the text of a function as it was before (`changed`).

A review of the code by CUDA's documents, before there was a GPU to try it on, listed 21 defects;
`defect` is the number there. `docs/gpu.md` has the list.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch

from aqualib.engines.vllm.lending.cuda_memory import CudaKvMemory
from aqualib.engines.vllm.paging import rows, side_stream
from aqualib.engines.vllm.paging.side_stream import SideStream
from aqualib.engines.vllm.paging.worker import KvPagingWorker
from aqualib.leasing.client import LeaseClient
from aqualib.memory import migration_policy
from aqualib.memory.frame_store import FrameStore
from aqualib.memory.frame_table import FrameTable
from aqualib.topology import Topology
from aqualib.transports import cuda_copier, cuda_driver
from aqualib.transports.base import Copier
from aqualib.transports.cuda_abi import ATTRIBUTE_RDMA
from aqualib.transports.cuda_buffers import StagingBuffer, StagingPool
from aqualib.transports.cuda_copier import CudaCopier, CudaSide
from aqualib.transports.cuda_driver import CudaDevice
from aqualib.transports.cuda_stream import CudaEvent
from harness import gpu_lane_scenarios as lane_scenarios
from harness import gpu_layer_scenarios as layer_scenarios
from harness import gpu_scenarios as scenarios
from harness.gpu_failure_mends import FAILURE_MENDS, NO_PATIENCE
from harness.mend import Mend, changed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_start = LeaseClient.start
_map_run = CudaDevice.map_run
_unmap_at = CudaDevice.unmap_at
_zero = CudaDevice.zero


@contextlib.contextmanager
def _after_nothing(self: SideStream, mark: object) -> Iterator[None]:
    del mark
    yield
    torch.cuda.current_stream(self._device).synchronize()


@contextlib.contextmanager
def _buffer_of_all(self: StagingPool, stream: object) -> Iterator[StagingBuffer]:
    del stream
    yield self._buffers[0]


def _domain_of_all(self: Topology, uuid: str, _visible: object = None) -> str:
    return f"{self.boot_id}.{min(gpu.uuid for gpu in self.gpus)}" if uuid else ""


def _asks_at_once(self: LeaseClient) -> None:
    self.engine_has_begun()
    _start(self)


def _release_to_holes(self: CudaKvMemory, run: object) -> None:
    """Show nothing."""


def _map_one_by_one(
    self: CudaDevice, at: int, handles: Sequence[int], nbytes: int, *, is_writable: bool = True
) -> None:
    for number, handle in enumerate(handles):
        _map_run(self, at + number * nbytes, [handle], nbytes, is_writable=is_writable)


def _unmap_one_by_one(self: CudaDevice, address: int, nbytes: int) -> None:
    for start in range(0, nbytes, self.granularity):
        _unmap_at(self, address + start, self.granularity)


def _zero_one_by_one(self: CudaDevice, address: int, nbytes: int) -> None:
    for start in range(0, nbytes, self.granularity):
        _zero(self, address + start, self.granularity)


@contextlib.contextmanager
def _scratch_of_torch(self: CudaCopier, nbytes: int) -> Iterator[torch.Tensor]:
    yield torch.zeros(nbytes, dtype=torch.uint8, device=self._device)


def _copier_in_front(self: CudaSide, *, is_background: bool = False) -> CudaCopier:
    del is_background
    return CudaCopier(self._device, self._gpu)


def _copier_behind(self: CudaSide, *, is_background: bool = False) -> CudaCopier:
    del is_background
    return CudaCopier(self._device, self._gpu, is_background=True)


def _copier_of_its_own(self: CudaSide, *, is_background: bool = False) -> CudaCopier:
    with mock.patch.object(self._gpu, "staging", StagingPool(self._gpu)):
        return CudaCopier(self._device, self._gpu, is_background=is_background)


def _pageable_index(self: StagingBuffer, index: Any, _stream: object) -> torch.Tensor:  # noqa: ANN401 - an array
    return torch.from_numpy(index).to(self.rows.device)


def _has_no_rdma(self: CudaDevice, attribute: int) -> bool:
    return attribute != ATTRIBUTE_RDMA and bool(
        self.driver.read_int("cuDeviceGetAttribute", attribute, self._device)
    )


def _on_stream_alone(stream: Any) -> Any:  # noqa: ANN401 - torch's
    return torch.cuda.stream(stream)


MENDS: Final = (
    Mend(
        "`pinned()` ends while kernels that were queued in it still run",
        scenarios.a_pinned_view_is_read_by_a_kernel,
        ((CudaSide, "synchronize", lambda _: None),),
        defect=1,
    ),
    Mend(
        "loads beside the model follow none of the engine's kernels",
        scenarios.a_load_runs_beside_the_model,
        ((SideStream, "after", _after_nothing),),
        defect=2,
        is_met_by_walks=True,
    ),
    Mend(
        "copies of an engine thread follow none of its kernels",
        scenarios.blocks_go_out_and_in_between_steps,
        ((CudaSide, "copier", _copier_behind),),
        is_met_by_walks=True,
    ),
    Mend(
        "each layer of a part is launched by itself",
        scenarios.blocks_of_many_layers_go_by_two_submissions,
        ((rows, "row_table", lambda _: None),),
        defect=16,
        is_met_by_walks=True,
    ),
    Mend(
        "a layer is launched before its blocks are there",
        layer_scenarios.a_step_reads_its_layers_as_they_come,
        ((KvPagingWorker, "await_layer", lambda *_: None),),
    ),
    Mend(
        "a layer waits for the blocks of the first layers",
        layer_scenarios.a_step_reads_its_layers_as_they_come,
        (changed(KvPagingWorker, "await_layer", " if there >= end", ""),),
    ),
    Mend(
        "blocks that the step writes to come late",
        layer_scenarios.a_step_writes_before_it_asks_for_a_layer,
        (changed(KvPagingWorker, "page_in", "set(plan.written_blocks)", "set()"),),
    ),
    Mend(
        "a column takes a submission for each slab that it is in",
        layer_scenarios.columns_go_by_two_submissions,
        ((CudaCopier, "batched", Copier.batched),),
    ),
    Mend(
        "a lane begins before what it copies is there",
        lane_scenarios.a_copy_goes_by_several_lanes,
        (changed(CudaCopier, "_submit", "lane.follow(self._stream.handle)", "pass"),),
    ),
    Mend(
        "nothing waits for the lanes",
        lane_scenarios.a_copy_goes_by_several_lanes,
        (changed(CudaCopier, "_submit", "self._stream.follow(lane.handle)", "pass"),),
    ),
    Mend(
        "a third lane begins before what it copies is there",
        lane_scenarios.a_copy_goes_by_several_lanes,
        (
            changed(
                CudaCopier,
                "_submit",
                "in lanes[1:]:\n        lane.follow",
                "in lanes[1:2]:\n        lane.follow",
            ),
        ),
    ),
    Mend(
        "nothing waits for a third lane",
        lane_scenarios.a_copy_goes_by_several_lanes,
        (
            changed(
                CudaCopier,
                "_submit",
                "in lanes[1:]:\n            self._stream.follow",
                "in lanes[1:2]:\n            self._stream.follow",
            ),
        ),
    ),
    Mend(
        "a fence within a batch leaves what it has gathered for later",
        lane_scenarios.rows_go_by_two_lanes,
        (changed(CudaCopier, "fence", "self._submit_batch()", "pass"),),
    ),
    Mend(
        "shares of a batch are whole copies",
        lane_scenarios.rows_go_by_two_lanes,
        (
            changed(
                cuda_copier.CopyList, "shares", "self.srcs[inside] + skipped", "self.srcs[inside]"
            ),
        ),
    ),
    Mend(
        "blocks paged out together lie with one lender",
        lane_scenarios.blocks_lie_with_two_lenders,
        (changed(FrameStore, "take_runs", "if lender_count > 1", "if lender_count > 2"),),
    ),
    Mend(
        "the background waits for the engine's default stream",
        scenarios.a_drain_does_not_wait_for_the_engine,
        ((CudaSide, "copier", _copier_in_front),),
        defect=18,
    ),
    Mend(
        "staging buffers are shared without an order",
        scenarios.rows_share_the_staging_buffers,
        ((StagingPool, "buffer", _buffer_of_all),),
        defect=19,
    ),
    Mend(
        "indexes go to the GPU from pageable memory",
        scenarios.rows_are_submitted_without_waiting,
        ((StagingBuffer, "put_index", _pageable_index),),
        defect=17,
    ),
    Mend(
        "a slot of pinned indexes is filled again before it was read",
        scenarios.many_stages_follow_each_other,
        ((CudaEvent, "synchronize", lambda _: None),),
        defect=17,
    ),
    Mend(
        "what was written on a peer is copied when it is asked back",
        scenarios.a_reclaim_finds_everything_in_host_memory,
        ((migration_policy, "_for_unsaved_frames", lambda *_: None), NO_PATIENCE),
    ),
    Mend(
        "write-behind copies what kernels are writing",
        scenarios.a_kernel_writes_what_is_to_be_copied_ahead,
        (changed(migration_policy, "_for_unsaved_frames", " and not frame.pins", ""),),
    ),
    Mend(
        "what is written while it is copied ahead counts as copied",
        scenarios.a_kernel_writes_what_is_being_copied_ahead,
        (
            changed(
                FrameTable,
                "written_behind",
                "    frame.pins -= 1\n",
                "    frame.pins -= 1\n    frame.written &= ~move.parts\n",
            ),
        ),
    ),
    Mend(
        "a thread that copies goes back to GPU 0 afterwards",
        scenarios.a_thread_uses_the_second_gpu_only,
        (
            (cuda_copier, "on_stream", _on_stream_alone),
            (side_stream, "on_stream", _on_stream_alone),
        ),
        defect=12,
    ),
    Mend(
        "our driver calls mind the captures of other threads",
        scenarios.leases_are_taken_up_during_a_capture,
        ((cuda_driver, "CAPTURE_MODE_RELAXED", 0),),
        defect=4,
    ),
    Mend(
        "the probe allocates on a GPU that is full",
        scenarios.a_lease_is_taken_up_on_a_full_gpu,
        ((CudaCopier, "scratch", _scratch_of_torch),),
        defect=3,
    ),
    Mend(
        "each copier has a staging buffer of its own",
        scenarios.copiers_come_and_go,
        ((CudaSide, "copier", _copier_of_its_own),),
        defect=19,
    ),
    Mend(
        "network cards cannot register lent memory",
        scenarios.slabs_are_made_for_network_cards,
        ((CudaDevice, "_has", _has_no_rdma),),
        defect=13,
    ),
    Mend(
        "processes that do not see each other's GPUs share a domain",
        scenarios.processes_see_one_gpu_each,
        ((Topology, "domain_of", _domain_of_all),),
        defect=11,
    ),
    Mend(
        "leases are asked for while the engine starts",
        scenarios.leases_wait_for_the_first_step,
        ((LeaseClient, "start", _asks_at_once),),
        defect=4,
    ),
    Mend(
        "a granule that was given up ends the context of who looks at it",
        scenarios.a_cache_is_given_up_and_taken_back,
        ((CudaKvMemory, "_show_zeros", _release_to_holes),),
        defect=15,
    ),
    Mend(
        "each granule gets its rights by a call of its own",
        scenarios.a_cache_is_given_up_and_taken_back,
        ((CudaDevice, "map_run", _map_one_by_one),),
        defect=15,
    ),
    Mend(
        "each granule is unmapped by a call of its own",
        scenarios.a_cache_is_given_up_and_taken_back,
        ((CudaDevice, "unmap_at", _unmap_one_by_one),),
        defect=15,
    ),
    Mend(
        "each granule is cleared by a call of its own",
        scenarios.a_cache_is_given_up_and_taken_back,
        ((CudaDevice, "zero", _zero_one_by_one),),
        defect=15,
    ),
    Mend(
        "granules are given up while kernels that use them are queued",
        scenarios.a_cache_is_given_up_and_taken_back,
        ((CudaDevice, "synchronize", lambda _: None),),
        defect=15,
    ),
    *FAILURE_MENDS,
)
