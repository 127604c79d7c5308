"""Plain copies, slabs by size, rows by size and run, and copiers side by side: what paths carry.

Everything is a rate beside its yardstick of the same process and minute: a copy inside the device
and copies to and from pinned memory, by torch and by nothing of ours.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Final

import torch

from aqua_protocol import GIB, KIB, MIB, format_bytes
from aqualib.transports import MappedSlab
from aqualib.transports.cuda_vmm import CudaVmmTransport
from aqualib.transports.gpu_thresholds import CopyThresholds
from harness.gpu.device import ROW_BYTES
from harness.gpu.outcome import Outcome
from harness.gpu.sampling import Figure, digits, milliseconds, rates

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqualib.transports import Copier, Transport
    from harness.gpu.device import GpuAtHand
    from harness.transport_peer import Peer

COPIES: Final = 16
"""Copies between two waits. Doubled, launching counts half, and steps take twice as long."""

LANES: Final = (1, 2, 3, 4)
RUN_ROWS: Final = (1, 2, 4, 8, 16, 32, 64)
RUN_ROW_BYTES: Final = 16 * KIB
"""Of the rows whose runs are swept: a KV page of a layer is of this order."""

LIFE_BYTES: Final = (2 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
STEPS_OF_LIFE: Final = ("create", "export", "open", "unmap", "free")


def yardsticks(gpu: GpuAtHand) -> dict[str, Figure]:
    """Plain copies by torch, in GB/s: inside the device, to pinned memory and from it."""
    nbytes = gpu.slab_bytes
    here, there = gpu.empty(nbytes), gpu.empty(nbytes)
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=True)
    stream = gpu.stream()
    torch.cuda.synchronize(gpu.device)

    def many(dst: torch.Tensor, src: torch.Tensor) -> None:
        with torch.cuda.stream(stream):
            for _ in range(COPIES):
                dst.copy_(src, non_blocking=True)
        stream.synchronize()

    pairs = {"device": (there, here), "to pinned": (host, here), "from pinned": (here, host)}
    return {
        name: rates(COPIES * nbytes, lambda dst=dst, src=src: many(dst, src), gpu.rounds)  # type: ignore[misc] # bound now
        for name, (dst, src) in pairs.items()
    }


def plain(gpu: GpuAtHand) -> Outcome:
    """Slabs of a second process and pinned slabs, against plain copies."""
    outcome = Outcome()
    plain_rates = yardsticks(gpu)
    table = outcome.table(
        f"Copies of {format_bytes(gpu.slab_bytes)}, GB/s", "path", "rate", "of its yardstick"
    )
    for name, figure in plain_rates.items():
        table.add(f"torch, {name}", figure, "")
        outcome.figures[f"plain {name} GB/s"] = figure.median
    for transport in gpu.transports():
        kind = transport.kind.value
        with borrowed(gpu, transport, gpu.slab_bytes) as slab:
            near, copier = gpu.empty(gpu.slab_bytes), transport.copier()
            host = transport.create_host(gpu.slab_bytes)
            ways = {
                "into a borrowed slab": (slab.tensor, near, "device"),
                "out of a borrowed slab": (near, slab.tensor, "device"),
                "into a pinned slab": (host.tensor, near, "to pinned"),
                "out of a pinned slab": (near, host.tensor, "from pinned"),
            }
            for name, (dst, src, yardstick) in ways.items():
                found = copy_rate(gpu, copier, dst, src)
                ratio = found.median / plain_rates[yardstick].median
                table.add(f"{kind}, {name}", found, f"{ratio:.2f}")
                outcome.figures[f"{kind} {name} ratio"] = ratio
            del near, dst, src, ways
            host.close()
    return outcome


def copy_rate(gpu: GpuAtHand, copier: Copier, dst: torch.Tensor, src: torch.Tensor) -> Figure:
    """GB/s of many copies between two fences."""

    def many() -> None:
        for _ in range(COPIES):
            copier.copy(dst, src)
        copier.fence()

    return rates(COPIES * dst.nbytes, many, gpu.rounds)


@contextlib.contextmanager
def borrowed(gpu: GpuAtHand, transport: Transport, nbytes: int) -> Iterator[MappedSlab]:
    """A slab of a second process on the same GPU, which has filled it."""
    with gpu.peer(transport.kind) as lender:
        lender.call("create", name="lent", nbytes=nbytes)
        lender.call("fill", name="lent", seed=1)
        slab = transport.open(lender.export("lent"), nbytes)
        try:
            yield slab
        finally:
            slab.close()


def slabs(gpu: GpuAtHand) -> Outcome:
    """What a slab's life costs, by its size: on the lender's side, and on the borrower's."""
    outcome = Outcome()
    for transport in gpu.transports():
        kind = transport.kind.value
        table = outcome.table(f"{kind}: a slab's life, ms", "slab", *STEPS_OF_LIFE)
        lines = {step: outcome.curve(f"{kind}: a slab's life, ms", step) for step in STEPS_OF_LIFE}
        with gpu.peer(transport.kind) as lender:
            for wanted in LIFE_BYTES:
                nbytes = gpu.sized(wanted)
                lives = [life(transport, lender, nbytes) for _ in range(gpu.rounds + 1)][1:]
                found = [Figure.of(values) for values in zip(*lives, strict=True)]
                table.add(format_bytes(nbytes), *found)
                for step, figure in zip(STEPS_OF_LIFE, found, strict=True):
                    outcome.figures[f"{kind} {step} {format_bytes(wanted)} ms"] = figure.median
                    line = lines[step]
                    line.x.append(wanted / MIB)
                    line.y.append(figure.median)
                    line.low.append(figure.low)
                    line.high.append(figure.high)
    return outcome


def life(transport: Transport, lender: Peer, nbytes: int) -> tuple[float, ...]:
    """Milliseconds of each step, one slab."""
    created = lender.call("create", name="slab", nbytes=nbytes)
    exported = lender.call("export", name="slab")
    handle, opened = exported.as_handle(), list[MappedSlab]()
    open_ms = milliseconds(lambda: opened.append(transport.open(handle, nbytes)))
    unmap_ms = milliseconds(opened.pop().close)
    freed = lender.call("close", name="slab")
    return created.spent_ms, exported.spent_ms, open_ms, unmap_ms, freed.spent_ms


def rows(gpu: GpuAtHand) -> Outcome:
    """Scattered rows by their size, and rows of one size by the length of their runs.

    Both routes of the copier for each, staged and direct, so that a threshold can be chosen.
    """
    outcome = Outcome()
    transport = gpu.transport()
    copier, device = transport.copier(), gpu.driver
    before = device.thresholds
    packed_bytes = gpu.slab_bytes
    table_rows = gpu.empty(4 * packed_bytes)
    host = transport.create_host(packed_bytes)
    try:
        with borrowed(gpu, transport, packed_bytes) as slab:
            for side, packed in (("host", host.tensor), ("device", slab.tensor)):
                title = f"Rows, other side: {side}; GB/s"
                table = outcome.table(
                    title,
                    *("rows", "in runs of", "run", "out staged", "out direct"),
                    *("in staged", "in direct"),
                )
                shapes = [(nbytes, 1) for nbytes in ROW_BYTES]
                shapes += [(RUN_ROW_BYTES, count) for count in RUN_ROWS[1:]]
                for row_bytes, run in shapes:
                    index = runs_at_random(
                        table_rows.nbytes // row_bytes, run, packed_bytes // row_bytes
                    )
                    cells = []
                    for way in ("out", "in"):
                        for route in ("staged", "direct"):
                            limit = GIB if route == "staged" else 1
                            device.thresholds = CopyThresholds(
                                device_run_bytes=limit, host_run_bytes=limit
                            )
                            found = row_rate(gpu, copier, packed, table_rows, row_bytes, index, way)
                            cells.append(found)
                            key = f"{side} {way} {route} {row_bytes}x{run}"
                            for part, value in found.as_json().items():
                                outcome.figures[f"{key} {part}"] = value
                            if run == 1:
                                line = next(
                                    (
                                        c
                                        for c in outcome.curves
                                        if c.label == f"{way}, {route}" and c.plot == title
                                    ),
                                    None,
                                ) or outcome.curve(title, f"{way}, {route}")
                                line.x.append(row_bytes / KIB)
                                line.y.append(found.median)
                                line.low.append(found.low)
                                line.high.append(found.high)
                    table.add(
                        *(format_bytes(row_bytes), run, format_bytes(row_bytes * run)),
                        *(digits(cell.median) for cell in cells),
                    )
            del packed
    finally:
        device.thresholds = before
        host.close()
    return outcome


def runs_at_random(row_count: int, run: int, wanted: int) -> torch.Tensor:
    """Numbers of `wanted` rows, in runs of neighbours that lie anywhere."""
    generator = torch.Generator().manual_seed(run)
    # Every second place, so that two runs are never neighbours.
    places = torch.randperm(row_count // (2 * run), generator=generator) * 2 * run
    chosen = places[: max(1, wanted // run)]
    return (chosen[:, None] + torch.arange(run)).reshape(-1)


def row_rate(
    gpu: GpuAtHand,
    copier: Copier,
    packed: torch.Tensor,
    table: torch.Tensor,
    row_bytes: int,
    index: torch.Tensor,
    way: str,
) -> Figure:
    """GB/s of a few gathers into `packed`, or scatters out of it."""
    there = table.view(-1, row_bytes)
    here = packed.view(-1, row_bytes)[: len(index)]

    def many() -> None:
        for _ in range(2):
            if way == "out":
                copier.gather(here, there, index)
            else:
                copier.scatter(there, here, index)
        copier.fence()

    return rates(2 * here.nbytes, many, max(2, gpu.rounds - 3))


def lanes(gpu: GpuAtHand) -> Outcome:
    """Copiers of several threads at once, and copies of one over several lanes.

    The latter to and from pinned memory, and slabs of all other GPUs that this one reaches, so that
    with two of them a copy has two links.
    """
    outcome = Outcome()
    transport = gpu.transport()
    nbytes = gpu.slab_bytes
    hosts = [transport.create_host(nbytes) for _ in LANES]
    nears = [gpu.empty(nbytes) for _ in LANES]
    torch.cuda.synchronize(gpu.device)
    table = outcome.table("Copiers at once, host memory, GB/s in all", "lanes", "out", "in", "both")
    for count in LANES:
        cells = []
        for way in ("out", "in", "both"):
            pairs = [
                (near, host.tensor)
                if way == "in" or (way == "both" and n % 2)
                else (host.tensor, near)
                for n, (near, host) in enumerate(zip(nears[:count], hosts, strict=False))
            ]
            found = together(gpu, transport, pairs)
            cells.append(found)
            outcome.figures[f"{count} lanes {way} GB/s"] = found.median
        table.add(count, *cells)
    del pairs
    sides = {"host": hosts[:1], "device": _slabs_elsewhere(gpu, transport)}
    for side, slabs in sides.items():
        if not slabs:
            outcome.notes.append("No other GPU is reached: lanes to slabs of GPUs were not tried.")
            continue
        title = f"Copies over several lanes, other side: {side}, {len(slabs)} slabs; GB/s"
        table = outcome.table(title, "lanes", "out", "in")
        for count in LANES:
            cells = []
            for way in ("out", "in"):
                found = _lane_rate(gpu, transport, slabs, count, way)
                cells.append(found)
                for part, value in found.as_json().items():
                    outcome.figures[f"{side} {way} over {count} lanes {part}"] = value
            table.add(count, *cells)
        for slab in slabs:
            slab.close()
    rate = outcome.figures
    outcome.figures["two lanes of a copy out ratio"] = (
        rate["host out over 2 lanes median"] / rate["host out over 1 lanes median"]
    )
    for host in hosts[1:]:
        host.close()
    return outcome


def _slabs_elsewhere(gpu: GpuAtHand, transport: Transport) -> list[MappedSlab]:
    """A slab of each other GPU that this one reaches."""
    others = [n for n in range(gpu.driver.driver.device_count) if n != gpu.driver.ordinal]
    found = []
    for ordinal in filter(gpu.driver.can_access, others):
        slab = CudaVmmTransport(torch.device("cuda", ordinal)).create(gpu.slab_bytes)
        found.append(transport.open(slab.export(), gpu.slab_bytes))
        slab.close()  # The mapping keeps the memory.
    return found


def _lane_rate(
    gpu: GpuAtHand,
    transport: Transport,
    slabs: list[MappedSlab],
    count: int,
    way: str,
) -> Figure:
    """GB/s of copies to or from slabs in batches of one for each, over so many lanes."""
    before = gpu.driver.thresholds
    nears = [gpu.empty(slab.nbytes) for slab in slabs]  # Copies of a batch share no bytes.
    torch.cuda.synchronize(gpu.device)
    gpu.driver.thresholds = CopyThresholds(device_lanes=count, host_lanes=count)
    try:
        copier = transport.copier()

        def many() -> None:
            for _ in range(COPIES // len(slabs)):
                with copier.batched():
                    for slab, near in zip(slabs, nears, strict=True):
                        pair = (slab.tensor, near) if way == "out" else (near, slab.tensor)
                        copier.copy(*pair)
            copier.fence()

        nbytes = COPIES // len(slabs) * sum(near.nbytes for near in nears)
        return rates(nbytes, many, gpu.rounds)
    finally:
        gpu.driver.thresholds = before


def together(
    gpu: GpuAtHand, transport: Transport, pairs: list[tuple[torch.Tensor, torch.Tensor]]
) -> Figure:
    """GB/s of one thread a pair, each with a copier of its own, begun at once."""
    gate, copiers = threading.Barrier(len(pairs) + 1), [transport.copier() for _ in pairs]
    values: list[float] = []

    def work(copier: Copier, dst: torch.Tensor, src: torch.Tensor) -> None:
        for _ in range(gpu.rounds + 1):
            gate.wait()
            for _ in range(COPIES):
                copier.copy(dst, src)
            copier.fence()
            gate.wait()

    threads = [
        threading.Thread(target=work, args=(copier, *pair))
        for copier, pair in zip(copiers, pairs, strict=True)
    ]
    for thread in threads:
        thread.start()
    for _ in range(gpu.rounds + 1):
        gate.wait()
        spent_ms = milliseconds(gate.wait)
        values.append(sum(COPIES * dst.nbytes for dst, _ in pairs) / spent_ms / 1e6)
    for thread in threads:
        thread.join()
    return Figure.of(values[1:])
