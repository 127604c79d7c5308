"""What a large cluster costs one coordinator: as many members as asked, beside a hundred.

One real coordinator with its real Valkey on one core, its members on another: each reports when
the coordinator's answers say so, so rates are those of a real cluster of that size. For each size
in turn, in every round: heartbeats alone (the coordinator's share of a core, and how long a report
takes), then grants beside them, then scrapes of `/metrics` beside them; at the end all members must
be in the books, page by page.

Bars: p99 of reports and grants at most twice that at a hundred members, 10% of a core for
heartbeats, 50 ms for a scrape. The load is not what is measured: its share of a core and how late
its timers were stand beside the figures.
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
from pathlib import Path
from typing import Annotated, Any, Final

import httpx
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from aqua_client import CoordinatorClient
from aqua_coordinator.access.tokens import Role, create_token
from coordinator import HERE, children, cpu_s, free_port, pin, running

FEW: Final = 100
MAX_CONNECTIONS: Final = 10_000
"""Of the load; descriptors of a process are limited to 20,000 on some machines."""
SHARED: Final = {f"AQUA_MAX_REQUESTS_PER_{whose}": "2048" for whose in ("TOKEN", "PEER")}
"""All members have one token and one address here."""
SCRAPES: Final = 20
MAX_P99_RATIO: Final = 2.0
MAX_CPU_SHARE: Final = 0.1
MAX_METRICS_MS: Final = 50.0
"""Bars: see the module."""


def measure(members: int, seconds: float) -> dict[str, float]:
    """Run a coordinator with so many members."""
    cores = sorted(os.sched_getaffinity(0))
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="aqua-") as directory, contextlib.ExitStack() as stack:
        tokens = Path(directory) / "tokens.json"
        token, _ = create_token(tokens, roles=[Role.PRODUCER, Role.CONSUMER, Role.OPERATOR])
        serve = [sys.executable, "-m", "aqua_coordinator", "serve"]
        coordinator = stack.enter_context(
            running(
                [*serve, "--port", str(port), "--data-dir", f"{directory}/d"],
                port,
                "/readyz",
                AQUA_TOKENS_FILE=str(tokens),
                AQUA_LOG_LEVEL="warning",
                **SHARED,
            )
        )
        pin(coordinator, cores[0])
        (store,) = children(coordinator)
        pin(store, cores[-1])
        command = ["taskset", "-c", str(cores[-1]), sys.executable, str(HERE / "_member_load.py")]
        command += [str(port), str(members), str(MAX_CONNECTIONS), str(seconds)]
        load = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(load.kill)
        assert load.stdin is not None
        load.stdin.write(f"{token}\n")
        load.stdin.flush()
        phases: dict[str, dict[str, float]] = {}
        processes = {"coordinator": coordinator, "store": store}
        used_s = {name: cpu_s(pid) for name, pid in processes.items()}
        url = f"http://127.0.0.1:{port}"
        for line in load.stdout or ():
            phase: dict[str, Any] = json.loads(line)
            if phase["phase"] == "scraping":
                metrics_ms = scrape_ms(url)
                load.communicate("done\n")
                break
            for name, pid in processes.items():
                now_s = cpu_s(pid)
                phase[f"{name}_cpu_share"] = (now_s - used_s[name]) / phase["seconds"]
                used_s[name] = now_s
            phases[phase["phase"]] = phase
        if load.wait():
            raise SystemExit("the load failed")
        with CoordinatorClient(url, token, timeout_s=10.0) as client:
            listed = sum(1 for _ in client.list_producers()) + sum(
                1 for _ in client.list_consumers()
            )
        if listed != members:
            raise SystemExit(f"of {members} members {listed} are in the books")
    alone, beside = phases["heartbeats"], phases["grants"]
    if beside["refusals"] > phases["settled"]["refusals"]:
        raise SystemExit("requests were refused: the machine is too busy, or too slow")
    return {
        "heartbeat_s": alone["heartbeat_s"],
        "reports_per_s": alone["reports"] / alone["seconds"],
        "report_p50_ms": alone["report_p50_ms"],
        "report_p99_ms": alone["report_p99_ms"],
        "grant_p99_ms": beside["grant_p99_ms"],
        "metrics_ms": statistics.median(metrics_ms),
        "metrics_max_ms": max(metrics_ms),
        "coordinator_cpu_share": alone["coordinator_cpu_share"],
        "store_cpu_share": alone["store_cpu_share"],
        "load_cpu_share": beside["load_cpu_share"],
        "late_p99_ms": alone["late_p99_ms"],
    }


def scrape_ms(url: str) -> list[float]:
    """How long each of some scrapes takes."""
    taken_ms = []
    with httpx.Client(trust_env=False) as client:
        client.get(f"{url}/healthz").raise_for_status()
        for _ in range(SCRAPES):
            started_s = time.perf_counter()
            client.get(f"{url}/metrics").raise_for_status()
            taken_ms.append((time.perf_counter() - started_s) * 1e3)
            time.sleep(0.1)
    return taken_ms


def main(
    members: Annotated[int, typer.Option(min=FEW, max=60_000, help="In the books.")] = 10_000,
    rounds: Annotated[int, typer.Option(min=1, help="Alternations.")] = 3,
    seconds: Annotated[float, typer.Option(min=2, help="Of each measurement, at least.")] = 20.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,  # noqa: FBT002 - a flag
) -> None:
    """Measure a coordinator of many members beside one of a hundred."""
    results: dict[int, list[dict[str, float]]] = {FEW: [], members: []}
    for _ in track(range(rounds), "measuring", console=Console(stderr=True)):
        for count, measured in results.items():
            measured.append(measure(count, seconds))
    few, many = (
        {key: statistics.median(result[key] for result in measured) for key in measured[0]}
        for measured in results.values()
    )
    if as_json:
        keys = ("report_p99_ms", "grant_p99_ms", "metrics_ms", "coordinator_cpu_share")
        figures = {key: many[key] for key in keys}
        print(
            json.dumps({"members": members, "report_p99_ms_at_100": few["report_p99_ms"]} | figures)
        )
        return
    table = Table("members", f"{FEW}", f"{members:,}", title="One coordinator and its members")
    for label, key, digits in (
        ("a report every, s", "heartbeat_s", 1),
        ("reports/s", "reports_per_s", 0),
        ("report, p50, ms", "report_p50_ms", 2),
        ("report, p99, ms", "report_p99_ms", 2),
        ("grant, p99, ms", "grant_p99_ms", 2),
        ("/metrics, ms", "metrics_ms", 1),
        ("/metrics, longest, ms", "metrics_max_ms", 1),
        ("coordinator, share of a core", "coordinator_cpu_share", 3),
        ("store, share of a core", "store_cpu_share", 3),
        ("load, share of a core", "load_cpu_share", 3),
        ("load's timers late, p99, ms", "late_p99_ms", 2),
    ):
        table.add_row(label, f"{few[key]:,.{digits}f}", f"{many[key]:,.{digits}f}")
    Console().print(table)
    reports, grants = (many[key] / few[key] for key in ("report_p99_ms", "grant_p99_ms"))
    print(
        f"p99 to that of {FEW}: reports {reports:.2f}, grants {grants:.2f} (bar: {MAX_P99_RATIO}); "
        f"heartbeats {many['coordinator_cpu_share']:.3f} of a core (bar: {MAX_CPU_SHARE}); "
        f"/metrics {many['metrics_ms']:.1f} ms (bar: {MAX_METRICS_MS}); medians of {rounds} rounds"
    )


if __name__ == "__main__":
    typer.run(main)
