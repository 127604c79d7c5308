"""What was mended for GPUs, each with a patch that takes the mend back and a scenario that minds.

A mend that no scenario needs is one that a later change could lose without a failing test.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch

from aqualib.engines.vllm import side_stream
from aqualib.engines.vllm.lending.cuda_memory import CudaKvMemory
from aqualib.engines.vllm.side_stream import SideStream
from aqualib.leasing.client import LeaseClient
from aqualib.topology import Topology
from aqualib.transports import cuda_copier, cuda_driver
from aqualib.transports.cuda_abi import ATTRIBUTE_RDMA
from aqualib.transports.cuda_buffers import StagingBuffer, StagingPool
from aqualib.transports.cuda_copier import CudaCopier, CudaSide
from aqualib.transports.cuda_driver import CudaDevice
from aqualib.transports.cuda_stream import CudaEvent
from harness import gpu_scenarios as scenarios

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


_start = LeaseClient.start
_map_run = CudaDevice.map_run


@dataclass(frozen=True)
class Mend:
    """A mend, by what it took away.

    Attributes:
        without: What the product does without it.
        scenario: What then goes wrong, by some seed.
        patches: An owner, a name, and what was there before.
        is_met_by_walks: Whether random walks (`gpu_walk`) miss it as well.
    """

    without: str
    scenario: Callable[[int], None]
    patches: tuple[tuple[Any, str, Any], ...]
    is_met_by_walks: bool = False

    @contextlib.contextmanager
    def taken_back(self) -> Iterator[None]:
        """The product without the mend."""
        with contextlib.ExitStack() as stack:
            for owner, name, thing in self.patches:
                assert hasattr(owner, name), f"{owner} has no {name} any more"
                stack.enter_context(mock.patch.object(owner, name, thing))
            yield


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


def _pageable_index(self: StagingBuffer, rows: Any, _stream: object) -> torch.Tensor:  # noqa: ANN401 - an array
    return torch.from_numpy(rows).to(self.rows.device)


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
        is_met_by_walks=True,
    ),
    Mend(
        "loads beside the model follow none of the engine's kernels",
        scenarios.a_load_runs_beside_the_model,
        ((SideStream, "after", _after_nothing),),
    ),
    Mend(
        "copies of an engine thread follow none of its kernels",
        scenarios.blocks_go_out_and_in_between_steps,
        ((CudaSide, "copier", _copier_behind),),
        is_met_by_walks=True,
    ),
    Mend(
        "the background waits for the engine's default stream",
        scenarios.a_drain_does_not_wait_for_the_engine,
        ((CudaSide, "copier", _copier_in_front),),
    ),
    Mend(
        "staging buffers are shared without an order",
        scenarios.rows_share_the_staging_buffers,
        ((StagingPool, "buffer", _buffer_of_all),),
    ),
    Mend(
        "indexes go to the GPU from pageable memory",
        scenarios.rows_are_submitted_without_waiting,
        ((StagingBuffer, "put_index", _pageable_index),),
    ),
    Mend(
        "a slot of pinned indexes is filled again before it was read",
        scenarios.many_stages_follow_each_other,
        ((CudaEvent, "synchronize", lambda _: None),),
    ),
    Mend(
        "a thread that copies goes back to GPU 0 afterwards",
        scenarios.a_thread_uses_the_second_gpu_only,
        (
            (cuda_copier, "on_stream", _on_stream_alone),
            (side_stream, "on_stream", _on_stream_alone),
        ),
    ),
    Mend(
        "our driver calls mind the captures of other threads",
        scenarios.leases_are_taken_up_during_a_capture,
        ((cuda_driver, "CAPTURE_MODE_RELAXED", 0),),
        is_met_by_walks=True,
    ),
    Mend(
        "the probe allocates on a GPU that is full",
        scenarios.a_lease_is_taken_up_on_a_full_gpu,
        ((CudaCopier, "scratch", _scratch_of_torch),),
        is_met_by_walks=True,
    ),
    Mend(
        "each copier has a staging buffer of its own",
        scenarios.copiers_come_and_go,
        ((CudaSide, "copier", _copier_of_its_own),),
    ),
    Mend(
        "network cards cannot register lent memory",
        scenarios.slabs_are_made_for_network_cards,
        ((CudaDevice, "_has", _has_no_rdma),),
    ),
    Mend(
        "processes that do not see each other's GPUs share a domain",
        scenarios.processes_see_one_gpu_each,
        ((Topology, "domain_of", _domain_of_all),),
    ),
    Mend(
        "leases are asked for while the engine starts",
        scenarios.leases_wait_for_the_first_step,
        ((LeaseClient, "start", _asks_at_once),),
    ),
    Mend(
        "a granule that was given up ends the context of who looks at it",
        scenarios.a_cache_is_given_up_and_taken_back,
        ((CudaKvMemory, "_show_zeros", _release_to_holes),),
    ),
    Mend(
        "each granule gets its rights by a call of its own",
        scenarios.a_cache_is_given_up_and_taken_back,
        ((CudaDevice, "map_run", _map_one_by_one),),
    ),
    Mend(
        "granules are given up while kernels that use them are queued",
        scenarios.a_cache_is_given_up_and_taken_back,
        ((CudaDevice, "synchronize", lambda _: None),),
    ),
)
