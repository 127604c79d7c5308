"""What happens where copies are spread over several lanes and lenders; as `gpu_scenarios`.

The thresholds of this kind of GPU say two lanes or more, and any copy is large enough for all.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final
from unittest import mock

import torch

from aqua_protocol import TransportKind
from aqualib.transports import cuda_copier, gpu_thresholds
from aqualib.transports.gpu_thresholds import CopyThresholds
from harness.bounds import HANG_S, until
from harness.consumers import consuming, grant
from harness.cuda.results import NAME
from harness.cuda.stand_in import StandIn, stand_in
from harness.gpu_scenarios import GPU, SLAB
from harness.producers import lending
from harness.raw_consumer import TokenIssuer

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKS: Final = 16
BLOCK_BYTES: Final = SLAB // BLOCKS
MEASURED: Final = CopyThresholds(device_run_bytes=1, host_run_bytes=1)


@contextlib.contextmanager
def lanes(seed: int, count: int = 2) -> Iterator[StandIn]:
    """A GPU on which so many lanes were measured to be better than fewer."""
    measured = MEASURED.model_copy(update={"device_lanes": count, "host_lanes": count})
    with (
        mock.patch.object(gpu_thresholds, "read_thresholds", return_value={NAME: measured}),
        mock.patch.object(cuda_copier, "MIN_LANE_BYTES", 1),
        stand_in(seed=seed) as standing,
    ):
        yield standing


def a_copy_goes_by_several_lanes(seed: int) -> None:
    """A copy waits for the kernel before it, the next for all shares, and the fence for all."""
    for count in (2, 3):
        with lanes(seed, count) as standing:
            transport = standing.transport()
            slab, copier = transport.create(SLAB), transport.copier()
            near = torch.zeros(SLAB, dtype=torch.uint8, device=GPU)
            back = torch.zeros(SLAB, dtype=torch.uint8, device=GPU)
            torch.cuda.synchronize()
            engine = standing.stream()
            with torch.cuda.stream(engine):
                near.fill_(7)
                before = standing.machine.calls["cuMemcpyBatchAsync"]
                copier.copy(slab.tensor, near)
                assert standing.machine.calls["cuMemcpyBatchAsync"] - before == count, "one a lane"
                copier.copy_bytes(back, 0, slab.tensor, SLAB // 2, SLAB // 2)
                copier.copy_bytes(back, SLAB // 2, slab.tensor, 0, SLAB // 2)
                copier.fence()
                near.fill_(9)
                assert (back.cpu() == 7).all()
            del copier, near
            slab.close()


def rows_go_by_two_lanes(seed: int) -> None:
    """A batch is cut where half of its bytes are, within a row if need be."""
    with lanes(seed) as standing:
        copier = standing.transport().copier()
        table = torch.arange(64 * 3, dtype=torch.int64, device=GPU).view(64, 3)
        packed = torch.zeros((5, 3), dtype=torch.int64, device=GPU)
        again = torch.zeros((64, 3), dtype=torch.int64, device=GPU)
        order = torch.tensor([40, 7, 9, 63, 0])
        with copier.batched():
            copier.gather(packed, table, order)
        with copier.batched():
            copier.scatter(again, packed, order)
            copier.fence()  # What waits for the end of the batch is waited for as well.
            assert int(again.cpu().sum()) == int(packed.cpu().sum()) > 0
        wanted = torch.arange(64 * 3).view(64, 3)
        assert torch.equal(packed.cpu(), wanted[order])
        assert torch.equal(again.cpu()[order], wanted[order])
        assert int(again.cpu().sum()) == int(wanted[order].sum())


def blocks_lie_with_two_lenders(seed: int) -> None:
    """Blocks paged out together are half with each lender, and one of them taking all back."""
    with contextlib.ExitStack() as stack:
        standing = stack.enter_context(lanes(seed))
        transport = standing.transport()
        producers = []
        aqua = stack.enter_context(consuming(8, SLAB, transport=transport))
        for name in ("one", "two"):
            issuer = TokenIssuer(name)
            producer = stack.enter_context(
                lending(issuer, 2, producer_id=name, transport=transport, slab_bytes=SLAB)
            )
            aqua.attach(
                grant(
                    issuer,
                    producer.endpoint,
                    2,
                    slab_bytes=SLAB,
                    producer_id=name,
                    transport=TransportKind.CUDA_VMM,
                )
            )
            producers.append(producer)
        store = stack.enter_context(aqua.block_store(BLOCK_BYTES, 4 * BLOCKS))
        rows = torch.arange(BLOCKS, dtype=torch.uint8, device=GPU)[:, None].repeat(1, BLOCK_BYTES)
        before = standing.machine.calls["cuMemcpyBatchAsync"]
        slots, transfer = store.page_out(rows)
        transfer.wait()
        assert standing.machine.calls["cuMemcpyBatchAsync"] - before == 2, "one a lender"
        assert producers[0].reclaim(2 * SLAB).wait(HANG_S)
        halves = [store.location(part).value for part in slots.view(2, -1)]
        assert sorted(halves) == ["host", "peer"], halves
        back = torch.zeros_like(rows)
        store.page_in(slots, back).wait()
        assert torch.equal(back.cpu(), rows.cpu())
        producers[1].reclaim(2 * SLAB)
        until(lambda: not aqua.attachments, "given back")


LANE_SCENARIOS: Final = (
    a_copy_goes_by_several_lanes,
    rows_go_by_two_lanes,
    blocks_lie_with_two_lenders,
)
