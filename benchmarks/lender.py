"""How often chance takes a lender's memory back, and how soon a real rise of its load does.

A virtual clock, the product's own charts, and arrivals by seed. The yardstick is a CUSUM that is
told the rates before and after the change, sees every arrival at its moment, and gives false alarms
as often as the product does (beside it: one that gives two an hour).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Annotated, Final

import numpy as np
import typer
from jaxtyping import Float64

from aqualib.producer.arrivals import ArrivalWatch, Chart
from aqualib.producer.informer import LONGEST_POLL_S, SHORTEST_POLL_S

HOUR_S: Final = 3600.0
BEFORE: Final = 0.9
AFTER: Final = 2.0
LOADS: Final = (0.5, 0.8, 0.9, 1.0)

Times = Float64[np.ndarray, " arrivals"]


def gaps(rng: np.random.Generator, per_s: float, cv: float, count: int) -> Times:
    """Gaps between arrivals, gamma with this coefficient of variation."""
    return rng.gamma(cv**-2, cv**2 / per_s, count)


def times(rng: np.random.Generator, per_s: float, cv: float, seconds: float) -> Times:
    """Arrivals in this time."""
    count = int(seconds * per_s + 20 * cv * math.sqrt(seconds * per_s) + 100)
    found = np.cumsum(gaps(rng, per_s, cv, count))
    return found[found < seconds]


def looks(found: Times, seconds: float, look_s: float) -> Iterator[tuple[float, int]]:
    """Time and count of each look."""
    at_s = np.arange(0.0, seconds, look_s)
    return zip(at_s.tolist(), np.searchsorted(found, at_s).tolist(), strict=True)


def steady(rate: float, load: float, cv: float, hours: float, seed: int) -> tuple[int, float]:
    """False alarms, and the share of the time without, after half an hour to learn."""
    seconds, look_s = (hours + 0.5) * HOUR_S, look_of(rate)
    found = times(np.random.default_rng(seed), load * rate, cv, seconds)
    watch, alarms, calm, total = ArrivalWatch(), 0, 0, 0
    for now_s, count in looks(found, seconds, look_s):
        before, watch = watch.is_fast, watch.seen(count, rate, now_s)
        if now_s >= HOUR_S / 2:
            alarms += watch.is_fast and not before
            calm += not watch.is_fast
            total += 1
    return alarms, calm / total


def look_of(rate: float) -> float:
    """Seconds between two looks, as the informer chooses them."""
    return max(SHORTEST_POLL_S, min(LONGEST_POLL_S, 1 / rate))


def delay_s(rate: float, seed: int) -> float:
    """Seconds from the change to the alarm."""
    rng, look_s = np.random.default_rng(seed), look_of(rate)
    change_s = 100 / rate + rng.uniform(0.0, look_s)
    until_s = change_s + 600 / rate
    found = np.concatenate(
        [
            times(rng, BEFORE * rate, 1.0, change_s),
            change_s + times(rng, AFTER * rate, 1.0, until_s - change_s),
        ]
    )
    watch = ArrivalWatch()
    for now_s, count in looks(found, until_s, look_s):
        if now_s <= change_s and watch.is_fast:
            watch = watch.turned(is_fast=False)
        watch = watch.seen(count, rate, now_s)
        if now_s > change_s and watch.is_fast:
            return now_s - change_s
    return until_s - change_s


def oracle_delay_s(rate: float, per_hour: float, seeds: int) -> float:
    """Mean delay of the CUSUM that knows both rates, at so many false alarms an hour."""
    weight, drift = math.log(AFTER / BEFORE), (AFTER - BEFORE) * rate
    # For continuous observation the closed form is right to a hundredth of a mean time.
    high = Chart(BEFORE, AFTER, 1.0).threshold(HOUR_S / per_hour * rate, 1.0)
    delays = []
    for seed in range(seeds):
        each = np.random.default_rng(seed)
        before = weight - drift * each.exponential(1 / (BEFORE * rate), 200)
        at_first = reflected(before, 0.0)
        waits = each.exponential(1 / (AFTER * rate), 2000)
        sums, total_s = at_first, 0.0
        for wait_s in waits.tolist():
            total_s += wait_s
            sums = max(0.0, sums - drift * wait_s) + weight
            if sums >= high:
                break
        delays.append(total_s)
    return float(np.mean(delays))


def reflected(steps: Times, first: float) -> float:
    """The sum after these steps, never below zero."""
    for step in steps.tolist():
        first = max(0.0, first + step)
    return first


def main(
    *,
    rate: Annotated[list[float] | None, typer.Option(help="Steady rates, requests/s.")] = None,
    hours: Annotated[float, typer.Option(min=1, help="Simulated for each load.")] = 40.0,
    seeds: Annotated[int, typer.Option(min=1, help="Changes of the load.")] = 400,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a lender's false reclaims and its delay."""
    report = []
    for each in rate or [0.5, 2.5, 10.0]:
        row: dict[str, object] = {"steady_per_s": each}
        for cv, loads in ((1.0, LOADS), (2.0, (BEFORE,)), (4.0, (BEFORE,))):
            for load in loads:
                alarms, share = steady(each, load, cv, hours, seed=1)
                row[f"load_{load}_cv_{cv:g}"] = {
                    "false_reclaims_per_hour": alarms / hours,
                    "lent_share": share,
                }
        ours = row[f"load_{BEFORE}_cv_1"]
        assert isinstance(ours, dict)
        per_hour = max(ours["false_reclaims_per_hour"], 1 / hours)
        delay = float(np.mean([delay_s(each, seed) for seed in range(seeds)]))
        row["delay_s"] = delay
        oracle = oracle_delay_s(each, per_hour, seeds)
        row["oracle_delay_s"] = oracle
        row["oracle_delay_at_2_per_hour_s"] = oracle_delay_s(each, 2.0, seeds)
        row["ratio"] = delay / oracle
        report.append(row)
    if as_json:
        typer.echo(json.dumps({"hours": hours, "seeds": seeds, "rates": report}))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("steady/s", *(name for name in report[0] if name != "steady_per_s"))
    for row in report:
        cells = []
        for value in row.values():
            if isinstance(value, dict):
                cells.append(f"{value['false_reclaims_per_hour']:.2f}/h {value['lent_share']:.1%}")
            else:
                cells.append(f"{value:.3g}")
        table.add_row(*cells)
    Console(width=200).print(table)


if __name__ == "__main__":
    typer.run(main)
