"""What tracing costs: page-outs, a lease's life, and grants, on beside off in one run.

Two real lenders and two consumers, and two real coordinators, of which one each draws traces to a
collector of its own process; the paths are taken in turns, so that a busy machine slows both. What
is compared are medians, and the 99th percentiles, of a page-out, of a life of a lease (attach, page
out, reclaim: eight spans) and of a grant with its release (eight spans on two sides).

The bar is 2%, for the page-outs that an engine waits for and for the reclaims that a lender waits
for; grants are made once for each lease, and have none.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.console import Console
from rich.progress import track

from _lender import Lender
from aqua_client import CoordinatorClient
from aqua_client.tracing import Tracer, open_tracer
from aqua_protocol import MIB, TransportKind
from aqua_protocol.ids import BooksId, Revision
from aqua_protocol.leases import LeaseRequest
from aqua_protocol.members import ConsumerReport, ProducerReport
from aqualib import Aqua, Location
from aqualib.reporter import Identity
from aqualib.transports import select

SLAB_BYTES: Final = 16 * MIB
SLAB_COUNT: Final = 4
BLOCK_BYTES: Final = 2 * MIB
PAGE_OUTS: Final = 20
GRANTS: Final = 20
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

Samples = dict[tuple[str, bool], list[float]]


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


@contextlib.contextmanager
def lender(directory: Path, *, traces: bool) -> Iterator[Lender]:
    """A lender in a process of its own, with or without tracing."""
    os.environ["AQUA_TRACING"] = str(traces).lower()
    with Lender(directory / f"{traces}.sock", SLAB_BYTES) as started:
        yield started


@contextlib.contextmanager
def coordinator(directory: Path, *, traces: bool) -> Iterator[str]:
    """The address of a coordinator with its own store, with or without tracing."""
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
                    yield json.loads(line)["url"]
                    return
            raise RuntimeError("the coordinator did not start")
        finally:
            process.terminate()
            process.wait()


def live(aqua: Aqua, lender: Lender, spent: Samples, *, traces: bool) -> None:
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
    for _ in range(PAGE_OUTS):
        began_s = time.perf_counter()
        slots, transfer = store.page_out(src[:8])
        transfer.wait()
        spent["page-out", traces].append(time.perf_counter() - began_s)
        store.free(slots)
    answer = lender.call("reclaim", nbytes)
    assert answer["is_done"], answer
    spent["attach", traces].append(attached_s)
    spent["reclaim", traces].append(answer["total_ms"] / 1e3)
    store.close()


def grant(link: CoordinatorClient, tracer: Tracer | None, spent: Samples) -> None:
    """Leases that are granted and released, each in a trace of its own where there are any."""
    request = LeaseRequest(consumer_id="c", bytes=SLAB_BYTES)
    for _ in range(GRANTS):
        began_s = time.perf_counter()
        with contextlib.nullcontext() if tracer is None else tracer.span("lease"):
            lease = link.grant_lease(request).lease
            link.release_lease(lease.lease_id, lease.epoch)
        spent["grant and release", tracer is not None].append(time.perf_counter() - began_s)


def measure(rounds: int, directory: Path, *, quiet: bool) -> Samples:
    """Seconds of everything, by what and whether it was traced."""
    spent: Samples = defaultdict(list)
    with contextlib.ExitStack() as stack:
        stack.enter_context(collector())
        tracer = open_tracer("benchmark")
        tracers = {False: None, True: tracer}
        aquas, lenders, links = {}, {}, {}
        for traces in (False, True):
            lenders[traces] = stack.enter_context(lender(directory, traces=traces))
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
            url = stack.enter_context(coordinator(directory, traces=traces))
            link = stack.enter_context(CoordinatorClient(url, tracer=tracers[traces]))
            links[traces] = link
            books_id: BooksId | None = None
            for revision in (0, 1):  # The second confirms the books that the first has named.
                stamp = IDENTITY.stamp(Revision(revision), books_id)
                report = ProducerReport(
                    **stamp,
                    producer_id="p",
                    endpoint="/p.sock",
                    transport=TransportKind.MEMFD,
                    slab_bytes=SLAB_BYTES,
                    offered_bytes=4096 * SLAB_BYTES,
                )
                books_id = BooksId(link.report_producer(report).books_id)
                link.report_consumer(ConsumerReport(**stamp, consumer_id="c"))
        for number in track(range(rounds + 1), "measuring", disable=quiet):
            for traces in (False, True) if number % 2 else (True, False):
                live(aquas[traces], lenders[traces], spent, traces=traces)
                grant(links[traces], tracers[traces], spent)
            if not number:  # Pages are faulted in, connections are open.
                spent.clear()
    return spent


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Lives of a lease, of each kind.")] = 40,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Compare; fails where a bar is missed."""
    with tempfile.TemporaryDirectory(prefix="aqua-", dir="/tmp") as directory:
        spent = measure(rounds, Path(directory), quiet=as_json)
    report = {}
    for what in dict.fromkeys(what for what, _ in spent):
        off, on = (sorted(spent[what, traces]) for traces in (False, True))
        last = int(0.99 * len(off))
        report[what] = {
            "ratio": statistics.median(on) / statistics.median(off),
            "p99_ratio": on[last] / off[last],
            "off_ms": statistics.median(off) * 1e3,
            "samples": len(off),
        }
    if as_json:
        print(json.dumps(report))
    else:
        for what, found in report.items():
            Console().print(
                f"{what}: {found['ratio']:.3f} (p99 {found['p99_ratio']:.3f}) of "
                f"{found['off_ms']:.3f} ms, {found['samples']} samples"
            )
    slow = [what for what in ("page-out", "reclaim") if report[what]["ratio"] > MAX_RATIO]
    raise typer.Exit(bool(slow))


if __name__ == "__main__":
    typer.run(main)
