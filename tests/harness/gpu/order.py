"""What waits for what: the promises about streams, contexts and captures, on the device itself.

Each was a defect once, found by reading. The stand-in shows that the order is asked for; only a GPU
shows that asking is enough, and that nothing waits which need not.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Final

import torch
import torch._C as torch_c  # noqa: N811 - a module

from aqua_protocol import KIB, MIB, AquaError
from aqualib import probe
from harness.gpu.outcome import NotRunError, Outcome
from harness.gpu.sampling import digits, milliseconds
from harness.threads import in_thread

if TYPE_CHECKING:
    from harness.gpu.device import GpuAtHand

BUSY_MS: Final = 100.0
"""How long the stream is kept busy that must not be waited for. Doubled, the step takes a second
longer."""

SOON_MS: Final = 20.0
"""What does not wait ends within this: a fifth of `BUSY_MS`, and a hundred times what it takes."""

CAPTURES: Final = 20


def order(gpu: GpuAtHand) -> Outcome:
    """Submissions return, the background waits for nobody, captures survive, contexts stay few."""
    outcome = Outcome()
    submissions_return(gpu, outcome)
    background_goes_on(gpu, outcome)
    loads_follow_kernels(gpu, outcome)
    captures_survive(gpu, outcome)
    copiers_leave_nothing(gpu, outcome)
    full_gpu_is_measured(gpu, outcome)
    return outcome


def submissions_return(gpu: GpuAtHand, outcome: Outcome) -> None:
    """`gather` returns while the kernels before it have not run."""
    copier = gpu.transport().copier()
    table = torch.ones((1024, 4 * KIB), dtype=torch.uint8, device=gpu.device)
    packed = torch.empty((256, 4 * KIB), dtype=torch.uint8, device=gpu.device)
    index = torch.randperm(1024, generator=torch.Generator().manual_seed(0))[:256]
    table.add_(0)  # Its kernel is loaded before the stream is busy: loading may wait for that.
    copier.gather(packed, table, index)
    copier.fence()
    stream = gpu.stream()
    stream.wait_stream(torch.cuda.current_stream(gpu.device))
    with gpu.busy(stream, BUSY_MS), torch.cuda.stream(stream):
        table.add_(5)
        spent = milliseconds(lambda: copier.gather(packed, table, index))
        is_waiting = not stream.query()
    copier.fence()
    outcome.figures["gather behind a kernel ms"] = spent
    outcome.check("a gather is queued without waiting", is_waiting, f"{digits(spent)} ms")
    outcome.check("and sees the kernel before it", bool((packed == 6).all()), "bytes compared")


def background_goes_on(gpu: GpuAtHand, outcome: Outcome) -> None:
    """A drain does not wait for the engine's default stream."""
    transport = gpu.transport()
    slab, near = transport.create(gpu.slab_bytes), gpu.empty(gpu.slab_bytes)
    torch.cuda.synchronize(gpu.device)
    default = torch.cuda.default_stream(gpu.device)

    def drain() -> float:
        copier = transport.copier(is_background=True)

        def copy() -> None:
            copier.copy(slab.tensor, near)
            copier.fence()

        copy()
        with gpu.busy(default, BUSY_MS):
            spent = milliseconds(copy)
            outcome.check(
                "and the engine was busy meanwhile", gpu.is_stand_in or not default.query(), ""
            )
        return spent

    spent = in_thread(drain)
    outcome.figures["drain beside a kernel ms"] = spent
    # On the stand-in time says nothing: it records who waits for a stream that is held.
    is_soon = gpu.is_stand_in or spent < SOON_MS
    outcome.check("a drain does not wait for the engine", is_soon, f"{digits(spent)} ms")
    torch.cuda.synchronize(gpu.device)
    slab.close()


def loads_follow_kernels(gpu: GpuAtHand, outcome: Outcome) -> None:
    """A copy of an engine thread comes after the kernels that the thread has launched."""
    transport = gpu.transport()
    copier = transport.copier()
    source, stream = gpu.empty(gpu.slab_bytes), gpu.stream()
    slab = transport.create(gpu.slab_bytes)
    stream.wait_stream(torch.cuda.current_stream(gpu.device))
    with gpu.busy(stream, BUSY_MS / 10), torch.cuda.stream(stream):
        for _ in range(10):
            source.add_(1)
        copier.copy(slab.tensor, source)
    copier.fence()
    outcome.check(
        "a copy sees the kernels before it", bool((slab.tensor == 11).all()), "bytes compared"
    )
    slab.close()


def captures_survive(gpu: GpuAtHand, outcome: Outcome) -> None:
    """Slabs are made, measured, copied and unmapped by a thread while graphs are captured."""
    transport = gpu.transport()
    transport.copier()
    lost: list[str] = []
    refused: list[str] = []

    def lease() -> None:
        try:
            slab = transport.create(2 * MIB)
            probe.measure(transport, slab)
            slab.close()
        except AquaError as error:
            refused.append(str(error))

    in_thread(lease)
    refused.clear()
    for _ in range(2 if gpu.is_stand_in else CAPTURES):
        try:
            with gpu.capturing():
                in_thread(lease)
        except RuntimeError as error:
            lost.append(str(error).splitlines()[0])
    outcome.check("no capture is lost to leasing", not lost, lost[:1] or "none")
    outcome.check("no lease is lost to a capture", not refused, refused[:1] or "none")


def copiers_leave_nothing(gpu: GpuAtHand, outcome: Outcome) -> None:
    """Threads that copied and ended hold no memory."""
    transport = gpu.transport()
    in_thread(lambda: transport.copier().fence())
    torch.cuda.empty_cache()
    before = gpu.free_bytes()
    for _ in range(16):
        in_thread(lambda: transport.copier().fence())
        gc.collect()
    torch.cuda.empty_cache()
    lost = before - gpu.free_bytes()
    outcome.check(
        "copiers of ended threads hold no memory", lost < 32 * MIB, f"{lost / MIB:.0f} MiB"
    )


def full_gpu_is_measured(gpu: GpuAtHand, outcome: Outcome) -> None:
    """A slab can be measured, and blocks be paged, where no memory is left."""
    transport = gpu.transport()
    slab = transport.create(2 * MIB)
    transport.copier()
    torch.cuda.synchronize(gpu.device)
    with gpu.full():
        try:
            link: object = in_thread(lambda: probe.measure(transport, slab))
        except (AquaError, RuntimeError) as error:
            link = error
    outcome.check("a path is measured on a full GPU", isinstance(link, probe.LinkMeasurement), link)
    slab.close()


def second_gpu(gpu: GpuAtHand) -> Outcome:
    """What needs two GPUs: a thread that uses the second only, and slabs between them."""
    if gpu.driver.driver.device_count < 2:
        raise NotRunError("one GPU is visible")
    outcome = Outcome()
    there = torch.device("cuda", 1)
    from aqualib.transports.cuda_vmm import CudaVmmTransport

    transport = CudaVmmTransport(there)

    def work() -> None:
        near = torch.ones(2 * MIB, dtype=torch.uint8, device=there)
        slab, copier = transport.create(2 * MIB), transport.copier()
        copier.copy(slab.tensor, near)
        copier.fence()
        slab.close()

    in_thread(work)
    has_context = torch_c._cuda_hasPrimaryContext(0)  # type: ignore[attr-defined]
    outcome.check("a thread of cuda:1 makes no context on cuda:0", not has_context, has_context)
    if not gpu.driver.can_access(1):
        outcome.notes.append("The GPUs do not reach each other: no slab between them was tried.")
        return outcome
    slab = gpu.transport().create(gpu.slab_bytes)
    mapped = transport.open(slab.export(), gpu.slab_bytes)
    link = probe.measure(transport, mapped)
    outcome.notes.append(f"Between the two GPUs: {link}.")
    outcome.figures["peer out GB/s"] = link.write_bytes_per_s / 1e9
    mapped.close()
    slab.close()
    return outcome
