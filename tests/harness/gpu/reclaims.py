"""Reclaims: how soon a lender has its memory back, slab by slab and by the product as a whole."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import torch

from aqua_protocol import MIB, TransportError, TransportKind, format_bytes
from aqualib.host_memory import host_memory_bytes
from harness.bounds import until
from harness.consumers import await_rest, consuming, grant
from harness.gpu.outcome import NotRunError, Outcome
from harness.gpu.sampling import Figure, digits, milliseconds
from harness.producers import lending
from harness.raw_consumer import TokenIssuer

if TYPE_CHECKING:
    from aqualib.transports import MappedSlab, Transport
    from harness.gpu.device import GpuAtHand
    from harness.transport_peer import Peer

SLAB_BYTES: Final = (16 * MIB, 64 * MIB, 256 * MIB)
TENSOR_BYTES: Final = 256 * MIB
"""Of what a consumer keeps while it is reclaimed: layers of a prompt's KV are of this order."""


def reclaim(gpu: GpuAtHand) -> Outcome:
    """10 GB back: copied to pinned memory and unmapped, or unmapped only, by slab size."""
    outcome = Outcome()
    nbytes = _possible(gpu)
    transport = gpu.transport()
    table = outcome.table(
        f"A reclaim of {nbytes / 1e9:.1f} GB, ms",
        *("slabs of", "pin the landing area", "first slab back", "all back", "GB/s"),
        *("all, unmapped only",),
    )
    for wanted in SLAB_BYTES:
        found = _reclaimed(gpu, transport, nbytes, gpu.sized(wanted))
        table.add(format_bytes(gpu.sized(wanted)), *(digits(value) for value in found.values()))
        for name, value in found.items():
            outcome.figures[f"reclaim {format_bytes(wanted)} {name}"] = value
    return outcome


def _reclaimed(
    gpu: GpuAtHand, transport: Transport, nbytes: int, slab_bytes: int
) -> dict[str, float]:
    """What one reclaim takes, by the names of the table's columns."""
    names = [str(number) for number in range(nbytes // slab_bytes)]
    landing: list[MappedSlab] = []
    pin_ms = milliseconds(lambda: landing.extend(transport.create_host(slab_bytes) for _ in names))
    with gpu.peer() as lender:
        for name in names:
            lender.call("create", name=name, nbytes=slab_bytes)
        slabs = _opened(transport, lender, names, slab_bytes)
        first_ms, all_ms = _drain(transport, slabs, landing)
        slabs = _opened(transport, lender, names, slab_bytes)

        def unmap() -> None:
            for slab in slabs:
                slab.close()

        unmap_ms = milliseconds(unmap)
    for host in landing:
        host.close()
    rate = len(names) * slab_bytes / all_ms / 1e6
    return {
        "pin ms": pin_ms,
        "first ms": first_ms,
        "all ms": all_ms,
        "GB/s": rate,
        "unmap ms": unmap_ms,
    }


def _opened(transport: Transport, lender: Peer, names: list[str], nbytes: int) -> list[MappedSlab]:
    return [transport.open(lender.export(name), nbytes) for name in names]


def _drain(
    transport: Transport, slabs: list[MappedSlab], landing: list[MappedSlab]
) -> tuple[float, float]:
    """Milliseconds until the first slab, and until all, lie in host memory and are unmapped."""
    copier = transport.copier(is_background=True)
    first_ms = 0.0
    begin = time.perf_counter()
    for slab, host in zip(slabs, landing, strict=True):
        copier.copy(host.tensor, slab.tensor)
        copier.fence()
        slab.close()
        first_ms = first_ms or (time.perf_counter() - begin) * 1e3
    return first_ms, (time.perf_counter() - begin) * 1e3


def _possible(gpu: GpuAtHand) -> int:
    """What can be reclaimed here: pinned memory for all of it, and half of the rest left alone."""
    unit = gpu.sized(max(SLAB_BYTES))
    room = min(gpu.reclaim_bytes, host_memory_bytes() // 2, gpu.free_bytes() // 2)
    if room < unit:
        raise NotRunError(f"{format_bytes(room)} of memory to spare is too little")
    return room // unit * unit


def product(gpu: GpuAtHand) -> Outcome:
    """The same through a producer and a consumer: offered, leased, filled, reclaimed, compared."""
    outcome = Outcome()
    for writes_behind in (False, True):
        _lend_and_reclaim(gpu, outcome, writes_behind=writes_behind)
    return outcome


def _lend_and_reclaim(gpu: GpuAtHand, outcome: Outcome, *, writes_behind: bool) -> None:
    """One loan, whose bytes are copied at the reclaim, or have been copied before it."""
    slab_bytes = gpu.slab_bytes
    nbytes = _possible(gpu)
    count, size = nbytes // slab_bytes, gpu.sized(TENSOR_BYTES)
    transport, issuer = gpu.transport(), TokenIssuer()
    begin = time.perf_counter()
    with (
        lending(issuer, count, transport=transport, slab_bytes=slab_bytes) as producer,
        consuming(count + 2, slab_bytes, transport=transport, writes_behind=writes_behind) as aqua,
    ):
        ready_ms = (time.perf_counter() - begin) * 1e3
        granted = grant(
            issuer,
            producer.endpoint,
            count,
            slab_bytes=slab_bytes,
            transport=TransportKind.CUDA_VMM,
        )
        attached: list[Any] = []
        attach_ms = milliseconds(lambda: attached.append(aqua.attach(granted)))
        wanted = max(1, (nbytes - 2 * slab_bytes) // size)
        tensors = []
        for number in range(wanted):
            filled = torch.full((size,), number % 250 + 1, dtype=torch.uint8, device=gpu.device)
            tensors.append(aqua.offload(filled))
        begin = time.perf_counter()
        until(lambda: all(t.location.value == "peer" for t in tensors), "all promoted")
        promote_ms = (time.perf_counter() - begin) * 1e3
        if writes_behind:
            await_rest(aqua, is_saved=True)
        begin = time.perf_counter()
        producer.reclaim(nbytes)
        until(lambda: not aqua.attachments, "given back")
        reclaim_ms = (time.perf_counter() - begin) * 1e3
        copied_bytes = aqua.stats().drain_copied_bytes
        wrong = [
            number
            for number, tensor in enumerate(tensors)
            if not bool((tensor.load() == number % 250 + 1).all())
        ]
        for tensor in tensors:
            tensor.release()
    how = "copied before it" if writes_behind else "copied at it"
    outcome.check(
        f"every byte comes back, {how}",
        not wrong,
        f"{len(tensors)} tensors of {format_bytes(size)}",
    )
    table = outcome.table(f"Lent, filled and reclaimed: {nbytes / 1e9:.1f} GB, {how}", "what", "ms")
    stored = len(tensors) * size
    for name, value in {
        "slabs made, host memory pinned": ready_ms,
        "attached": attach_ms,
        "promoted from host memory": promote_ms,
        "reclaimed": reclaim_ms,
    }.items():
        table.add(name, digits(value))
    if writes_behind:
        outcome.check("a reclaim copies nothing", not copied_bytes, format_bytes(copied_bytes))
        outcome.figures["product reclaim written behind ms"] = reclaim_ms
        return
    outcome.figures["product attach ms"] = attach_ms
    outcome.figures["product reclaim ms"] = reclaim_ms
    outcome.figures["product reclaim GB/s"] = stored / reclaim_ms / 1e6
    outcome.notes.append(
        f"{stored / 1e9:.1f} GB were stored; the link that was seen: {attached[0].link}."
    )


def kv_memory(gpu: GpuAtHand) -> Outcome:
    """A KV cache given up and taken back by the granule, as a lending vLLM does."""
    from aqualib.engines.vllm.lending.cuda_memory import CudaKvMemory

    outcome = Outcome()
    nbytes = gpu.sized(4 << 30)
    memory = CudaKvMemory(gpu.device)
    count = nbytes // memory.granule_bytes
    tensors: list[torch.Tensor] = []
    allocate_ms = milliseconds(lambda: tensors.append(memory.allocate(nbytes)))
    tensor = tensors.pop()
    import numpy as np

    every = np.ones(count, np.bool_)
    spent: dict[str, list[float]] = {"release": [], "restore": []}
    zeros_are_read = True
    for _ in range(1 if gpu.is_stand_in else 3):
        tensor.fill_(3)
        spent["release"].append(milliseconds(lambda: memory.release(every)))
        if not gpu.is_stand_in:
            # A kernel that looks ahead of its block table; this ends the context if it is wrong.
            zeros_are_read = zeros_are_read and not bool(tensor[: 64 * MIB].any())
        spent["restore"].append(milliseconds(lambda: memory.restore(every)))
    outcome.check("what was given up reads as zeros", zeros_are_read, "64 MiB")
    outcome.check("and is clean when it is back", not bool(tensor.any()), format_bytes(nbytes))
    table = outcome.table(
        f"{nbytes / 2**30:.1f} GiB of KV cache, {count} granules", "what", "ms", "us a granule"
    )
    figures = {name: Figure.of(values) for name, values in spent.items()}
    for name, figure in {"allocate": Figure.of([allocate_ms]), **figures}.items():
        table.add(name, figure, digits(figure.median * 1e3 / count))
        outcome.figures[f"granule {name} us"] = figure.median * 1e3 / count
    del tensor
    torch.cuda.synchronize(gpu.device)
    try:
        memory.close()
    except TransportError as error:
        outcome.check("the cache is taken apart", False, error)
    return outcome
