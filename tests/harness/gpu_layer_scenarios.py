"""What a step does on one GPU while its blocks come back layer by layer, and can go wrong there.

As `gpu_scenarios`. The engine of these has a layer's tokens written and then asks for the layer, as
vLLM does. What it does not ask for does not come, so that a product that does not wait is found out
whatever the threads do.
"""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final
from unittest import mock

import torch

from aqualib.engines.vllm.paging import worker as worker_module
from aqualib.engines.vllm.paging.plan import PagingPlan
from aqualib.engines.vllm.paging.worker import KvPagingWorker
from aqualib.transports.cuda_driver import load_driver
from aqualib.transports.gpu_thresholds import CopyThresholds
from harness.bounds import HANG_S
from harness.consumers import consuming
from harness.cuda.stand_in import stand_in
from harness.gpu_scenarios import BLOCK_BYTES, BLOCKS, LAYERS, SLAB, borrowing, caches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqualib.consumer import Aqua

FEW_LAYERS: Final = 8
OUT: Final = list(range(BLOCKS // 2))
INTO: Final = list(range(BLOCKS // 2, BLOCKS))
READ: Final = slice(BLOCKS // 2, BLOCKS)
PLACES: Final = list(range(len(OUT)))
LAST: Final = INTO[-1]
"""The block that the step writes to, too."""


@contextlib.contextmanager
def paged_out(aqua: Aqua, layer_count: int) -> Iterator[tuple[KvPagingWorker, list[torch.Tensor]]]:
    """A worker that cuts loads of more than two blocks, and has paged some out."""
    shortest = CopyThresholds(device_run_bytes=1, host_run_bytes=1)
    staging_bytes = 2 * layer_count * BLOCK_BYTES
    layers = caches(layer_count)
    ends = {str(n): (n + 1) * BLOCK_BYTES for n in range(layer_count)}
    with (
        mock.patch.object(load_driver().device(0), "thresholds", shortest),
        mock.patch.object(worker_module, "STAGING_BYTES", staging_bytes),
    ):
        worker = KvPagingWorker(layers, aqua, BLOCKS, ends)
        worker.page_out(PagingPlan(out_places=PLACES, out_blocks=OUT))
        try:
            yield worker, layers
        finally:
            worker.close()


@contextlib.contextmanager
def coming_when_asked_for(worker: KvPagingWorker) -> Iterator[None]:
    """All columns but the first are loaded once something waits for a load, one for each wait."""
    asked, page_in, result = threading.Semaphore(0), worker.store.page_in, Future.result  # type: ignore[union-attr] # there

    def page_in_when_asked(*args: Any, columns: Any = None) -> Any:  # noqa: ANN401 - the store's
        if columns is not None and columns.start:
            assert asked.acquire(timeout=HANG_S), "nothing asked for more"
        return page_in(*args, columns=columns)

    def ask(future: Future[None]) -> None:
        if not future.done():
            asked.release()
        result(future)

    with (
        mock.patch.object(worker.store, "page_in", page_in_when_asked),
        mock.patch.object(Future, "result", ask),
    ):
        try:
            yield
        finally:
            asked.release(FEW_LAYERS)


def a_step_reads_its_layers_as_they_come(seed: int) -> None:
    """Blocks that kernels of the last step still read are loaded while the first layers run."""
    with (
        stand_in(seed=seed) as standing,
        borrowing(standing) as (aqua, _),
        paged_out(aqua, FEW_LAYERS) as (worker, layers),
    ):
        engine = standing.stream()
        with torch.cuda.stream(engine):
            engine.wait_stream(torch.cuda.default_stream())
            for layer in layers:
                layer[READ] = 99
            before = layers[-1][READ].clone()
            found = []
            with coming_when_asked_for(worker):
                plan = PagingPlan(in_places=PLACES, in_blocks=INTO)
                worker.page_in(plan, is_layer_wise=True)
                for number, layer in enumerate(layers):
                    worker.await_layer(str(number))
                    found.append(layer[READ].clone())
            assert not worker.take_failed_blocks()
            assert (before.cpu() == 99).all(), "what was there, not what was loaded"
            for number, blocks in enumerate(found):
                assert (blocks.cpu() == number + 1).all(), f"layer {number} was not waited for"


def a_step_writes_before_it_asks_for_a_layer(seed: int) -> None:
    """A request's last block gets tokens of this step, which what is loaded does not overwrite."""
    with (
        stand_in(seed=seed) as standing,
        borrowing(standing) as (aqua, _),
        paged_out(aqua, FEW_LAYERS) as (worker, layers),
        coming_when_asked_for(worker),
    ):
        plan = PagingPlan(in_places=PLACES, in_blocks=INTO, written_blocks=[LAST])
        worker.page_in(plan, is_layer_wise=True)
        half = BLOCK_BYTES // 2
        for number, layer in enumerate(layers):
            layer[LAST, half:] = 77
            worker.await_layer(str(number))
            assert (layer[INTO[0] : LAST].cpu() == number + 1).all()
            assert (layer[LAST, :half].cpu() == number + 1).all()
            assert (layer[LAST, half:].cpu() == 77).all(), "what the step wrote is gone"


def columns_go_by_two_submissions(seed: int) -> None:
    """A column of blocks in several slabs is one copy and one kernel at 80 layers, as a part is."""
    with (
        stand_in(seed=seed) as standing,
        consuming(8, SLAB, transport=standing.transport()) as aqua,
        paged_out(aqua, LAYERS) as (worker, layers),
    ):
        torch.cuda.synchronize()
        counted = standing.machine.submissions
        before = counted.total()
        with mock.patch.object(worker.store, "page_in", wraps=worker.store.page_in) as copies:  # type: ignore[union-attr] # there
            plan = PagingPlan(in_places=PLACES, in_blocks=INTO)
            worker.page_in(plan, is_layer_wise=True)
            assert not worker.take_failed_blocks()
        parts = copies.call_count
        assert parts == len(OUT) // 2, f"{parts} parts, not as many as of whole blocks"
        count = counted.total() - before
        assert count <= 2 * parts, f"{count} submissions for {parts} parts"
        for number in (0, LAYERS // 2, LAYERS - 1):
            assert (layers[number][READ].cpu() == number + 1).all()


LAYER_SCENARIOS: Final = (
    a_step_reads_its_layers_as_they_come,
    a_step_writes_before_it_asks_for_a_layer,
    columns_go_by_two_submissions,
)
