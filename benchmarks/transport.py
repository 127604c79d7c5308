"""Paging and reclaiming over memfd, beside plain memcpy in the same run.

A real producer lends from another process. Every comparison is interleaved: a paging operation, a
memcpy of as many bytes between buffers of the same kind, and so on, and medians are compared, so
that a busy machine slows both sides. All buffers are faulted in before anything is timed. After
each phase the bytes are compared with what was stored: a benchmark that moves garbage fails.

The reclaim times are the producer's own: from its decision until physical memory is back. Its bar
is `1.2 x bytes / memcpy rate + 20 ms`, with the memcpy rate of the same minute.

A hand-over is an attach to slabs that another lease had before. Its ratio says how much longer it
takes when that was another tenant, and the slabs are made anew; there is no bar.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import aqualib
from _lender import Lender
from aqua_protocol import GIB, KIB, MIB, TransportKind, format_bytes
from aqua_protocol.channel import Ping, Pong
from aqualib import Aqua, BlockStore, Location
from aqualib.leasing.handshake import attach
from aqualib.reporter import Identity
from aqualib.transports import select

CONSUMER_ID: Final = "bench"
SLAB_BYTES: Final = 64 * MIB
PAGE_BYTES: Final = 16 * MIB
SCATTERED_BYTES: Final = 64 * KIB
SCATTERED_COUNT: Final = 256
RECLAIM_BYTES: Final = GIB
LEASE_BYTES: Final = RECLAIM_BYTES + 2 * SLAB_BYTES
HANDOVER_BYTES: Final = 256 * MIB
HANDOVER_SLABS_MIB: Final = (2, 16, 64)

MIN_PAGE_RATIO: Final = 0.9
MIN_SCATTERED_RATIO: Final = 0.7
MAX_STEP_NS: Final = 1000.0
MAX_ROUNDTRIP_US: Final = 100.0
MAX_FIRST_SLAB_MS: Final = 20.0
RECLAIM_FACTOR: Final = 1.2
RECLAIM_ALLOWANCE_MS: Final = 20.0

SETTLE_TIMEOUT_S: Final = 60.0
ANSWER_TIMEOUT_S: Final = 5.0


@dataclass
class Results:
    """What was measured; raw times in milliseconds unless their name says otherwise."""

    raw: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str, work: Callable[[], None]) -> None:
        """Run `work` and keep how long it took."""
        started_s = time.perf_counter()
        work()
        self.add(name, (time.perf_counter() - started_s) * 1e3)

    def add(self, name: str, value: float) -> None:
        """Keep one value."""
        self.raw.setdefault(name, []).append(value)

    def median(self, name: str) -> float:
        """Of all values under a name."""
        return statistics.median(self.raw[name])

    @property
    def summary(self) -> dict[str, float]:
        """The figures that the bars are about."""
        page = max(self.median("page_out_16mib"), self.median("page_in_16mib"))
        scattered = max(self.median("scattered_out_64kib"), self.median("scattered_in_64kib"))
        memcpy_bytes_per_ms = RECLAIM_BYTES / self.median("memcpy_1gib")
        return {
            "page_16mib_ratio": self.median("memcpy_16mib") / page,
            "scattered_64kib_ratio": self.median("memcpy_scattered_total") / scattered,
            "step_idle_ns": self.median("step_ns"),
            "roundtrip_p50_us": self.median("roundtrip_us"),
            "reclaim_1gib_ms": self.median("reclaim_1gib"),
            "reclaim_first_slab_ms": self.median("reclaim_first_slab"),
            **{
                f"handover_{size}mib_{which}": value
                for size in HANDOVER_SLABS_MIB
                for which, value in self._handover(size)
            },
            "memcpy_gb_per_s": memcpy_bytes_per_ms / 1e6,
            "reclaim_bar_ms": RECLAIM_FACTOR * RECLAIM_BYTES / memcpy_bytes_per_ms
            + RECLAIM_ALLOWANCE_MS,
        }

    def _handover(self, size: int) -> list[tuple[str, float]]:
        within, between = (
            self.median(f"handover_{size}mib_{which}") for which in ("within", "between")
        )
        return [("within_ms", within), ("between_ms", between), ("ratio", between / within)]


def main(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    raw: Annotated[bool, typer.Option(help="With --json: each time as well.")] = False,
    rounds: Annotated[int, typer.Option(help="Repetitions of each pair.", min=3)] = 60,
    reclaims: Annotated[int, typer.Option(help="Reclaims of 1 GiB.", min=1)] = 7,
    handovers: Annotated[int, typer.Option(help="Hand-overs of each kind.", min=1)] = 15,
) -> None:
    """Measure paging, reclaiming and the lease channel between two processes."""
    # Threads that torch parks after a comparison spin for a while, on the cores being measured.
    torch.set_num_threads(1)
    results = Results()
    with (
        tempfile.TemporaryDirectory(prefix="aqua-") as directory,
        Lender(Path(directory) / "l.sock", SLAB_BYTES) as lender,
        Progress(console=Console(stderr=True), disable=as_json, transient=True) as progress,
    ):
        phases: list[tuple[str, Callable[[], None]]] = [
            ("round trips", lambda: measure_roundtrip(lender, results, rounds * 50)),
            ("step", lambda: measure_step(results, rounds)),
            ("pages of 16 MiB", lambda: measure_pages(lender, results, rounds)),
            ("scattered blocks", lambda: measure_scattered(lender, results, rounds)),
            ("reclaims of 1 GiB", lambda: measure_reclaims(lender, results, reclaims)),
            ("hand-overs", lambda: measure_handovers(Path(directory), results, handovers)),
        ]
        task = progress.add_task("", total=len(phases))
        for name, phase in phases:
            progress.update(task, description=name)
            phase()
            progress.advance(task)
    if as_json:
        samples = {"raw": results.raw} if raw else {}
        print(json.dumps(results.summary | {"machine": machine()} | samples))
    else:
        show(results)


# --- Phases ---------------------------------------------------------------------------------


def measure_roundtrip(lender: Lender, results: Results, count: int) -> None:
    """Ping and Pong over a lease channel, nothing else going on."""
    lender.call("offer", SLAB_BYTES)
    attachment = attach(
        lender.grant(CONSUMER_ID, SLAB_BYTES),
        consumer_id=CONSUMER_ID,
        transport=select(TransportKind.MEMFD),
        slab_bytes=SLAB_BYTES,
    )
    for number in range(count):
        started_s = time.perf_counter()
        attachment.channel.send(Ping(number=number))
        assert attachment.channel.wait(ANSWER_TIMEOUT_S), "the lender does not answer"
        message, _ = attachment.channel.receive()
        elapsed_s = time.perf_counter() - started_s
        assert message == Pong(number=number), message
        if number >= count // 10:  # The first ones warm both sides up.
            results.add("roundtrip_us", elapsed_s * 1e6)
    for slab in attachment.slabs:
        slab.memory.close()
        attachment.take_back(slab)
    attachment.disconnect()


def measure_step(results: Results, rounds: int) -> None:
    """`aqualib.step()` as an engine calls it, on the default instance, with nothing to tell."""
    calls = 10_000
    with aqualib.connect(
        CONSUMER_ID, transport=TransportKind.MEMFD, host_bytes=SLAB_BYTES, is_offline=True
    ):
        aqualib.step()
        for _ in range(rounds):
            started_s = time.perf_counter()
            for _ in range(calls):
                aqualib.step()
            results.add("step_ns", (time.perf_counter() - started_s) / calls * 1e9)


def measure_pages(lender: Lender, results: Results, rounds: int) -> None:
    """One block of 16 MiB per call, out and in, beside a memcpy of 16 MiB."""
    count = 16
    src, dst, plain = (torch.zeros(count, PAGE_BYTES, dtype=torch.uint8) for _ in range(3))
    fill(src)
    with consumer(lender) as aqua, aqua.block_store(PAGE_BYTES, count) as store:
        await_location(store, Location.PEER)
        touch(store, src)
        for turn in range(rounds):
            row = turn % count
            page_beside_memcpy(
                results,
                turn,
                ("page_out_16mib", "page_in_16mib", "memcpy_16mib"),
                partial(memcpy, plain[row], src[row]),
                (store, src, dst, torch.tensor([row])),
            )


def measure_scattered(lender: Lender, results: Results, rounds: int) -> None:
    """256 scattered blocks of 64 KiB per call, beside one memcpy of as many bytes."""
    rows = 4 * SCATTERED_COUNT
    src, dst, plain = (torch.zeros(rows, SCATTERED_BYTES, dtype=torch.uint8) for _ in range(3))
    fill(src)
    order = torch.Generator().manual_seed(20)
    with consumer(lender) as aqua, aqua.block_store(SCATTERED_BYTES, rows) as store:
        await_location(store, Location.PEER)
        touch(store, src)
        for turn in range(rounds):
            first = turn % 4 * SCATTERED_COUNT
            some = slice(first, first + SCATTERED_COUNT)
            page_beside_memcpy(
                results,
                turn,
                ("scattered_out_64kib", "scattered_in_64kib", "memcpy_scattered_total"),
                partial(memcpy, plain[some], src[some]),
                (store, src, dst, torch.randperm(rows, generator=order)[:SCATTERED_COUNT]),
            )


def page_beside_memcpy(
    results: Results,
    turn: int,
    names: tuple[str, str, str],
    plain_copy: Callable[[], None],
    paging: tuple[BlockStore, torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Page rows out and in again, with a memcpy before, between or after, and compare.

    The place of the memcpy rotates: whatever runs first after the comparison has a fresh time
    slice, and on a busy machine that alone would make it look faster.

    Args:
        names: Of the page out, the page in and the memcpy.
        paging: Block store, source, target, and index of the rows.
    """
    store, src, dst, index = paging
    page_out, page_in, copy = names
    if turn % 3 == 0:
        results.time(copy, plain_copy)
    started_s = time.perf_counter()
    slots, transfer = store.page_out(src, index)
    transfer.wait()
    results.add(page_out, (time.perf_counter() - started_s) * 1e3)
    if turn % 3 == 1:
        results.time(copy, plain_copy)
    results.time(page_in, lambda: store.page_in(slots, dst, index).wait())
    if turn % 3 == 2:
        results.time(copy, plain_copy)
    require_equal(dst[index], src[index])
    dst[index] = 0
    store.free(slots)


def measure_reclaims(lender: Lender, results: Results, count: int) -> None:
    """1 GiB of freshly written blocks taken back at once, beside a memcpy of 1 GiB."""
    blocks = RECLAIM_BYTES // PAGE_BYTES
    src, dst = (torch.zeros(blocks, PAGE_BYTES, dtype=torch.uint8) for _ in range(2))
    fill(src)
    # Free slabs would serve the first reclaim without any move: let there be none.
    lender.call("reclaim", LEASE_BYTES)
    with consumer(lender, lease_bytes=0) as aqua, aqua.block_store(PAGE_BYTES, blocks) as store:
        for _ in range(count):
            lender.call("offer", RECLAIM_BYTES)
            aqua.attach(lender.grant(CONSUMER_ID, RECLAIM_BYTES))
            await_location(store, Location.PEER)
            slots, transfer = store.page_out(src)
            transfer.wait()
            copied_before = aqua.stats().drain_copied_bytes
            results.time("memcpy_1gib", lambda: memcpy(dst, src))
            answer = lender.call("reclaim", RECLAIM_BYTES)
            assert answer["is_done"], answer
            results.add("reclaim_1gib", answer["total_ms"])
            results.add("reclaim_first_slab", answer["first_slab_ms"])
            results.time("memcpy_1gib", lambda: memcpy(dst, src))
            copied = aqua.stats().drain_copied_bytes - copied_before
            assert copied == RECLAIM_BYTES, f"the reclaim copied only {copied} bytes"
            assert store.location() is Location.HOST, store.location()
            dst.zero_()
            store.page_in(slots, dst).wait()
            require_equal(dst, src)
            store.free(slots)


def measure_handovers(directory: Path, results: Results, count: int) -> None:
    """Attach to 256 MiB that the same tenant had before, and then to what another had, by turns."""
    for size in HANDOVER_SLABS_MIB:
        with Lender(directory / f"h{size}.sock", size * MIB) as lender:
            lender.call("offer", HANDOVER_BYTES)
            hand_over(lender, size, "tenant-0", Results(), "first")
            for turn in range(count):
                for name, which in ((turn % 2, "within"), ((turn + 1) % 2, "between")):
                    key = f"handover_{size}mib_{which}"
                    hand_over(lender, size, f"tenant-{name}", results, key)


def hand_over(lender: Lender, size: int, name: str, results: Results, key: str) -> None:
    """Time an attach to all that is lent, write to every byte of it, and give it back."""
    grant = lender.grant(name, HANDOVER_BYTES)
    started_s = time.perf_counter()
    attachment = attach(
        grant, consumer_id=name, transport=select(TransportKind.MEMFD), slab_bytes=size * MIB
    )
    results.add(key, (time.perf_counter() - started_s) * 1e3)
    assert attachment.mapped_bytes == HANDOVER_BYTES, attachment
    for slab in attachment.slabs:
        slab.memory.tensor.fill_(0xAB)
        slab.memory.close()
        attachment.take_back(slab)
    attachment.disconnect()
    give_up_at_s = time.monotonic() + SETTLE_TIMEOUT_S
    while lender.call("offer", 0)["free_bytes"] < HANDOVER_BYTES:
        assert time.monotonic() < give_up_at_s, "the lender has not got its slabs back"
        time.sleep(1e-3)


# --- Parts ----------------------------------------------------------------------------------


def consumer(lender: Lender, lease_bytes: int = LEASE_BYTES) -> Aqua:
    """A consumer without a coordinator, attached to `lease_bytes` of the lender's memory."""
    aqua = Aqua(
        CONSUMER_ID,
        transport=select(TransportKind.MEMFD),
        link=None,
        identity=Identity(node="bench", domain="bench", gpu_uuid="consumer"),
        host_bytes=LEASE_BYTES,
        slab_bytes=SLAB_BYTES,
    )
    if lease_bytes:
        lender.call("offer", lease_bytes)
        aqua.attach(lender.grant(CONSUMER_ID, lease_bytes))
    return aqua


def await_location(store: BlockStore, location: Location) -> None:
    """Wait until all room of the store is there."""
    give_up_at_s = time.monotonic() + SETTLE_TIMEOUT_S
    while store.location() is not location:
        assert time.monotonic() < give_up_at_s, f"{store!r} is on {store.location()}"
        time.sleep(1e-3)


def touch(store: BlockStore, src: torch.Tensor) -> None:
    """Fault in whatever is not yet: page everything out once."""
    slots, transfer = store.page_out(src)
    transfer.wait()
    store.free(slots)


def fill(table: torch.Tensor) -> None:
    """Random bytes, so that no two blocks are alike."""
    torch.manual_seed(11)
    for row in table:
        row.view(torch.int64).random_()


def memcpy(dst: torch.Tensor, src: torch.Tensor) -> None:
    """What everything is compared with: one memcpy on one thread."""
    ctypes.memmove(dst.data_ptr(), src.data_ptr(), src.nbytes)


def require_equal(found: torch.Tensor, stored: torch.Tensor) -> None:
    """End the benchmark if the bytes are not the same."""
    if not torch.equal(found, stored):
        raise SystemExit("the bytes that came back are not those that were stored")


def machine() -> dict[str, Any]:
    """Where the figures are from."""
    return {
        "system": " ".join(os.uname()),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
    }


def show(results: Results) -> None:
    """A table for people."""
    summary = results.summary
    bar_ms = summary["reclaim_bar_ms"]
    rows = [
        ("page out and in, 16 MiB / memcpy", "page_16mib_ratio", ">=", MIN_PAGE_RATIO, ""),
        ("scattered 64 KiB / memcpy", "scattered_64kib_ratio", ">=", MIN_SCATTERED_RATIO, ""),
        ("step() with nothing to do", "step_idle_ns", "<", MAX_STEP_NS, "ns"),
        ("lease channel round trip", "roundtrip_p50_us", "<", MAX_ROUNDTRIP_US, "us"),
        ("reclaim, first slab", "reclaim_first_slab_ms", "<=", MAX_FIRST_SLAB_MS, "ms"),
        ("reclaim of 1 GiB", "reclaim_1gib_ms", "<=", bar_ms, "ms"),
    ]
    table = Table(title=f"memfd, slabs of {format_bytes(SLAB_BYTES)}; medians")
    for heading in ("what", "measured", "bar", ""):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for text, key, relation, bar, unit in rows:
        value = summary[key]
        good = value >= bar if relation == ">=" else value <= bar
        verdict = "[green]ok[/green]" if good else "[red]misses[/red]"
        table.add_row(text, f"{value:.4g} {unit}", f"{relation} {bar:.4g} {unit}", verdict)
    for size in HANDOVER_SLABS_MIB:
        value = summary[f"handover_{size}mib_ratio"]
        text = f"attach to slabs of {size} MiB, between tenants / within one"
        table.add_row(text, f"{value:.4g} ", "no bar ", "")
    table.caption = (
        f"memcpy {summary['memcpy_gb_per_s']:.1f} GB/s; reclaim bar "
        f"{RECLAIM_FACTOR} x bytes / memcpy + {RECLAIM_ALLOWANCE_MS:.0f} ms"
    )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
