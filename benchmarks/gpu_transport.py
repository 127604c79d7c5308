"""What sharing device memory costs: copies and slab lifecycles, for each CUDA transport.

A second process on the same GPU lends the slabs. Everything is measured in one run, medians of
repetitions, and compared with a plain copy inside the device and with copies to pinned host memory:

- bandwidth into and out of a borrowed slab, whole and as scattered rows of 4 to 256 KiB;
- create, export, open, unmap and free, by slab size;
- a reclaim of 1 GiB to pinned memory, slab by slab: first slab back, and all of it.

On one GPU the borrowed slab is local memory, so its bandwidth is that of HBM: what shows is that
sharing adds nothing. Without a GPU the script says so and succeeds.
"""

from __future__ import annotations

import base64
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from aqua_protocol import GIB, KIB, MIB, TransportKind, TransportUnavailableError, format_bytes

if TYPE_CHECKING:
    import torch

    from aqualib.transports import Copier, Handle, Transport

SLAB_BYTES = 64 * MIB
LIFECYCLE_SIZES = (2 * MIB, 16 * MIB, 64 * MIB, 256 * MIB, GIB)
ROW_SIZES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB)
REPETITIONS = 7
COPIES_PER_REPETITION = 16
KINDS = (TransportKind.CUDA_VMM, TransportKind.CUDA_IPC)


@dataclass
class Lifecycle:
    """Milliseconds that each step of a slab's life takes."""

    nbytes: int
    create_ms: float
    export_ms: float
    open_ms: float
    unmap_ms: float
    free_ms: float


@dataclass
class Sharing:
    """One transport's figures; rates in GB/s, 1e9 bytes a second."""

    write_gb_per_s: float
    read_gb_per_s: float
    write_ratio: float
    read_ratio: float
    gather_gb_per_s: dict[str, float]
    scatter_gb_per_s: dict[str, float]
    reclaim_1gib_ms: float
    reclaim_first_slab_ms: float
    reclaim_ideal_ms: float
    lifecycles: list[Lifecycle]


@dataclass
class Report:
    """Everything, with its provenance."""

    gpu: str
    driver: int
    torch: str
    device_copy_gb_per_s: float
    pinned_write_gb_per_s: float
    pinned_read_gb_per_s: float
    transports: dict[str, Sharing] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)


class Lender:
    """A second process that creates slabs on request."""

    def __init__(self, kind: TransportKind) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, __file__, "--lend", f"{kind.value}:{theirs.fileno()}"]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def call(self, verb: str, *arguments: int) -> tuple[Any, list[int]]:
        """Have the lender do something; its answer and the descriptors with it."""
        self._socket.send(json.dumps([verb, *arguments]).encode())
        packet, fds, _, _ = socket.recv_fds(self._socket, 65536, 1)
        assert packet, f"the lender ended with {self._process.wait()}"
        return json.loads(packet), fds

    def create(self, nbytes: int) -> tuple[int, float]:
        """A slab's number, and the milliseconds that making it took."""
        (number, milliseconds), _ = self.call("create", nbytes)
        return number, milliseconds

    def export(self, number: int) -> tuple[Handle, float]:
        """A handle to it, and the milliseconds that exporting took in the lender."""
        from aqualib.transports import Handle

        (payload, milliseconds), fds = self.call("export", number)
        return Handle(base64.b64decode(payload), fds[0] if fds else None), milliseconds

    def free(self, number: int) -> float:
        """Milliseconds that closing the slab took."""
        milliseconds, _ = self.call("free", number)
        return float(milliseconds)

    def close(self) -> None:
        """End the lender, and what it lends with it."""
        self._socket.close()
        self._process.wait(30)


def lend(kind: TransportKind, descriptor: int) -> None:
    """The lender's side: serve until the other end closes."""
    from aqualib.transports import OwnedSlab, select

    transport = select(kind)
    slabs: dict[int, OwnedSlab] = {}
    with socket.socket(fileno=descriptor) as sock:
        while packet := sock.recv(4096):
            verb, argument = json.loads(packet)
            begin = time.perf_counter()
            match verb:
                case "create":
                    slabs[len(slabs)] = transport.create(argument)
                    answer: Any = [len(slabs) - 1, milliseconds_since(begin)]
                    sock.send(json.dumps(answer).encode())
                case "export":
                    with slabs[argument].export() as handle:
                        spent = milliseconds_since(begin)
                        answer = [base64.b64encode(handle.payload).decode(), spent]
                        fds = [] if handle.fd is None else [handle.fd]
                        socket.send_fds(sock, [json.dumps(answer).encode()], fds)
                case "free":
                    slabs[argument].close()
                    sock.send(json.dumps(milliseconds_since(begin)).encode())


def milliseconds_since(begin: float) -> float:
    """Milliseconds since `begin`, by `time.perf_counter`."""
    return (time.perf_counter() - begin) * 1e3


def rate(copier: Copier, nbytes: int, submit: Callable[[], None]) -> float:
    """GB/s of `submit`, which moves `nbytes`, with many in flight before each fence."""

    def once() -> float:
        begin = time.perf_counter()
        for _ in range(COPIES_PER_REPETITION):
            submit()
        copier.fence()
        return time.perf_counter() - begin

    once()  # Warms up kernels and links.
    seconds = statistics.median(once() for _ in range(REPETITIONS))
    return COPIES_PER_REPETITION * nbytes / seconds / 1e9


def measure_sharing(transport: Transport, report: Report) -> Sharing:
    """Everything about one transport, with a lender of its own."""
    import torch

    lender, copier = Lender(transport.kind), transport.copier()
    number, _ = lender.create(SLAB_BYTES)
    slab = transport.open(lender.export(number)[0], SLAB_BYTES)
    local = torch.empty(4 * SLAB_BYTES, dtype=torch.uint8, device=transport.device)
    near = local[:SLAB_BYTES]
    write = rate(copier, SLAB_BYTES, lambda: copier.copy(slab.tensor, near))
    read = rate(copier, SLAB_BYTES, lambda: copier.copy(near, slab.tensor))
    gathers, scatters = {}, {}
    for row_bytes in ROW_SIZES:
        name = format_bytes(row_bytes)
        gathers[name], scatters[name] = measure_rows(copier, slab.tensor, local, row_bytes)
    slab.close()
    lender.free(number)
    first_ms, all_ms = measure_reclaim(transport, lender, copier)
    sharing = Sharing(
        write_gb_per_s=write,
        read_gb_per_s=read,
        write_ratio=write / report.device_copy_gb_per_s,
        read_ratio=read / report.device_copy_gb_per_s,
        gather_gb_per_s=gathers,
        scatter_gb_per_s=scatters,
        reclaim_1gib_ms=all_ms,
        reclaim_first_slab_ms=first_ms,
        reclaim_ideal_ms=GIB / report.pinned_write_gb_per_s / 1e6,
        lifecycles=[measure_lifecycle(transport, lender, nbytes) for nbytes in LIFECYCLE_SIZES],
    )
    lender.close()
    return sharing


def measure_rows(
    copier: Copier, slab: torch.Tensor, local: torch.Tensor, row_bytes: int
) -> tuple[float, float]:
    """GB/s of gathering scattered rows of `local` into the whole slab, and of scattering them."""
    import torch

    table, packed = local.view(-1, row_bytes), slab.view(-1, row_bytes)
    index = torch.randperm(len(table))[: len(packed)]
    return (
        rate(copier, slab.nbytes, lambda: copier.gather(packed, table, index)),
        rate(copier, slab.nbytes, lambda: copier.scatter(table, packed, index)),
    )


def measure_reclaim(transport: Transport, lender: Lender, copier: Copier) -> tuple[float, float]:
    """Milliseconds until the first slab, and until 1 GiB of slabs, lie in host memory, unmapped."""
    numbers = [lender.create(SLAB_BYTES)[0] for _ in range(GIB // SLAB_BYTES)]
    slabs = [transport.open(lender.export(number)[0], SLAB_BYTES) for number in numbers]
    landing = [transport.create_host(SLAB_BYTES) for _ in slabs]
    first_ms = 0.0
    begin = time.perf_counter()
    for slab, host in zip(slabs, landing, strict=True):
        copier.copy(host.tensor, slab.tensor)
        copier.fence()
        slab.close()
        first_ms = first_ms or milliseconds_since(begin)
    all_ms = milliseconds_since(begin)
    for number in numbers:
        lender.free(number)
    for host in landing:
        host.close()
    return first_ms, all_ms


def measure_lifecycle(transport: Transport, lender: Lender, nbytes: int) -> Lifecycle:
    """Medians over slabs of one size, made and freed one after another."""
    steps: list[tuple[float, ...]] = []
    for _ in range(REPETITIONS):
        number, create_ms = lender.create(nbytes)
        handle, export_ms = lender.export(number)
        begin = time.perf_counter()
        slab = transport.open(handle, nbytes)
        open_ms = milliseconds_since(begin)
        begin = time.perf_counter()
        slab.close()
        unmap_ms = milliseconds_since(begin)
        steps.append((create_ms, export_ms, open_ms, unmap_ms, lender.free(number)))
    return Lifecycle(nbytes, *(statistics.median(step) for step in zip(*steps, strict=True)))


def measure_baselines(transport: Transport) -> tuple[float, float, float]:
    """GB/s of a copy inside the device, from it to pinned host memory, and back."""
    import torch

    copier, host = transport.copier(), transport.create_host(SLAB_BYTES)
    here, there = (
        torch.empty(SLAB_BYTES, dtype=torch.uint8, device=transport.device) for _ in range(2)
    )
    rates = (
        rate(copier, SLAB_BYTES, lambda: copier.copy(there, here)),
        rate(copier, SLAB_BYTES, lambda: copier.copy(host.tensor, here)),
        rate(copier, SLAB_BYTES, lambda: copier.copy(here, host.tensor)),
    )
    host.close()
    return rates


def print_tables(report: Report) -> None:
    """The report for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{report.gpu}, driver CUDA {report.driver}, torch {report.torch}")
    console.print(
        f"copy inside the device {report.device_copy_gb_per_s:.0f} GB/s, to pinned memory "
        f"{report.pinned_write_gb_per_s:.1f}, from it {report.pinned_read_gb_per_s:.1f}"
    )
    for name, reason in report.unavailable.items():
        console.print(f"{name}: {reason}")
    for name, sharing in report.transports.items():
        rates = Table("GB/s", "write", "read", title=f"{name}: bandwidth")
        rates.add_row(
            "64 MiB",
            f"{sharing.write_gb_per_s:.0f} ({sharing.write_ratio:.2f} of device)",
            f"{sharing.read_gb_per_s:.0f} ({sharing.read_ratio:.2f} of device)",
        )
        for size, gather in sharing.gather_gb_per_s.items():
            rates.add_row(f"{size} rows", f"{gather:.0f}", f"{sharing.scatter_gb_per_s[size]:.0f}")
        console.print(rates)
        steps = Table("ms", "create", "export", "open", "unmap", "free", title=f"{name}: slabs")
        for life in sharing.lifecycles:
            figures = list(asdict(life).values())[1:]
            steps.add_row(format_bytes(life.nbytes), *(f"{figure:.3f}" for figure in figures))
        console.print(steps)
        console.print(
            f"reclaim of 1 GiB to pinned memory: {sharing.reclaim_1gib_ms:.1f} ms "
            f"(bytes / rate: {sharing.reclaim_ideal_ms:.1f} ms), "
            f"first slab after {sharing.reclaim_first_slab_ms:.1f} ms"
        )


def main(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    lend_on: Annotated[str | None, typer.Option("--lend", hidden=True)] = None,
) -> None:
    """Measure what sharing device memory between two processes costs."""
    if lend_on is not None:
        kind, _, descriptor = lend_on.partition(":")
        lend(TransportKind(kind), int(descriptor))
        return

    from aqualib.transports import select

    transports: list[Transport] = []
    unavailable: dict[str, str] = {}
    for candidate in KINDS:
        try:
            transports.append(select(candidate))
        except TransportUnavailableError as refusal:
            unavailable[candidate.value] = str(refusal)
    if not transports:
        message = {"skipped": unavailable}
        typer.echo(json.dumps(message) if as_json else f"skipped: {unavailable}")
        return

    import torch

    from aqualib.transports.cuda_driver import load_driver

    device_copy, pinned_write, pinned_read = measure_baselines(transports[0])
    report = Report(
        gpu=torch.cuda.get_device_name(transports[0].device),
        driver=load_driver().version,
        torch=torch.__version__,
        device_copy_gb_per_s=device_copy,
        pinned_write_gb_per_s=pinned_write,
        pinned_read_gb_per_s=pinned_read,
        unavailable=unavailable,
    )
    for transport in transports:
        report.transports[transport.kind.value] = measure_sharing(transport, report)
    if as_json:
        typer.echo(json.dumps(asdict(report)))
    else:
        print_tables(report)


if __name__ == "__main__":
    typer.run(main)
