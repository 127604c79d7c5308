"""What tracing costs: page-outs, grants, and the whole life of a lease, on beside off in one run.

Two real lenders and two consumers, and two real coordinators, of which one each draws traces to a
collector of its own process; the two are taken in turns, a round each, so that a busy machine slows
both. A round is one lease: grant and release, attach, `PAGE_OUTS` page-outs, reclaim. What is told
of each part is the median over rounds of the ratio within a round, with the interval that holds the
true median in 95 runs of 100; and of all of a round together, which is the product's job as an
engine sees it, for a lease that serves as many page-outs. Attach and reclaim come once in a lease
and scatter by a third, so their own figures are from short leases, `SHORT_LIVES` for each round.

The same is told of CPU time, which busy neighbours lengthen less than they do waits: of a lease's
life in all three processes of a side together, exports to the collector included, by blocks of
`BLOCK_ROUNDS` rounds.

The bar is 2%, for page-outs, reclaims, the round and its CPU time. A grant by itself has none: it
is some spans on two sides, and the coordinator does little else for it.

`--control` draws nothing on either side: what it tells apart from 1 is this machine's doing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.progress import track

from _lender import Lender
from aqua_client import CoordinatorClient
from aqua_client.tracing import Tracer, open_tracer
from aqua_protocol import MIB, TransportKind
from aqua_protocol.leases import LeaseRequest
from aqualib import Aqua, Location
from aqualib.reporter import Identity
from aqualib.transports import select

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from harness.members_on_paper import PaperConsumer, PaperProducer

SLAB_BYTES: Final = 16 * MIB
SLAB_COUNT: Final = 4
BLOCK_BYTES: Final = 2 * MIB
PAGE_OUTS: Final = 200
"""In a lease's life: a quarter of a second of them, short for a lease of an engine. A lease's spans
are drawn once, so half as many would double their share."""
SHORT_LIVES: Final = 10
"""Leases of one page-out each: with 400 of them a ratio is known to 3%. Four times as many halve
that."""
SETTLE_S: Final = 10.0
MAX_RATIO: Final = 1.02
IDENTITY: Final = Identity(node="bench", domain="bench", gpu_uuid="bench")

COLLECTOR: Final = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""

WHOLE: Final = "a lease's life"
CPU: Final = "CPU time of it"
BLOCK_ROUNDS: Final = 2
"""Rounds whose CPU time is compared together: exports come seconds apart. Twice as many halve the
number of ratios."""
EXPORTER: Final = "OtelBatchSpanRecordProcessor"
"""The thread that sends spans, by OpenTelemetry's name for it."""

Samples = dict[tuple[str, bool], list[list[float]]]
"""Seconds of each part, with tracing or without, by round."""


@contextlib.contextmanager
def collector() -> Iterator[None]:
    """A collector that takes everything, and this environment set to it."""
    with subprocess.Popen(
        [sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{port}"
        try:
            yield
        finally:
            process.kill()


def cpu_s(process: int | str, thread: int | str = "*") -> float:
    """Seconds that a process's threads, or one of them, have had a processor; by Linux."""
    tasks = Path("/proc").glob(f"{process}/task/{thread}/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def exporter_cpu_s() -> float:
    """Of this process's thread that sends spans, which runs in rounds of both kinds."""
    senders = [one.native_id for one in threading.enumerate() if one.name == EXPORTER]
    return sum(cpu_s("self", one) for one in senders if one is not None)


@contextlib.contextmanager
def coordinator(directory: Path, *, traces: bool) -> Iterator[tuple[str, int]]:
    """The address and the process of a coordinator with its own store, with or without tracing."""
    environment = {**os.environ, "AQUA_TRACING": str(traces).lower()}
    data_dir = directory / str(traces)
    with subprocess.Popen(
        [sys.executable, "-m", "aqua_coordinator", "serve", "--port", "0", "--data-dir", data_dir],
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"AQUA_MAX_GRANTS_PER_S": "1000000", "AQUA_SILENT_MEMBER_S": "3600"},
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if '"listening"' in line:
                    yield json.loads(line)["url"], process.pid
                    return
            raise RuntimeError("the coordinator did not start")
        finally:
            process.terminate()
            process.wait()


def live(
    aqua: Aqua, lender: Lender, spent: Samples, *, traces: bool, page_outs: int = PAGE_OUTS
) -> None:
    """One life of a lease, and page-outs in it."""
    nbytes = SLAB_BYTES * SLAB_COUNT
    lender.call("offer", nbytes)
    store = aqua.block_store(BLOCK_BYTES, nbytes // BLOCK_BYTES)
    src = torch.ones(nbytes // BLOCK_BYTES, BLOCK_BYTES, dtype=torch.uint8)
    began_s = time.perf_counter()
    aqua.attach(lender.grant(aqua.consumer_id, nbytes))
    attached_s = time.perf_counter() - began_s
    give_up_at_s = time.monotonic() + SETTLE_S
    while store.location() is not Location.PEER:
        assert time.monotonic() < give_up_at_s, f"{store!r} is on {store.location()}"
        time.sleep(1e-3)
    paged_s = []
    for _ in range(page_outs):
        began_s = time.perf_counter()
        slots, transfer = store.page_out(src[:8])
        transfer.wait()
        paged_s.append(time.perf_counter() - began_s)
        store.free(slots)
    answer = lender.call("reclaim", nbytes)
    assert answer["is_done"], answer
    spent["page-out", traces].append(paged_s)
    spent["attach", traces].append([attached_s])
    spent["reclaim", traces].append([answer["total_ms"] / 1e3])
    store.close()


def grant(link: CoordinatorClient, tracer: Tracer | None, spent: Samples, *, traces: bool) -> None:
    """A lease that is granted in a trace, where there are any, and released in none."""
    request = LeaseRequest(consumer_id="c", bytes=SLAB_BYTES)
    began_s = time.perf_counter()
    with contextlib.nullcontext() if tracer is None else tracer.span("lease"):
        lease = link.grant_lease(request).lease
    link.release_lease(lease.lease_id, lease.epoch)
    spent["grant and release", traces].append([time.perf_counter() - began_s])


def measure(rounds: int, directory: Path, *, control: bool, quiet: bool) -> Samples:
    """Seconds of everything, by what and whether it was traced, or in a control was called so."""
    spent: Samples = defaultdict(list)
    cpu: dict[bool, list[list[float]]] = {False: [], True: []}
    with contextlib.ExitStack() as stack:
        stack.enter_context(collector())
        tracer = None if control else open_tracer("benchmark")
        tracers = {False: None, True: tracer}
        aquas, lenders, links, sides = {}, {}, {}, {}
        others: dict[bool, tuple[int, int]] = {}
        for traces in (False, True):
            is_on = traces and not control
            sides[traces] = directory / ("on" if traces else "off")
            sides[traces].mkdir()
            lenders[traces] = stack.enter_context(
                Lender(sides[traces] / "l.sock", SLAB_BYTES, AQUA_TRACING=str(is_on).lower())
            )
            aquas[traces] = stack.enter_context(
                Aqua(
                    "c",
                    transport=select(TransportKind.MEMFD),
                    link=None,
                    identity=IDENTITY,
                    host_bytes=2 * SLAB_COUNT * SLAB_BYTES,
                    slab_bytes=SLAB_BYTES,
                    tracer=tracers[traces],
                )
            )
            url, pid = stack.enter_context(coordinator(sides[traces], traces=is_on))
            others[traces] = (lenders[traces].process.pid, pid)
            link = stack.enter_context(CoordinatorClient(url, tracer=tracers[traces]))
            links[traces] = link
            producer = PaperProducer("p")
            for _ in range(2):  # The second report confirms the books that the first has named.
                report = producer.report(slab_bytes=SLAB_BYTES, offered_bytes=4096 * SLAB_BYTES)
                producer.books_id = link.report_producer(report).books_id
            link.report_consumer(PaperConsumer("c").report())
        worked_s: defaultdict[bool, float] = defaultdict(float)
        begun_s: dict[bool, float] = {}
        for number in track(range(rounds + 1), "measuring", disable=quiet):
            for traces in (False, True) if number % 2 else (True, False):
                worked_s[traces] -= time.process_time() - exporter_cpu_s()
                live(aquas[traces], lenders[traces], spent, traces=traces)
                grant(links[traces], tracers[traces], spent, traces=traces)
                worked_s[traces] += time.process_time() - exporter_cpu_s()
            if number % BLOCK_ROUNDS:
                continue
            for traces in (False, True):
                elsewhere_s = sum(map(cpu_s, others[traces])) + traces * exporter_cpu_s()
                if number:
                    all_s = worked_s[traces] + elsewhere_s - begun_s[traces]
                    cpu[traces].append([all_s / BLOCK_ROUNDS])
                begun_s[traces] = elsewhere_s
            worked_s.clear()
            if not number:  # Pages are faulted in, connections are open.
                spent.clear()
        short = live_shortly(rounds * SHORT_LIVES, aquas, lenders, quiet=quiet)
    return combined(spent, cpu, short)


def live_shortly(
    rounds: int, aquas: dict[bool, Aqua], lenders: dict[bool, Lender], *, quiet: bool
) -> Samples:
    """Lives of a lease with one page-out each."""
    spent: Samples = defaultdict(list)
    for number in track(range(rounds), "short leases", disable=quiet):
        for traces in (False, True) if number % 2 else (True, False):
            live(aquas[traces], lenders[traces], spent, traces=traces, page_outs=1)
    return spent


def combined(spent: Samples, cpu: dict[bool, list[list[float]]], short: Samples) -> Samples:
    """The parts of a life, all of it, its CPU time; and what short lives tell better."""
    for traces in (False, True):
        parts = [spent[what, of] for what, of in [*spent] if of == traces]
        spent[WHOLE, traces] = [[sum(map(sum, each))] for each in zip(*parts, strict=True)]
        spent[CPU, traces] = cpu[traces]
        for what in ("attach", "reclaim"):
            spent[what, traces] = short[what, traces]
    return spent


def compare(off: list[list[float]], on: list[list[float]]) -> dict[str, Any]:
    """What tracing adds to one part: ratios within rounds, and the tail over all of them."""
    pairs = zip(map(statistics.median, off), map(statistics.median, on), strict=True)
    ratios = sorted(traced / plain for plain, traced in pairs)
    # Order statistics around the median, two standard deviations of a fair coin's count away.
    reach = math.ceil(math.sqrt(len(ratios)))
    middle = (len(ratios) - 1) / 2
    interval = (
        ratios[max(0, math.floor(middle - reach))],
        ratios[min(len(ratios) - 1, math.ceil(middle + reach))],
    )
    tails = [sorted(chain(*each))[int(0.99 * sum(map(len, each)))] for each in (off, on)]
    return {
        "ratio": statistics.median(ratios),
        "interval": interval,
        "p99_ratio": tails[1] / tails[0],
        "off_ms": statistics.median(chain(*off)) * 1e3,
        "samples": sum(map(len, off)),
    }


def main(
    *,
    rounds: Annotated[
        int, typer.Option(min=BLOCK_ROUNDS, help="Lives of a lease, of each kind.")
    ] = 40,
    control: Annotated[bool, typer.Option("--control", help="Draw nothing on both sides.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Compare; fails where a bar is missed."""
    with tempfile.TemporaryDirectory(prefix="aqua-", dir="/tmp") as directory:
        spent = measure(rounds, Path(directory), control=control, quiet=as_json)
    parts = dict.fromkeys(what for what, _ in spent)
    report = {what: compare(spent[what, False], spent[what, True]) for what in parts}
    if as_json:
        print(json.dumps(report))
    else:
        for what, found in report.items():
            Console().print(
                f"{what}: {found['ratio']:.3f} ({found['interval'][0]:.3f} to "
                f"{found['interval'][1]:.3f}, p99 {found['p99_ratio']:.3f}) of "
                f"{found['off_ms']:.3f} ms, {found['samples']} samples"
            )
    bars = ("page-out", "reclaim", WHOLE, CPU)
    slow = [what for what in bars if report[what]["ratio"] > MAX_RATIO]
    raise typer.Exit(bool(slow))


if __name__ == "__main__":
    typer.run(main)
