"""Where a worker of vLLM says that its paged blocks are, while memory is lent and taken back."""

from __future__ import annotations

import torch

from aqua_schedulers.cfs import PagingTier
from aqualib.engines.vllm.paging.plan import PagingPlan
from aqualib.engines.vllm.paging.rows import block_rows
from aqualib.engines.vllm.paging.worker import KvPagingWorker
from aqualib.producer.producer import Producer
from harness.bounds import HANG_S
from harness.consumers import await_rest, consuming
from harness.loans import COUNT, lend
from harness.producers import SLAB
from harness.raw_consumer import TokenIssuer

BLOCKS = 4


def test_a_report_follows_the_blocks_to_a_peer_and_home_again(
    issuer: TokenIssuer, producer: Producer
) -> None:
    layers = [torch.zeros((BLOCKS, 64), dtype=torch.uint8)]
    with consuming() as aqua:
        worker = KvPagingWorker(block_rows(layers, BLOCKS), aqua, BLOCKS)
        worker.page_out(PagingPlan(out_places=[0], out_blocks=[1]))
        tiers = []

        def note() -> None:
            report = worker.take_report()
            assert report is not None
            tiers.append(report.location)

        note()
        lend(aqua, issuer, producer)
        await_rest(aqua)
        note()
        assert producer.reclaim(COUNT * SLAB).wait(HANG_S)
        await_rest(aqua)
        note()
        assert tiers == [PagingTier.HOST, PagingTier.PEER, PagingTier.HOST]
        worker.close()
