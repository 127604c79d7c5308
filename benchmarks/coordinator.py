"""Durable allocate and release over HTTP, beside an empty FastAPI endpoint in the same run.

The yardstick does what every FastAPI service does at least: read a body into a pydantic model,
answer with another. The coordinator does that and books a lease in an append-only Valkey, fenced,
idempotent and atomic. Both run on uvicorn with the same options, pinned to the same core; the load
(and the store) have the other. Rounds alternate and medians are compared, so that a busy machine
slows both sides.

The server's CPU time on a request is the figure to decide by: it hardly changes while throughput of
one commit scatters between 1.28 and 1.68 times the yardstick's, with who else uses the machine.

Every lease id must be new, every answer right, and at the end the books must hold nothing: a
coordinator that only pretends fails.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import httpx
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from aqua_client import CoordinatorClient

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from harness.members_on_paper import PaperConsumer, PaperProducer

HERE: Final = Path(__file__).parent
OFFERED_SLABS: Final = 1 << 20
MAX_CPU_RATIO: Final = 0.65
MIN_THROUGHPUT_RATIO: Final = 1.3
MAX_P99_RATIO: Final = 1.1
"""Bars: the server's CPU on a request, requests a second and p99, each to the empty endpoint's."""
START_TIMEOUT_S: Final = 30.0
SIDES: Final = ("coordinator", "empty")


def free_port() -> int:
    """A port that is free on loopback now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pin(pid: int, core: int) -> None:
    """Confine every thread of a process to one core."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), {core})


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def cpu_s(pid: int) -> float:
    """CPU time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(command: list[str], port: int, path: str, **environment: str) -> Iterator[int]:
    """A server, from when it answers `path`; gives its process id."""
    process = subprocess.Popen(
        command,
        env=os.environ | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        give_up_at_s = time.monotonic() + START_TIMEOUT_S
        while process.poll() is None and time.monotonic() < give_up_at_s:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{port}{path}", trust_env=False).is_success:
                    break
            time.sleep(0.05)
        else:
            raise SystemExit(f"{' '.join(command)} did not start")
        yield process.pid
    finally:
        process.terminate()
        process.wait(START_TIMEOUT_S)


def join(link: CoordinatorClient) -> None:
    """A producer with plenty to lend and a consumer, as far as the books know."""
    producer = PaperProducer("bench", OFFERED_SLABS)
    for _ in range(2):  # The second report confirms the books, and so they grant.
        producer.books_id = link.report_producer(producer.report()).books_id
    link.report_consumer(PaperConsumer("bench").report())


def require_empty_books(link: CoordinatorClient) -> None:
    """Nothing may be booked any more."""
    view = link.get_producer("bench")
    if view.leased_bytes or view.free_bytes != view.offered_bytes:
        raise SystemExit(f"the books still hold leases: {view}")


def load(mode: str, port: int, connections: int, seconds: float, core: int) -> dict[str, float]:
    """Load a server from another process; returns what that process measured."""
    command = [sys.executable, str(HERE / "_http_load.py"), mode, str(port), str(connections)]
    outcome = subprocess.run(
        ["taskset", "-c", str(core), *command, str(seconds)],  # noqa: S607 - util-linux, on PATH
        capture_output=True,
        check=False,
        text=True,
    )
    if outcome.returncode:
        raise SystemExit(f"the load failed:\n{outcome.stderr}")
    measured: dict[str, float] = json.loads(outcome.stdout)
    return measured


def measure(rounds: int, seconds: float, connections: int) -> dict[str, list[dict[str, float]]]:
    """Alternate between both servers."""
    cores = sorted(os.sched_getaffinity(0))
    server_core, load_core = cores[0], cores[-1]
    ports = {side: free_port() for side in SIDES}
    modes = {"coordinator": "allocate", "empty": "post"}
    results: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="aqua-") as data_dir, contextlib.ExitStack() as stack:
        serve = [sys.executable, "-m", "aqua_coordinator", "serve"]
        coordinator = stack.enter_context(
            running(
                [*serve, "--port", str(ports["coordinator"]), "--data-dir", data_dir],
                ports["coordinator"],
                "/readyz",
                AQUA_SILENT_MEMBER_S="3600",
                AQUA_LOG_LEVEL="warning",
            )
        )
        empty = [sys.executable, str(HERE / "_empty_fastapi.py"), str(ports["empty"])]
        yardstick = stack.enter_context(running(empty, ports["empty"], "/openapi.json"))
        pin(coordinator, server_core)
        pin(yardstick, server_core)
        (store,) = children(coordinator)
        pin(store, load_core)
        processes = {"coordinator": {"server": coordinator, "store": store}}
        processes["empty"] = {"server": yardstick}
        url = f"http://127.0.0.1:{ports['coordinator']}"
        link = stack.enter_context(CoordinatorClient(url))
        join(link)
        for side in SIDES:
            load(modes[side], ports[side], connections, min(seconds, 1.0), load_core)
        for _ in track(range(rounds), "measuring", console=Console(stderr=True)):
            for side in SIDES:
                before = {name: cpu_s(pid) for name, pid in processes[side].items()}
                outcome = load(modes[side], ports[side], connections, seconds, load_core)
                for name, pid in processes[side].items():
                    used_s = cpu_s(pid) - before[name]
                    outcome[f"{name}_cpu_us"] = used_s * 1e6 / outcome["requests"]
                results[side].append(outcome)
        require_empty_books(link)
    return results


def summary(results: dict[str, list[dict[str, float]]]) -> dict[str, float]:
    """Medians over rounds, under the names that scripts read; ratios are of the same round."""
    rounds = list(zip(results["coordinator"], results["empty"], strict=True))

    def ratio(key: str) -> float:
        return statistics.median(ours[key] / theirs[key] for ours, theirs in rounds)

    def median(side: str, key: str) -> float:
        return statistics.median(result[key] for result in results[side])

    return {
        "requests_per_s": median("coordinator", "requests_per_s"),
        "empty_fastapi_per_s": median("empty", "requests_per_s"),
        "ratio": ratio("requests_per_s"),
        "p50_ms": median("coordinator", "p50_ms"),
        "p99_ms": median("coordinator", "p99_ms"),
        "empty_p50_ms": median("empty", "p50_ms"),
        "empty_p99_ms": median("empty", "p99_ms"),
        "p99_ratio": ratio("p99_ms"),
        "server_cpu_us": median("coordinator", "server_cpu_us"),
        "store_cpu_us": median("coordinator", "store_cpu_us"),
        "empty_server_cpu_us": median("empty", "server_cpu_us"),
        "server_cpu_ratio": ratio("server_cpu_us"),
    }


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Alternations.")] = 5,
    seconds: Annotated[float, typer.Option(min=0.2, help="Of each measurement.")] = 3.0,
    connections: Annotated[int, typer.Option(min=1, max=1024)] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,  # noqa: FBT002 - a flag
    raw: Annotated[bool, typer.Option(help="With --json: each round as well.")] = False,  # noqa: FBT002 - a flag
) -> None:
    """Measure allocate and release beside an empty FastAPI POST."""
    results = measure(rounds, seconds, connections)
    figures = summary(results)
    if as_json:
        samples = {"rounds": results} if raw else {}
        print(json.dumps(figures | {"connections": connections} | samples))
        return
    table = Table("", "coordinator", "empty FastAPI", title="Allocate and release over HTTP")
    for label, ours, theirs, digits in (
        ("requests/s", "requests_per_s", "empty_fastapi_per_s", 0),
        ("p50, ms", "p50_ms", "empty_p50_ms", 2),
        ("p99, ms", "p99_ms", "empty_p99_ms", 2),
        ("server's CPU, µs a request", "server_cpu_us", "empty_server_cpu_us", 0),
    ):
        table.add_row(label, f"{figures[ours]:,.{digits}f}", f"{figures[theirs]:,.{digits}f}")
    Console().print(table)
    print(
        f"to the empty endpoint: CPU {figures['server_cpu_ratio']:.2f} (bar: {MAX_CPU_RATIO}), "
        f"requests/s {figures['ratio']:.2f} (bar: {MIN_THROUGHPUT_RATIO}), "
        f"p99 {figures['p99_ratio']:.2f} (bar: {MAX_P99_RATIO}); medians of {rounds} rounds"
    )


if __name__ == "__main__":
    typer.run(main)
