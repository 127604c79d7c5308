"""What a memfd slab costs to make, map, unmap and free, with small pages and with huge ones.

Reproduces the table in `aqualib.transports.host_pages`, which decided how slabs are made. On
virtual machines that return free memory to their host, the first touch of a page costs many times
more than later ones; medians over several slabs that reuse the same memory hide that.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Annotated, TypeVar

import typer

from aqua_protocol import MIB, format_bytes
from aqualib.transports.host_pages import HostMapping
from aqualib.transports.memfd import sealed_memory

ResultT = TypeVar("ResultT")


def measure(nbytes: int, *, huge: bool) -> dict[str, float]:
    """Milliseconds of each step for one slab, and the rate of a copy into it."""
    fd = sealed_memory(nbytes)
    spent: dict[str, float] = {}
    ours = HostMapping(nbytes, fd=fd)

    def make() -> None:
        if huge:
            ours.collapse(fd)
        ours.populate()

    def borrow() -> HostMapping:
        mapping = HostMapping(nbytes, fd=fd)
        mapping.populate()
        return mapping

    spent["fault_ms"], _ = timed(make)
    spent["import_ms"], theirs = timed(borrow)
    source = HostMapping(nbytes)
    source.populate()
    copy_ms = min(
        timed(lambda: ctypes.memmove(theirs.address, source.address, nbytes))[0] for _ in range(5)
    )
    spent["copy_gb_per_s"] = nbytes / copy_ms / 1e6
    source.unmap()
    spent["unmap_ms"], _ = timed(theirs.unmap)

    def free() -> None:
        ours.unmap()
        os.close(fd)

    spent["last_close_ms"], _ = timed(free)
    return spent


def timed(call: Callable[[], ResultT]) -> tuple[float, ResultT]:
    """Milliseconds that `call` took, and its result."""
    begin = time.perf_counter()
    result = call()
    return (time.perf_counter() - begin) * 1e3, result


def main(
    *,
    slab_mib: Annotated[int, typer.Option(min=1, max=4096, help="Size of a slab, in MiB.")] = 64,
    repetitions: Annotated[int, typer.Option(min=1, max=1000)] = 15,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure what a slab of host memory costs."""
    report: dict[str, dict[str, float]] = {}
    for name, huge in (("small pages", False), ("huge pages", True)):
        runs = [measure(slab_mib * MIB, huge=huge) for _ in range(repetitions)]
        report[name] = {step: statistics.median(run[step] for run in runs) for step in runs[0]}
    if as_json:
        typer.echo(json.dumps({"slab_bytes": slab_mib * MIB, **report}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(format_bytes(slab_mib * MIB), *next(iter(report.values())))
    for name, figures in report.items():
        table.add_row(name, *(f"{figure:.3f}" for figure in figures.values()))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
