"""What an engine and Aqua do on one GPU, each as short as it can be and still go wrong.

A scenario runs the product on the stand-in and raises `AssertionError` for a broken rule, wrong
bytes or a count that is not as promised. `gpu_mends` says what each is there for.
"""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import numpy as np
import torch

from aqua_protocol import MIB, CapacityError, TransportKind
from aqua_protocol.leases import LeaseGrant
from aqua_protocol.members import ConsumerAck
from aqualib import probe, topology
from aqualib.engines.vllm.lending.cuda_memory import CudaKvMemory
from aqualib.engines.vllm.paging.plan import PagingPlan
from aqualib.engines.vllm.paging.worker import KvPagingWorker
from aqualib.leasing.demand import LeaseBackoff
from aqualib.memory.migrator import SlabCopier
from aqualib.topology import Gpu, Link, LinkKind, Topology
from aqualib.transports import cuda_buffers
from harness.bounds import HANG_S, until
from harness.consumers import consuming, grant
from harness.cuda.stand_in import StandIn, stand_in
from harness.producers import lending
from harness.raw_consumer import TokenIssuer
from harness.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqualib.consumer import Aqua
    from aqualib.producer.producer import Producer


class Coordinator:
    """A coordinator that has memory and hands none out; counts what it is told and asked."""

    def __init__(self) -> None:
        self.reports = 0
        self.requests = 0

    def report_consumer(self, _report: object) -> ConsumerAck:
        """As the client's."""
        self.reports += 1
        return ConsumerAck(books_id="books", heartbeat_s=60, available_bytes=8 * SLAB)

    def grant_lease(self, _request: object, **_: object) -> LeaseGrant:
        """As the client's."""
        self.requests += 1
        raise CapacityError("nothing is lent here")

    def remove_consumer(self, *_: object) -> None:
        """As the client's."""

    def close(self) -> None:
        """As the client's."""


SLAB: Final = 2 * MIB
GPU: Final = torch.device("cuda", 0)
BLOCKS: Final = 16
BLOCK_BYTES: Final = 4096
LAYERS: Final = 80
"""Layers of a model of 70 thousand million parameters."""


@contextlib.contextmanager
def granting(standing: StandIn, slab_count: int = 2) -> Iterator[tuple[Aqua, Producer, LeaseGrant]]:
    """A consumer and a producer, both on the GPU and in this process, and a grant to take up."""
    issuer, transport = TokenIssuer(), standing.transport()
    with (
        lending(issuer, slab_count, transport=transport, slab_bytes=SLAB) as producer,
        consuming(8, SLAB, transport=transport) as aqua,
    ):
        yield (
            aqua,
            producer,
            grant(
                issuer,
                producer.endpoint,
                slab_count,
                slab_bytes=SLAB,
                transport=TransportKind.CUDA_VMM,
            ),
        )


@contextlib.contextmanager
def borrowing(standing: StandIn, slab_count: int = 2) -> Iterator[tuple[Aqua, Producer]]:
    """The same with the grant taken up: the consumer has the producer's slabs."""
    with granting(standing, slab_count) as (aqua, producer, granted):
        aqua.attach(granted)
        yield aqua, producer


def caches(layers: int = 2, block_bytes: int = BLOCK_BYTES) -> list[torch.Tensor]:
    """KV caches, block by block, all of them written."""
    return [
        torch.full((BLOCKS, block_bytes), n + 1, dtype=torch.uint8, device=GPU)
        for n in range(layers)
    ]


# --- Order ------------------------------------------------------------------------------------


def a_pinned_view_is_read_by_a_kernel(seed: int) -> None:
    """The frame goes home while a kernel that was queued in the block still reads the slab."""
    with stand_in(seed=seed) as standing, borrowing(standing) as (aqua, producer):
        tensor = aqua.offload(torch.full((1000,), 7, dtype=torch.uint8, device=GPU))
        until(lambda: tensor.location.value == "peer", "promoted")
        with tensor.pinned(writes=False) as view:
            total = view.to(torch.int64).sum()
        producer.reclaim(2 * SLAB)
        until(lambda: tensor.location.value == "host", "drained")
        assert int(total) == 7000
        tensor.release()


def a_load_runs_beside_the_model(seed: int) -> None:
    """A request's blocks are loaded into blocks that a queued kernel of the last step reads."""
    with stand_in(seed=seed) as standing:
        layers = caches()
        with consuming(8, SLAB, transport=standing.transport()) as aqua:
            worker = KvPagingWorker(layers, aqua, BLOCKS)
            worker.page_out(PagingPlan(out_places=[0, 1], out_blocks=[3, 4]))
            engine = standing.stream()
            with torch.cuda.stream(engine):
                engine.wait_stream(torch.cuda.default_stream(GPU))
                for layer in layers:
                    layer[8:10] = 99
                read = layers[0][8:10].clone()
                worker.page_in(PagingPlan(async_loads={"request": ([0, 1], [8, 9])}))
                until(lambda: worker.take_arrived() == {"request"}, "loaded")
                assert (read.cpu() == 99).all()
                assert (layers[1][8:10].cpu() == 2).all(), "what was loaded, not what was there"
            worker.close()


def blocks_go_out_and_in_between_steps(seed: int) -> None:
    """The engine overwrites blocks right after they went out, and reads them once they are in."""
    with stand_in(seed=seed) as standing:
        layers = caches()
        with borrowing(standing) as (aqua, _):
            worker = KvPagingWorker(layers, aqua, BLOCKS)
            for round_number in range(3):
                for layer in layers:
                    layer[2:6] = 10 + round_number
                worker.page_out(PagingPlan(out_places=[0, 1, 2, 3], out_blocks=[2, 3, 4, 5]))
                for layer in layers:
                    layer[2:6] = 0
                worker.page_in(PagingPlan(in_places=[3, 1], in_blocks=[9, 10]))
                for layer in layers:
                    assert (layer[9:11].cpu() == 10 + round_number).all()
            worker.close()


def blocks_of_many_layers_go_by_two_submissions(seed: int) -> None:
    """A part of 80 layers is one kernel and one copy, out and in, and the right bytes come back."""
    with stand_in(seed=seed) as standing:
        layers, submissions = caches(LAYERS, block_bytes=512), standing.machine.submissions
        with consuming(8, SLAB, transport=standing.transport()) as aqua:
            worker = KvPagingWorker(layers, aqua, BLOCKS)
            torch.cuda.synchronize()
            for out, into in (([3, 7, 5], [8, 9, 10]), ([0, 1], [11, 15])):
                places = list(range(len(out)))
                before = submissions[get_ident()]
                worker.page_out(PagingPlan(out_places=places, out_blocks=out))
                between = submissions[get_ident()]
                assert between - before <= 2, f"{between - before} submissions out"
                for layer in layers[:: LAYERS // 4]:
                    layer[into[0]] = 0
                before = submissions[get_ident()]
                worker.page_in(PagingPlan(in_places=places, in_blocks=into))
                after = submissions[get_ident()]
                assert after - before <= 2, f"{after - before} submissions in"
            for number in (0, LAYERS // 2, LAYERS - 1):
                assert (layers[number].cpu() == number + 1).all()
            worker.close()


def rows_share_the_staging_buffers(seed: int) -> None:
    """Two threads gather by the same buffers, which their streams order and their hosts do not."""
    with stand_in(seed=seed) as standing:
        transport = standing.transport()
        tables = [torch.full((64, 512), n + 1, dtype=torch.uint8, device=GPU) for n in range(3)]
        torch.cuda.synchronize()
        outs = [torch.empty((32, 512), dtype=torch.uint8, device=GPU) for _ in tables]
        copiers = [transport.copier() for _ in tables]
        for copier, table, out in zip(copiers, tables, outs, strict=True):
            in_thread(partial(copier.gather, out, table, torch.arange(0, 64, 2)))
        for copier, out, number in zip(copiers, outs, (1, 2, 3), strict=True):
            copier.fence()
            assert (out.cpu() == number).all()


def many_stages_follow_each_other(seed: int) -> None:
    """An index of more stages than the ring has slots: none is overwritten before it was read."""
    count = cuda_buffers.INDEX_ROWS * (cuda_buffers.INDEX_SLOTS + 2)
    with stand_in(seed=seed) as standing:
        copier = standing.transport().copier()
        table = torch.arange(count, dtype=torch.int64, device=GPU)[:, None]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
        packed = torch.empty((count, 1), dtype=torch.int64, device=GPU)
        copier.gather(packed, table, order)
        copier.fence()
        assert torch.equal(packed.cpu()[:, 0], order)


# --- Waiting ----------------------------------------------------------------------------------


def a_drain_does_not_wait_for_the_engine(seed: int) -> None:
    """Slabs go back while the engine's default stream does not move."""
    with stand_in(seed=seed) as standing, borrowing(standing) as (aqua, producer):
        tensor = aqua.offload(torch.full((1000,), 7, dtype=torch.uint8, device=GPU))
        until(lambda: tensor.location.value == "peer", "promoted")
        default = standing.torch.default_stream(GPU).found
        busy = torch.zeros(64, dtype=torch.uint8, device=GPU)
        busy.add_(0)  # Loads its kernel.
        with standing.machine.held(default):
            busy.add_(1)
            producer.reclaim(2 * SLAB)
            until(lambda: tensor.location.value == "host", "drained")
            assert default.queue, "the engine was not waited for"
        assert (tensor.load().cpu() == 7).all()
        tensor.release()


def rows_are_submitted_without_waiting(seed: int) -> None:
    """A gather returns while the kernel that makes its rows has not even begun."""
    with stand_in(seed=seed) as standing:
        copier = standing.transport().copier()
        table = torch.zeros((64, 512), dtype=torch.uint8, device=GPU)
        packed = torch.empty((32, 512), dtype=torch.uint8, device=GPU)
        index = torch.arange(0, 64, 2)
        table.add_(0)  # Loads its kernel.
        copier.gather(packed, table, index)
        copier.fence()
        engine = standing.stream()
        with torch.cuda.stream(engine), standing.machine.held(engine.found):
            table.add_(5)
            copier.gather(packed, table, index)
            assert engine.found.queue, "the engine was not waited for"
        copier.fence()
        assert (packed.cpu() == 5).all()


# --- Write-behind -----------------------------------------------------------------------------


def a_reclaim_finds_everything_in_host_memory(seed: int) -> None:
    """What an engine paged out has been copied while nobody waited: the reclaim only unmaps."""
    with stand_in(seed=seed) as standing, borrowing(standing) as (aqua, producer):
        rows = torch.arange(BLOCKS, dtype=torch.uint8, device=GPU)[:, None].repeat(1, BLOCK_BYTES)
        with aqua.block_store(BLOCK_BYTES, BLOCKS) as blocks:
            slots, transfer = blocks.page_out(rows)
            transfer.wait()
            assert blocks.location().value == "peer"
            until(lambda: aqua.stats().written_behind_bytes >= rows.nbytes, "copied ahead")
            before = sum(standing.machine.submissions.values())
            assert producer.reclaim(2 * SLAB).wait(HANG_S)
            assert sum(standing.machine.submissions.values()) == before, "a reclaim copied"
            assert not aqua.stats().drain_copied_bytes
            back = torch.zeros_like(rows)
            blocks.page_in(slots, back).wait()
            assert torch.equal(back.cpu(), rows.cpu())


def a_kernel_writes_what_is_to_be_copied_ahead(seed: int) -> None:
    """Write-behind leaves a view that is written to alone, and what was written before others."""
    with stand_in(seed=seed) as standing, borrowing(standing) as (aqua, producer):
        first, second = (aqua.empty((SLAB,), torch.uint8) for _ in range(2))
        with first.pinned() as view:
            second.store(torch.full((SLAB,), 3, dtype=torch.uint8, device=GPU))
            for number in range(4):
                view.fill_(number)
            until(lambda: aqua.stats().written_behind_bytes >= SLAB, "the other was copied")
        assert producer.reclaim(2 * SLAB).wait(HANG_S)
        assert (first.load().cpu() == 3).all()
        assert (second.load().cpu() == 3).all()


def a_kernel_writes_what_is_being_copied_ahead(seed: int) -> None:
    """What is written during write-behind's copy counts as not copied, and nobody waits."""
    with stand_in(seed=seed) as standing, borrowing(standing) as (aqua, producer):
        begun, written, copied = (threading.Event() for _ in range(3))
        copy = SlabCopier.copy

        def copy_late(self: SlabCopier, *slabs_and_ranges: Any) -> str:  # noqa: ANN401 - the product's
            begun.set()
            written.wait(HANG_S)
            failure = copy(self, *slabs_and_ranges)
            copied.set()
            return failure

        with mock.patch.object(SlabCopier, "copy", copy_late):
            tensor = aqua.offload(torch.full((SLAB,), 3, dtype=torch.uint8, device=GPU))
            assert begun.wait(HANG_S)
            with tensor.pinned() as view:
                view.fill_(5)
                written.set()
                assert copied.wait(HANG_S)
        assert producer.reclaim(2 * SLAB).wait(HANG_S)
        assert (tensor.load().cpu() == 5).all()


# --- Contexts, captures, room -----------------------------------------------------------------


def a_thread_uses_the_second_gpu_only(seed: int) -> None:
    """A thread that never chose a device copies on cuda:1; cuda:0 stays as it was."""

    def work() -> None:
        near = torch.full((64, 512), 3, dtype=torch.uint8, device="cuda:1")
        slab = transport.create(SLAB)
        copier = transport.copier()
        copier.copy(slab.tensor[: near.nbytes], near.view(-1))
        copier.gather(near[:32], near, torch.arange(32, 64))
        copier.fence()
        assert probe.measure(transport, slab).read_bytes_per_s > 0
        slab.close()

    with stand_in(seed=seed, gpu_count=2) as standing:
        transport = standing.transport(ordinal=1)
        in_thread(work)
        assert standing.machine.contexts_made == {1}, "half a GiB on a GPU that nobody uses"


def leases_are_taken_up_during_a_capture(seed: int) -> None:
    """The leasing thread maps and measures slabs while the engine captures a graph."""
    with stand_in(seed=seed) as standing, granting(standing) as (aqua, _, granted):
        graph = torch.zeros(64, dtype=torch.uint8, device=GPU)
        with standing.torch.capturing():
            graph.add_(1)
            in_thread(lambda: aqua.attach(granted))


def a_lease_is_taken_up_on_a_full_gpu(seed: int) -> None:
    """The engine has taken all that was left; the path is measured nevertheless."""
    with stand_in(seed=seed) as standing, granting(standing) as (aqua, _, granted):
        machine = standing.machine
        machine.memory_bytes = machine.used[0] + 2 * SLAB  # The producer makes its slabs now.
        try:
            link = aqua.attach(granted).link
        except Exception as error:
            raise AssertionError(f"the lease could not be used: {error}") from error
        assert link is not None


def copiers_come_and_go(seed: int) -> None:
    """Threads that copied leave nothing behind that another could not use."""
    with stand_in(seed=seed) as standing:
        transport = standing.transport()
        transport.copier()
        before = standing.machine.used[0] + standing.torch.allocator.reserved_bytes
        for _ in range(4):
            in_thread(lambda: transport.copier().fence())
        after = standing.machine.used[0] + standing.torch.allocator.reserved_bytes
        assert after == before, f"{after - before} bytes for threads that have ended"


def slabs_are_made_for_network_cards(seed: int) -> None:
    """Memory that is lent can be registered where the GPU and its driver can do that."""
    with stand_in(seed=seed) as standing:
        slab = standing.transport().create(SLAB)
        assert all(m.is_rdma_capable for m in standing.machine.handles.values())
        slab.close()


def processes_see_one_gpu_each(seed: int) -> None:
    """Two GPUs that reach each other, in processes that see one: they share no domain."""
    domains = {}
    for number in range(2):
        with stand_in(seed=seed, gpu_count=2, visible=[number]) as standing:
            names = [f"GPU-{standing.machine.uuid_of_gpu(n)}" for n in range(2)]
            here = Topology(
                node="node",
                boot_id="boot",
                gpus=[Gpu(uuid=name, model="H100", memory_bytes=1 << 30) for name in names],
                links=[Link(a=names[0], b=names[1], kind=LinkKind.NVLINK)],
            )
            with mock.patch.object(topology, "discover", return_value=here):
                identity = topology.place(GPU)
            assert identity.gpu_uuid == names[number]
            assert not standing.machine.contexts_made, "a name costs no context"
            domains[number] = identity.domain
    assert domains[0] != domains[1], "grants between them are never mapped"


def leases_wait_for_the_first_step(seed: int) -> None:
    """An engine that captures graphs when it starts is lent nothing before it serves."""
    think = LeaseBackoff.wake_s
    with (
        stand_in(seed=seed) as standing,
        mock.patch.object(LeaseBackoff, "wake_s", autospec=True, side_effect=think) as thinks,
    ):
        link = Coordinator()
        with consuming(
            8,
            SLAB,
            transport=standing.transport(),
            link=link,
            leases_from_first_step=True,
            wanted_bytes=SLAB,
        ) as aqua:
            until(lambda: link.reports > 0, "reported")
            aqua.empty((1,), torch.uint8).release()
            until(lambda: link.reports > 1, "the answer to the first is known")
            looks = thinks.call_count
            aqua.empty((1,), torch.uint8).release()
            until(lambda: link.requests > 0 or thinks.call_count > looks + 1, "thought again")
            assert not link.requests, "asked during the start"
            aqua.step()
            until(lambda: link.requests > 0, "asked")


def a_cache_is_given_up_and_taken_back(seed: int) -> None:
    """A part of a KV cache leaves under queued kernels, is looked at, and comes back as zeros."""
    with stand_in(seed=seed) as standing:
        memory = CudaKvMemory(GPU)
        tensor = memory.allocate(4 * SLAB)
        upper = np.arange(4) >= 2
        for number in range(2):
            tensor.fill_(number + 5)
            last = tensor[2 * SLAB :].clone()  # The step whose output nobody has asked for.
            standing.machine.calls.clear()
            memory.release(upper)
            assert (last.cpu() == number + 5).all()
            assert not tensor[2 * SLAB :].any()
            memory.restore(upper)
            calls = standing.machine.calls
            assert calls["cuMemSetAccess"] == calls["cuMemUnmap"] == 2, "one a run and direction"
            assert calls["cuMemsetD8Async"] == 1, "one a run"
            assert (tensor[: 2 * SLAB].cpu() == number + 5).all()
            assert not tensor[2 * SLAB :].any()
        memory.close()


SCENARIOS: Final = (
    a_pinned_view_is_read_by_a_kernel,
    a_load_runs_beside_the_model,
    blocks_go_out_and_in_between_steps,
    blocks_of_many_layers_go_by_two_submissions,
    rows_share_the_staging_buffers,
    many_stages_follow_each_other,
    a_drain_does_not_wait_for_the_engine,
    rows_are_submitted_without_waiting,
    a_reclaim_finds_everything_in_host_memory,
    a_kernel_writes_what_is_to_be_copied_ahead,
    a_kernel_writes_what_is_being_copied_ahead,
    a_thread_uses_the_second_gpu_only,
    leases_are_taken_up_during_a_capture,
    a_lease_is_taken_up_on_a_full_gpu,
    copiers_come_and_go,
    slabs_are_made_for_network_cards,
    processes_see_one_gpu_each,
    leases_wait_for_the_first_step,
    a_cache_is_given_up_and_taken_back,
)
