"""What an engine does beside its tensors in a random walk: its KV cache paged, lent and taken back.

Each step knows what it has put where. Steps that hold a stream still, make a call fail or look at
contexts need the stand-in (`machine`); all others run on a GPU as well.
"""

from __future__ import annotations

import contextlib
from functools import partial, wraps
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from aqua_protocol import TransportError
from aqualib.engines.vllm.lending.cuda_memory import CudaKvMemory
from aqualib.engines.vllm.paging.plan import PagingPlan
from aqualib.engines.vllm.paging.worker import KvPagingWorker
from aqualib.transports import cuda_buffers
from aqualib.transports.cuda_driver import CudaDevice, load_driver
from harness.bounds import until
from harness.consumers import consuming
from harness.gpu_scenarios import GPU, SLAB
from harness.threads import in_thread

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from harness.cuda.machine import Machine
    from harness.gpu.device import GpuAtHand

BLOCKS: Final = 16
LAYERS: Final = 5
PLACES: Final = 6
ROW_BYTES: Final = 512
GRANULES: Final = 4
SUBMISSIONS: Final = 2
"""Of a paged part: a kernel and a copy."""


class FailingGpu:
    """A GPU one call of which fails now and then, before it has done anything."""

    def __init__(self, gpu: CudaDevice) -> None:
        self._gpu = gpu
        self.failing = ""
        self.left = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the GPU's
        if name == self.failing:
            self.left -= 1
            if not self.left:
                self.failing = ""
                return partial(self._refuse, name)
        return getattr(self._gpu, name)

    def _refuse(self, name: str, *_: object, **__: object) -> None:
        raise TransportError(f"{name} refused")


class EngineWalk:
    """A KV cache of some layers with a paging worker, and one that is lent by the granule.

    Args:
        machine: The stand-in's; None on a GPU.
    """

    def __init__(
        self,
        gpu: GpuAtHand,
        machine: Machine | None,
        rng: random.Random,
        owned: contextlib.ExitStack,
    ) -> None:
        self.gpu, self.machine, self.random = gpu, machine, rng
        self.layers = [
            torch.zeros((BLOCKS, ROW_BYTES), dtype=torch.uint8, device=GPU) for _ in range(LAYERS)
        ]
        self.aqua = owned.enter_context(consuming(4, SLAB, transport=gpu.transport()))
        self.worker = KvPagingWorker(self.layers, self.aqua, PLACES)
        self.blocks = dict.fromkeys(range(BLOCKS), 0)
        self.places: dict[int, int] = {}
        self.saves = 0
        self.device = FailingGpu(load_driver().device(0))
        self.memory = CudaKvMemory(GPU, self.device)  # type: ignore[arg-type] # all that it has
        owned.callback(self.memory.close)
        owned.callback(torch.cuda.synchronize)
        self.cache = self.memory.allocate(GRANULES * SLAB)
        self.value = 0
        # All of an engine's kernels go to one stream.
        self.stream: Any = rng.choice([torch.cuda.default_stream(GPU), gpu.stream()])
        self.stream.wait_stream(torch.cuda.default_stream(GPU))
        steps: tuple[Callable[[], None], ...] = (
            *(self.write_blocks, self.blocks_out, self.blocks_in, self.load_beside),
            *(self.save_beside, self.give_up, self.take_back, self.gather_in_threads),
        )
        if machine is not None:
            steps += (self.gather_behind_a_kernel, self.come_from_another_gpu)
        self.steps = tuple(map(self._on_stream, steps))

    def close(self) -> None:
        """Finish what is under way."""
        self.worker.close()

    def _on_stream(self, step: Callable[[], None]) -> Callable[[], None]:
        @wraps(step)
        def run() -> None:
            with torch.cuda.stream(self.stream):
                step()

        return run

    def _next(self) -> int:
        self.value = self.value % 120 + 1  # A cache that is lent is of int8.
        return self.value

    def _some(self, of: Any, most: int) -> list[int]:  # noqa: ANN401 - anything with a length
        return self.random.sample(sorted(of), self.random.randint(1, min(most, len(of))))

    def _counted(self, work: Callable[[], None]) -> None:
        """On the stand-in a part takes no more submissions than it should."""
        if self.machine is None:
            work()
            return
        before = self.machine.submissions[get_ident()]
        work()
        count = self.machine.submissions[get_ident()] - before
        assert count <= SUBMISSIONS, f"{count} submissions for a part"

    # --- Paging -------------------------------------------------------------------------------

    def write_blocks(self) -> None:
        """The engine's kernels fill some blocks."""
        for block in self._some(self.blocks, 3):
            self.blocks[block] = self._next()
            for layer in self.layers:
                layer[block] = self.blocks[block]

    def blocks_out(self) -> None:
        """Some blocks go out and are overwritten at once."""
        blocks = self._some(self.blocks, 3)
        places = self.random.sample(range(PLACES), len(blocks))
        plan = PagingPlan(out_places=places, out_blocks=blocks)
        self.worker.page_out(plan)
        for place, block in zip(places, blocks, strict=True):
            self.places[place] = self.blocks[block]
            self.blocks[block] = 0
            for layer in self.layers:
                layer[block] = 0

    def blocks_in(self) -> None:
        """Some come back, perhaps into other blocks, and are read."""
        if not self.places:
            return
        places = self._some(self.places, 3)
        blocks = self.random.sample(range(BLOCKS), len(places))
        plan = PagingPlan(in_places=places, in_blocks=blocks)
        # Places of several frames, or in any order, are a gather of the store's own.
        if len(places) == 1:
            self._counted(partial(self.worker.page_in, plan))
        else:
            self.worker.page_in(plan)
        self._arrived(places, blocks)

    def load_beside(self) -> None:
        """Blocks that kernels still read are loaded on another thread."""
        if not self.places:
            return
        places = self._some(self.places, 2)
        blocks = self.random.sample(range(BLOCKS), len(places))
        value = self._next()
        for layer in self.layers:
            layer[blocks[0]] = value
        before = self.layers[0][blocks[0]].clone()
        self.worker.page_in(PagingPlan(async_loads={"request": (places, blocks)}))
        until(lambda: self.worker.take_arrived() == {"request"}, "loaded")
        assert (before.cpu() == value).all(), "what was loaded, not what was there"
        self._arrived(places, blocks)

    def save_beside(self) -> None:
        """Blocks that a queued kernel writes are paged out on another thread."""
        self.write_blocks()
        block, place = self.random.randrange(BLOCKS), self.random.randrange(PLACES)
        self.saves += 1
        number = self.saves
        self.worker.page_out(PagingPlan(async_saves={number: ([place], [block])}))

        def is_acknowledged() -> bool:
            report = self.worker.take_report()
            return report is not None and number in report.saved

        until(is_acknowledged, "saved")
        self.places[place] = self.blocks[block]

    def _arrived(self, places: list[int], blocks: list[int]) -> None:
        for place, block in zip(places, blocks, strict=True):
            self.blocks[block] = self.places[place]
            layer = self.random.choice(self.layers)
            assert (layer[block].cpu() == self.places[place]).all(), "another block came back"

    # --- Lending ------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Granules leave under queued kernels, perhaps not all of them."""
        present = np.flatnonzero(~self.memory.absent)
        if not len(present):
            return
        leaving = np.zeros(GRANULES, np.bool_)
        leaving[self._some(present.tolist(), GRANULES)] = True
        value = self._next()
        first = int(present[0]) * SLAB
        self.cache[first : first + SLAB] = value
        last = self.cache[first : first + SLAB].clone()
        with self._failing("unmap_at"):
            self.memory.release(leaving)
        assert (last.cpu() == value).all()
        for granule in np.flatnonzero(self.memory.absent):
            assert not self.cache[granule * SLAB :][:SLAB].any(), "a hole shows something"
        here = ~self.memory.absent
        for granule in np.flatnonzero(here):
            self.cache[granule * SLAB :][:100].fill_(1)

    def take_back(self) -> None:
        """They come back as zeros, all of those asked for or none."""
        absent = self.memory.absent.copy()
        if not absent.any():
            return
        back = np.zeros(GRANULES, np.bool_)
        back[self._some(np.flatnonzero(absent).tolist(), GRANULES)] = True
        before = self._rights()
        with self._failing(self.random.choice(["allocate", "map_run", "zero"])):
            self.memory.restore(back)
            runs = int(np.count_nonzero(np.diff(back.astype(np.int8), prepend=0) == 1))
            assert self._rights() - before <= runs, "rights are given granule by granule"
        if (self.memory.absent == (absent & ~back)).all():
            for granule in np.flatnonzero(back):
                assert not self.cache[granule * SLAB :][:SLAB].any(), "memory came back unclean"
        else:
            assert (self.memory.absent == absent).all(), "some of it came back"
        for granule in np.flatnonzero(~self.memory.absent):
            self.cache[granule * SLAB :][:100].fill_(1)

    def _rights(self) -> int:
        return self.machine.calls["cuMemSetAccess"] if self.machine is not None else 0

    @contextlib.contextmanager
    def _failing(self, name: str) -> Any:  # noqa: ANN401 - a context
        if self.random.random() < 0.5:
            self.device.failing, self.device.left = name, self.random.randint(1, 3)
        try:
            with contextlib.suppress(TransportError):
                yield
        finally:
            self.device.failing = ""

    # --- Rows ---------------------------------------------------------------------------------

    def gather_in_threads(self) -> None:
        """Three threads gather by the same buffers, one of them in many stages."""
        transport = self.gpu.transport()
        count = self.random.choice([64, cuda_buffers.INDEX_ROWS * (cuda_buffers.INDEX_SLOTS + 2)])
        draws = torch.Generator().manual_seed(self.value)
        orders = [torch.randint(64, (rows,), generator=draws) for rows in (64, 64, count)]
        tables = [
            torch.arange(64, dtype=torch.int64, device=GPU)[:, None] + number
            for number in range(len(orders))
        ]
        torch.cuda.synchronize()
        copiers, found = [transport.copier() for _ in tables], []
        for copier, table, order in zip(copiers, tables, orders, strict=True):
            packed = torch.empty((len(order), 1), dtype=torch.int64, device=GPU)
            in_thread(partial(copier.gather, packed, table, order))
            found.append((packed, order))
        for number, (copier, (packed, order)) in enumerate(zip(copiers, found, strict=True)):
            copier.fence()
            assert (packed.cpu()[:, 0] == order + number).all(), "rows of another gather"

    def gather_behind_a_kernel(self) -> None:
        """The kernel that makes the rows has not begun, and nothing waits for it."""
        assert self.machine is not None
        copier = self.gpu.transport().copier()
        table = torch.zeros((64, ROW_BYTES), dtype=torch.uint8, device=GPU)
        packed = torch.empty((32, ROW_BYTES), dtype=torch.uint8, device=GPU)
        table.add_(0)  # Loads its kernel, as the first gather does.
        copier.gather(packed, table, torch.arange(0, 64, 2))
        copier.fence()
        torch.cuda.synchronize()
        engine = self.gpu.stream()
        with torch.cuda.stream(engine), self.machine.held(engine.found):
            table.add_(5)
            copier.gather(packed, table, torch.arange(0, 64, 2))
            assert engine.found.queue, "the engine was waited for"
        copier.fence()
        assert (packed.cpu() == 5).all()

    def come_from_another_gpu(self) -> None:
        """A thread whose own device is another copies here; that one gets no context of it."""
        assert self.machine is not None
        used = self.machine.used[0]
        torch.cuda.empty_cache()

        def work() -> None:
            table = torch.full((64, ROW_BYTES), 3, dtype=torch.uint8, device=GPU)
            packed = torch.empty((32, ROW_BYTES), dtype=torch.uint8, device=GPU)
            torch.cuda.synchronize()
            with torch.cuda.device(1):
                copier = self.gpu.transport().copier()
                copier.gather(packed, table, torch.arange(32, 64))
                copier.fence()

        in_thread(work)
        torch.cuda.empty_cache()
        assert self.machine.contexts_made == {0}, "half a GiB on a GPU that is not used"
        assert self.machine.used[0] <= used, "a thread that has ended keeps memory"
