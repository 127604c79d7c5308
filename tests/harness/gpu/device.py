"""The GPU that steps run on: a real one, or the stand-in, by the same names.

What differs is here and nowhere else: how a stream is kept busy, how a graph is captured, how the
memory is filled, and how large things are. On the stand-in everything is small, since its work runs
in Python, and no figure means anything.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.cuda as torch_cuda

from aqua_protocol import GIB, KIB, MIB, TransportError, TransportKind, TransportUnavailableError
from aqualib.transports import select
from aqualib.transports.cuda_driver import CudaDevice, load_driver
from harness.transport_peer import Peer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqualib.transports import Transport
    from harness.cuda.stand_in import StandIn

DRIVERS_OWN_BYTES: Final = 16 * MIB
"""Bytes that a full GPU still has, for kernels that the driver loads when they are first launched.
Doubled, a probe that takes memory of its own might find it."""

KINDS: Final = (TransportKind.CUDA_VMM, TransportKind.CUDA_IPC)


class GpuAtHand(ABC):
    """The first visible GPU.

    Attributes:
        is_stand_in: Whether there is none.
        slab_bytes: What is copied at once where size is not what is measured.
        rounds: Repetitions of a measurement.
        reclaim_bytes: What the large reclaim takes back.
        refusals: Why a transport does not work here.
    """

    is_stand_in: bool
    slab_bytes: int
    rounds: int
    reclaim_bytes: int

    def __init__(self) -> None:
        self.device: Final = torch.device("cuda", 0)
        self.refusals: dict[TransportKind, str] = {}

    @property
    def driver(self) -> CudaDevice:
        """In the driver's terms."""
        return load_driver().device(0)

    def sized(self, nbytes: int, least: int = 2 * MIB) -> int:
        """A size of the real GPU's, or a small one in its place."""
        return max(least, nbytes // 64 // least * least) if self.is_stand_in else nbytes

    @abstractmethod
    def transport(self, kind: TransportKind = TransportKind.CUDA_VMM) -> Transport:
        """A transport that has been tried.

        Raises:
            TransportUnavailableError: It does not work here.
        """

    def transports(self) -> list[Transport]:
        """Those that work; `refusals` says why others do not."""
        found = []
        for kind in KINDS:
            try:
                found.append(self.transport(kind))
            except TransportUnavailableError as error:
                self.refusals[kind] = str(error)
        return found

    def peer(self, kind: TransportKind = TransportKind.CUDA_VMM) -> Peer:
        """A second process on the same GPU."""
        return Peer(kind, stands_in=self.is_stand_in)

    def free_bytes(self) -> int:
        """Memory that nobody has taken."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def empty(self, nbytes: int) -> torch.Tensor:
        """Bytes on the GPU that are set to something."""
        return torch.full((nbytes,), 1, dtype=torch.uint8, device=self.device)

    def stream(self) -> Any:  # noqa: ANN401 - torch's are untyped
        """A stream of torch's."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call] # torch's

    @abstractmethod
    def busy(self, stream: Any, ms: float) -> contextlib.AbstractContextManager[None]:  # noqa: ANN401
        """Keep a stream from running what it is given meanwhile; on a GPU for `ms` milliseconds."""

    @abstractmethod
    def capturing(self) -> contextlib.AbstractContextManager[None]:
        """Capture a graph as engines do: the mode that other threads mind."""

    @abstractmethod
    def full(self) -> contextlib.AbstractContextManager[None]:
        """Leave no memory on the GPU."""

    @abstractmethod
    def check(self) -> None:
        """Raise what has gone wrong on the GPU unnoticed."""


class RealGpu(GpuAtHand):
    """A GPU."""

    is_stand_in = False
    slab_bytes = 64 * MIB
    rounds = 9
    reclaim_bytes = 10 * 1000**3 // (64 * MIB) * 64 * MIB

    def __init__(self) -> None:
        super().__init__()
        self._cycles_per_ms = 0.0

    def transport(self, kind: TransportKind = TransportKind.CUDA_VMM) -> Transport:
        return select(kind, str(self.device))

    @contextlib.contextmanager
    def busy(self, stream: Any, ms: float) -> Iterator[None]:  # noqa: ANN401 - as above
        cycles = int(ms * self._rate())
        with torch.cuda.stream(stream):
            torch_cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        yield

    def _rate(self) -> float:
        """Cycles of `torch.cuda._sleep` in a millisecond."""
        if not self._cycles_per_ms:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call] # torch's
            cycles = 20_000_000
            for _ in range(2):  # The first one warms up.
                begin.record()
                torch_cuda._sleep(cycles)  # type: ignore[no-untyped-call]
                end.record()
                end.synchronize()
            self._cycles_per_ms = cycles / begin.elapsed_time(end)
        return self._cycles_per_ms

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        ones = torch.ones(1 << 10, device=self.device)
        ones.add_(1)  # Its kernel is loaded before the capture.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            ones.add_(1)
            yield
            ones.add_(1)
        graph.replay()
        assert (ones == 4).all(), "the graph does something else than what was captured"

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        torch.cuda.empty_cache()
        gpu = self.driver
        taken: list[int] = []
        nbytes = GIB
        spare = gpu.allocate(DRIVERS_OWN_BYTES)
        try:
            while nbytes >= gpu.granularity:
                try:
                    taken.append(gpu.allocate(nbytes))
                except TransportError:
                    nbytes //= 8
            gpu.release(spare)
            yield
        finally:
            for handle in taken:
                gpu.release(handle)

    def check(self) -> None:
        torch.cuda.synchronize(self.device)


class StandInGpu(GpuAtHand):
    """No GPU."""

    is_stand_in = True
    slab_bytes = 4 * MIB
    rounds = 2
    reclaim_bytes = 32 * MIB

    def __init__(self, standing: StandIn) -> None:
        super().__init__()
        self._standing = standing

    def transport(self, kind: TransportKind = TransportKind.CUDA_VMM) -> Transport:
        return self._standing.transport(kind)

    @contextlib.contextmanager
    def busy(self, stream: Any, ms: float) -> Iterator[None]:  # noqa: ANN401 - as above
        del ms
        with self._standing.machine.held(stream.found):
            yield

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        with self._standing.torch.capturing():
            yield

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        machine = self._standing.machine
        before, machine.memory_bytes = machine.memory_bytes, machine.used[0]
        try:
            yield
        finally:
            machine.memory_bytes = before

    def check(self) -> None:
        self._standing.machine.check()


@contextlib.contextmanager
def gpu_at_hand(*, stands_in: bool) -> Iterator[GpuAtHand]:
    """The GPU, or the stand-in, which raises at the end what rules were broken."""
    if not stands_in:
        gpu = RealGpu()
        yield gpu
        gpu.check()
        return
    from harness.cuda.stand_in import stand_in

    with stand_in(memory_bytes=4 * GIB) as standing:
        yield StandInGpu(standing)


ROW_BYTES: Final = tuple(1 << n for n in range(12, 21))
"""Sizes of rows that are swept: 4 KiB to 1 MiB."""

assert ROW_BYTES[0] == 4 * KIB
