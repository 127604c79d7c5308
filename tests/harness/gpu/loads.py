"""Aqua beside an engine: what paging costs, and what a running kernel loses to copies."""

from __future__ import annotations

import statistics
import threading
from typing import TYPE_CHECKING, Final

import torch

from aqua_protocol import KIB, MIB, format_bytes
from aqualib.engines.vllm.paging.plan import PagingPlan
from aqualib.engines.vllm.paging.worker import KvPagingWorker
from harness.consumers import consuming
from harness.gpu.copies import runs_at_random, yardsticks
from harness.gpu.outcome import Outcome
from harness.gpu.sampling import Figure, digits, durations, milliseconds

if TYPE_CHECKING:
    from collections.abc import Callable

    from aqualib.transports import MappedSlab, Transport
    from harness.gpu.device import GpuAtHand

LAYERS: Final = (32, 80)
PAGED_BLOCKS: Final = 256
BLOCK_ROW_BYTES: Final = 32 * KIB
"""Of a layer's keys, or values: 16 tokens of 8 heads of 128 numbers of 2 bytes."""


def paging(gpu: GpuAtHand) -> Outcome:
    """Blocks of a KV cache to host memory and back, by the worker of the vLLM adapter."""
    outcome = Outcome()
    transport = gpu.transport()
    plain_rates = yardsticks(gpu)
    table = outcome.table(
        "Paging a KV cache to pinned memory, GB/s",
        *("layers", "blocks", "a block", "out", "of torch's", "in", "of torch's"),
        *("by layers", "first layer after"),
    )
    blocks = 8 if gpu.is_stand_in else PAGED_BLOCKS
    for layers in LAYERS:
        count = 2 * layers
        caches = [
            torch.full(
                (2 * blocks, BLOCK_ROW_BYTES), n % 250 + 1, dtype=torch.uint8, device=gpu.device
            )
            for n in range(count)
        ]
        block_bytes = count * BLOCK_ROW_BYTES
        slab_bytes = max(gpu.slab_bytes, 2 * block_bytes)  # The stand-in's hold not even one.
        slabs = 2 * blocks * block_bytes // slab_bytes + 16
        with consuming(slabs, slab_bytes, transport=transport) as aqua:
            ends = {str(n): (n + 1) * BLOCK_ROW_BYTES for n in range(count)}
            worker = KvPagingWorker(caches, aqua, blocks, ends)
            chosen = runs_at_random(2 * blocks, 1, blocks).tolist()
            places = list(range(len(chosen)))
            out = PagingPlan(out_places=places, out_blocks=chosen)
            back = PagingPlan(in_places=places, in_blocks=chosen)
            moved = len(chosen) * block_bytes
            firsts: list[float] = []

            def go_in(worker: KvPagingWorker = worker, back: PagingPlan = back) -> None:
                worker.page_in(back)
                torch.cuda.synchronize(gpu.device)

            def go_in_by_layers(
                worker: KvPagingWorker = worker,
                back: PagingPlan = back,
                firsts: list[float] = firsts,
            ) -> None:
                worker.page_in(back, is_layer_wise=True)
                firsts.append(milliseconds(lambda: worker.await_layer("0")))
                worker.take_failed_blocks()

            def go_out(worker: KvPagingWorker = worker, out: PagingPlan = out) -> None:
                worker.page_out(out)

            out_ms, in_ms = durations(go_out, gpu.rounds), durations(go_in, gpu.rounds)
            by_layers_ms = durations(go_in_by_layers, gpu.rounds)
            first = Figure.of(firsts[1:]).median / by_layers_ms.median
            are_whole = not worker.failures and all(
                bool((c == n % 250 + 1).all()) for n, c in enumerate(caches)
            )
            outcome.check(f"{layers} layers: blocks are what they were", are_whole, "all compared")
            worker.close()
        rates = [moved / ms.median / 1e6 for ms in (out_ms, in_ms)]
        ratios = [
            rates[0] / plain_rates["to pinned"].median,
            rates[1] / plain_rates["from pinned"].median,
        ]
        table.add(
            *(layers, len(chosen), format_bytes(block_bytes)),
            *(digits(rates[0]), f"{ratios[0]:.2f}", digits(rates[1]), f"{ratios[1]:.2f}"),
            *(digits(moved / by_layers_ms.median / 1e6), f"{first:.0%}"),
        )
        outcome.figures[f"paging {layers} layers by layers ratio"] = (
            in_ms.median / by_layers_ms.median
        )
        outcome.figures[f"paging {layers} layers first share"] = first
        outcome.figures[f"paging {layers} layers out ratio"] = ratios[0]
        outcome.figures[f"paging {layers} layers in ratio"] = ratios[1]
    return outcome


def interference(gpu: GpuAtHand) -> Outcome:
    """How much longer kernels take while slabs are copied beside them."""
    outcome = Outcome()
    transport = gpu.transport()
    nbytes = gpu.slab_bytes
    slab, host = transport.create(nbytes), transport.create_host(nbytes)
    big = torch.zeros(gpu.sized(1 << 30) // 4, device=gpu.device)
    side = 128 if gpu.is_stand_in else 8192
    left = torch.ones((side, side), dtype=torch.bfloat16, device=gpu.device)
    out = torch.empty_like(left)
    rows = gpu.empty(4 * nbytes).view(-1, 16 * KIB)
    near = gpu.empty(nbytes)
    torch.cuda.synchronize(gpu.device)
    kernels: dict[str, Callable[[], object]] = {
        "of memory": lambda: big.add_(1),
        "of tensor cores": lambda: torch.mm(left, left, out=out),
    }
    index = runs_at_random(len(rows), 1, nbytes // (16 * KIB))
    packed = {"slab": slab.tensor.view(-1, 16 * KIB), "host": host.tensor.view(-1, 16 * KIB)}
    copies: dict[str, Callable[[object], None]] = {
        "slab, whole": lambda c: c.copy(slab.tensor, near),  # type: ignore[attr-defined] # a copier
        "host, whole": lambda c: c.copy(host.tensor, near),  # type: ignore[attr-defined] # as above
        "slab, rows of 16 KiB": lambda c: c.gather(packed["slab"][: len(index)], rows, index),  # type: ignore[attr-defined] # as above
        "host, rows of 16 KiB": lambda c: c.gather(packed["host"][: len(index)], rows, index),  # type: ignore[attr-defined] # as above
    }
    table = outcome.table(
        "Kernels beside copies of a background copier",
        "kernels",
        "copies to",
        "slower by",
        "copies, GB/s",
    )
    for kernel_name, kernel in kernels.items():
        alone = _kernels_ms(gpu, kernel)
        for copy_name, copy in copies.items():
            beside, rate = _beside(gpu, transport, kernel, copy, nbytes)
            slower = beside.median / alone.median - 1
            table.add(kernel_name, copy_name, f"{slower:+.1%}", digits(rate))
            outcome.figures[f"interference {kernel_name} {copy_name}"] = slower
    copies.clear()
    kernels.clear()
    packed.clear()
    slab.close()
    host.close()
    return outcome


def _kernels_ms(gpu: GpuAtHand, kernel: Callable[[], object]) -> Figure:
    """Milliseconds of a batch of kernels on a stream of their own."""
    stream = gpu.stream()
    stream.wait_stream(torch.cuda.current_stream(gpu.device))
    count = 2 if gpu.is_stand_in else 100

    def batch() -> None:
        with torch.cuda.stream(stream):
            for _ in range(count):
                kernel()
        stream.synchronize()

    figure = durations(batch, gpu.rounds)
    torch.cuda.current_stream(gpu.device).wait_stream(stream)
    return figure


def _beside(
    gpu: GpuAtHand,
    transport: Transport,
    kernel: Callable[[], object],
    copy: Callable[[object], None],
    nbytes: int,
) -> tuple[Figure, float]:
    """The same beside a thread that copies, and the GB/s of that."""
    begun, enough, moved = threading.Event(), threading.Event(), [0]

    def work() -> None:
        copier = transport.copier(is_background=True)
        while not enough.is_set():
            for _ in range(4):
                copy(copier)
            copier.fence()
            moved[0] += 4 * nbytes
            begun.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    before, figures = moved[0], []
    spent = milliseconds(lambda: figures.append(_kernels_ms(gpu, kernel)))
    rate = (moved[0] - before) / spent / 1e6
    enough.set()
    thread.join()
    return figures[0], rate


def pinning(gpu: GpuAtHand) -> Outcome:
    """How long host memory takes to be ready: as one piece, and as slabs."""
    outcome = Outcome()
    transport = gpu.transport()
    nbytes = gpu.sized(1 << 30)
    whole = statistics.median(_pinned(transport, nbytes, 1) for _ in range(2))
    slab_bytes = min(nbytes, 64 * MIB)
    by_slab = statistics.median(
        _pinned(transport, slab_bytes, nbytes // slab_bytes) for _ in range(2)
    )
    table = outcome.table(f"{format_bytes(nbytes)} of pinned memory, ms", "as", "ms", "GB/s")
    for name, ms in (("one piece", whole), (f"slabs of {format_bytes(slab_bytes)}", by_slab)):
        table.add(name, digits(ms), digits(nbytes / ms / 1e6))
    outcome.figures["pinning GB/s"] = nbytes / by_slab / 1e6
    return outcome


def _pinned(transport: Transport, nbytes: int, count: int) -> float:
    made: list[MappedSlab] = []
    spent = milliseconds(lambda: made.extend(transport.create_host(nbytes) for _ in range(count)))
    for host in made:
        host.close()
    return spent
