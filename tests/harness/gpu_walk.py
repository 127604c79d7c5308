"""Random walks of a consumer, on the stand-in or a GPU: any operation, against a model.

A walk holds tensors and blocks whose bytes it knows, and does what engines, producers and bad luck
do: it writes and reads by kernels and copies, pins, pages, drops transfers, lets threads end, takes
leases, reclaims them, ends and kills producers, captures graphs and fills the GPU. What it does
with a KV cache is in `gpu_walk_engine`. What comes back must be what was put in, and no rule of
CUDA may be broken.

On the stand-in a walk goes in episodes, each on a machine of its own, as processes come and go.
What only shows when a process starts, or on a machine of another kind, is a scenario; one of them
stands at the end of each episode, in an order by the seed.

The seed chooses the operations and what the streams do; threads of the product still run as they
like.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import torch

from aqua_protocol import AquaError, TransportKind
from harness.bounds import until
from harness.consumers import consuming, grant
from harness.cuda.stand_in import stand_in
from harness.gpu.device import GpuAtHand, StandInGpu
from harness.gpu_failure_scenarios import FAILURE_SCENARIOS
from harness.gpu_lane_scenarios import LANE_SCENARIOS
from harness.gpu_layer_scenarios import LAYER_SCENARIOS
from harness.gpu_scenarios import GPU, SCENARIOS, SLAB
from harness.gpu_walk_engine import EngineWalk
from harness.producers import lending
from harness.raw_consumer import TokenIssuer
from harness.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from aqualib.blocks import BlockStore
    from aqualib.consumer import Aqua
    from aqualib.producer.producer import Producer
    from aqualib.tensor import AquaTensor
    from harness.cuda.machine import Machine

MAX_TENSORS: Final = 4
BLOCKS: Final = 8
BLOCK_BYTES: Final = 1024
MAX_LEFT: Final = 4
"""Transfers that are left by threads that end, whose slots are not used again."""
EPISODE: Final = 100
"""Operations on one machine, unless a walk is to have longer ones."""
CHECKED_EVERY: Final = 20
"""Operations between looks at what the stand-in has found."""


class Walk:
    """One consumer with up to one producer, and what their bytes should be."""

    def __init__(
        self, gpu: GpuAtHand, aqua: Aqua, seed: int, machine: Machine | None = None
    ) -> None:
        self.gpu = gpu
        self.aqua = aqua
        self.random = random.Random(seed)
        self.issuer = TokenIssuer()
        self.producer: Producer | None = None
        self.lending, self.lent = contextlib.ExitStack(), contextlib.ExitStack()
        self.tensors: dict[AquaTensor, int] = {}
        self.blocks: BlockStore = aqua.block_store(BLOCK_BYTES, BLOCKS)
        self.paged: dict[int, int] = {}
        self.done: Counter[str] = Counter()
        self.left_slots = 0
        self.value = 0
        self.stream: Any = gpu.stream()
        self.machine = machine
        self.engine = EngineWalk(gpu, machine, self.random, self.lending)
        self.steps: tuple[Callable[[], None], ...] = (
            *(self.offload, self.load, self.overwrite, self.read_by_kernel, self.write_by_kernel),
            *(self.release, self.page_out, self.page_in, self.drop_a_transfer, self.end_a_thread),
            *(self.lend, self.reclaim, self.end_producer, self.kill_producer, self.capture),
            *(self.fill_gpu, self.drain_beside_a_busy_engine, *self.engine.steps),
        )

    def run(self, count: int) -> None:
        """So many operations; raises `AssertionError` with what went wrong."""
        for number in range(count):
            step = self.random.choice(self.steps)
            with torch.cuda.stream(self.random.choice([None, self.stream])):
                step()
            self.done[step.__name__] += 1
            if number % CHECKED_EVERY == 0:
                self.gpu.check()
        self.gpu.check()

    def close(self) -> None:
        """Give everything back."""
        for tensor in list(self.tensors):
            tensor.release()
        self.blocks.close()
        self.engine.close()
        self.lent.close()
        self.lending.close()

    # --- An engine ------------------------------------------------------------------------

    def _new(self, count: int) -> tuple[torch.Tensor, int]:
        self.value = self.value % 250 + 1
        return torch.full((count,), self.value, dtype=torch.uint8, device=GPU), self.value

    @property
    def _room(self) -> int:
        return BLOCKS - len(self.paged) - self.left_slots

    def _any(self) -> AquaTensor | None:
        return self.random.choice(list(self.tensors)) if self.tensors else None

    def offload(self) -> None:
        if len(self.tensors) < MAX_TENSORS:
            source, value = self._new(self.random.choice([100, 5000, 70_000]))
            self.tensors[self.aqua.offload(source)] = value

    def load(self) -> None:
        if (tensor := self._any()) is not None:
            found = tensor.load()
            assert (found.cpu() == self.tensors[tensor]).all(), "other bytes came back"

    def overwrite(self) -> None:
        if (tensor := self._any()) is not None:
            source, self.tensors[tensor] = self._new(tensor.nbytes)
            tensor.store(source)

    def read_by_kernel(self) -> None:
        if (tensor := self._any()) is not None:
            with tensor.pinned(writes=False) as view:
                total = view.clone()
            assert (total.cpu() == self.tensors[tensor]).all(), "a kernel read other bytes"

    def write_by_kernel(self) -> None:
        if (tensor := self._any()) is not None:
            self.value = self.value % 250 + 1
            with tensor.pinned() as view:
                view.fill_(self.value)
            self.tensors[tensor] = self.value

    def release(self) -> None:
        if (tensor := self._any()) is not None:
            del self.tensors[tensor]
            tensor.release()

    def page_out(self) -> None:
        if self._room > 0:
            source, value = self._new(BLOCK_BYTES)
            slots, transfer = self.blocks.page_out(source.view(1, -1))
            transfer.wait()
            self.paged[int(slots[0])] = value
            source.fill_(0)

    def page_in(self) -> None:
        if self.paged:
            slots = self.random.sample(list(self.paged), self.random.randint(1, len(self.paged)))
            rows = torch.empty((len(slots), BLOCK_BYTES), dtype=torch.uint8, device=GPU)
            self.blocks.page_in(torch.tensor(slots), rows).wait()
            for row, slot in zip(rows.cpu(), slots, strict=True):
                assert (row == self.paged[slot]).all(), "other blocks came back"
            if self.random.random() < 0.5:
                self.blocks.free(torch.tensor(slots))
                for slot in slots:
                    del self.paged[slot]

    def drop_a_transfer(self) -> None:
        if self._room > 1:
            source, value = self._new(BLOCK_BYTES)
            slots, _ = self.blocks.page_out(source.view(1, -1))
            self.page_out()  # Ends what its thread has dropped.
            self.paged[int(slots[0])] = value

    def end_a_thread(self) -> None:
        if self.left_slots < MAX_LEFT and self._room > 0:
            self.left_slots += 1  # Nothing says when what it started has ended.
            in_thread(lambda: self.blocks.page_out(self._new(BLOCK_BYTES)[0].view(1, -1)))

    # --- A producer -----------------------------------------------------------------------

    def lend(self) -> None:
        if self.producer is None:
            transport = self.gpu.transport()
            self.producer = self.lent.enter_context(
                lending(self.issuer, 2, transport=transport, slab_bytes=SLAB)
            )
        elif not self.aqua.attachments and self.producer.offered_bytes >= 2 * SLAB:
            granted = grant(
                self.issuer,
                self.producer.endpoint,
                2,
                slab_bytes=SLAB,
                transport=TransportKind.CUDA_VMM,
            )
            with contextlib.suppress(AquaError):  # Slabs of the last lease may be on their way.
                self.aqua.attach(granted)
                self.done["attached"] += 1

    def reclaim(self) -> None:
        if self.producer is not None and self.aqua.attachments:
            self.producer.reclaim(SLAB)
            self.done["reclaimed"] += 1

    def end_producer(self) -> None:
        if self.producer is not None and self.random.random() < 0.3:
            self.producer.reclaim(2 * SLAB)
            until(lambda: not self.aqua.attachments, "given back")
            self.lent.close()
            self.producer = None

    def kill_producer(self) -> None:
        """Its end of the channel closes at once; what it lent is drained from where it is."""
        if self.producer is not None and self.random.random() < 0.3:
            for attachment in self.aqua.attachments:
                attachment.channel.shutdown()
                self.done["killed"] += 1
            until(lambda: not self.aqua.attachments, "drained")
            self.lent.close()
            self.producer = None

    def drain_beside_a_busy_engine(self) -> None:
        """Slabs go home while the engine's default stream does not move."""
        if self.producer is None or not self.aqua.attachments or self.machine is None:
            return
        self.gpu.check()
        default: Any = torch.cuda.default_stream(GPU)
        with torch.cuda.stream(default):  # Freed to that stream, too, while it is still in use.
            busy = torch.zeros(64, dtype=torch.uint8, device=GPU)
            busy.add_(0)  # Loads its kernel.
        torch.cuda.synchronize()
        with torch.cuda.stream(default), self.machine.held(default.found):
            busy.add_(1)
            self.producer.reclaim(2 * SLAB)
            until(lambda: not self.aqua.attachments, "given back")
            assert default.found.queue, "the engine was waited for"

    # --- Luck -----------------------------------------------------------------------------

    def capture(self) -> None:
        with self.gpu.capturing():
            in_thread(self.random.choice([self.lend, self.reclaim]))

    def fill_gpu(self) -> None:
        with self.gpu.full(), contextlib.suppress(AquaError, torch.OutOfMemoryError):
            self.random.choice([self.load, self.reclaim, self.page_in, self.lend])()


def walk(seed: int, count: int, *, episode: int = EPISODE) -> Counter[str]:
    """A walk of `count` operations on the stand-in; returns how many of each it did.

    Raises:
        AssertionError: Other bytes than were put in, or a broken rule.
        AquaError: The product failed where nothing had.
    """
    done: Counter[str] = Counter()
    scenarios = [*SCENARIOS, *LAYER_SCENARIOS, *LANE_SCENARIOS, *FAILURE_SCENARIOS]
    random.Random(seed // len(scenarios)).shuffle(scenarios)
    for number, start in enumerate(range(0, count, episode)):
        own_seed = seed * 1009 + number
        with stand_in(seed=own_seed, gpu_count=2) as standing:
            gpu = StandInGpu(standing)
            done += walk_on(gpu, own_seed, min(episode, count - start), standing.machine)
        scenario = scenarios[(seed + number) % len(scenarios)]
        scenario(random.Random(own_seed).randrange(1000))
        done[scenario.__name__] += 1
    return done


def walk_on(gpu: GpuAtHand, seed: int, count: int, machine: Machine | None = None) -> Counter[str]:
    """One episode on a GPU at hand."""
    with consuming(16, SLAB, transport=gpu.transport(), is_checking=seed % 2 == 1) as aqua:
        walking = Walk(gpu, aqua, seed, machine)
        try:
            walking.run(count)
        finally:
            walking.close()
    return walking.done
