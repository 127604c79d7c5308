"""`make soak`: a real cluster under faults for hours, and whether anything grows or goes astray.

    python -m harness.soak --hours 1                        ten periods of six minutes
    python -m harness.soak --hours 0.1 --plant fd,bit       a control: it must find both

Ten equal periods; in each, faults are drawn by the seed while members page real bytes, and at its
end everybody rests and is counted. It fails if a byte is wrong or lost without a promise, if a
service dies by itself or does not come to rest, or if a count grows over the periods. A soak that
was interrupted goes on where it was; one that is complete begins anew.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from aqua_cli.output import say
from aqua_cli.program import ExitCode
from aqua_cli.progress import ProgressDisplay, progress
from aqua_coordinator.store.scripts import CONSTANTS
from harness.gpu.provenance import commit_of
from harness.soak_cluster import SoakCluster, new_directory
from harness.soak_counts import JUDGED, count_all, strange_keys
from harness.soak_faults import FaultKind, plan
from harness.soak_report import PERIODS, Period, SoakReport

FOLDER: Final = Path("out/soak")
LOG_EVERY_S: Final = 60.0
PLANTS: Final = {
    "fd": "consumer-steady",
    "slab": "consumer-steady",
    "thread": "producer-steady",
    "mib": "coordinator-steady",
    "key": "redis",
    "bit": "consumer-steady",
    "tensor": "consumer-steady",
}
"""What a control plants, and where: one thing that nothing gives back at the end of each period, or
in the first a bit that changes, or a tensor that is gone."""


def main() -> int:
    """Soak; the exit status is that of every command of Aqua."""
    parser = argparse.ArgumentParser(prog="harness.soak")
    parser.add_argument("--hours", type=float, default=1.0, help="in all; fractions too")
    parser.add_argument("--seed", type=int, default=0, help="of the faults, and of members")
    parser.add_argument("--plant", default="", help=f"to be found, by commas: {', '.join(PLANTS)}")
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    options = parser.parse_args()
    plants = [plant for plant in options.plant.split(",") if plant]
    if options.hours <= 0 or not set(plants) <= set(PLANTS):
        parser.error("hours are positive, and only what --help lists can be planted")
    commit = commit_of(Path())
    header = {"commit": commit, "hours": options.hours, "seed": options.seed, "plants": plants}
    report = SoakReport(FOLDER / f"{commit}-{options.seed}.jsonl", header)
    try:
        with _interruptible():
            failure = _soak(report, quiet=options.json)
    except KeyboardInterrupt:
        say(f"soak: interrupted after period {report.next_number - 1}; the same command goes on")
        return ExitCode.INTERRUPTED
    return _tell(report, failure, as_json=options.json)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does, so that nothing stays behind."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _soak(report: SoakReport, *, quiet: bool) -> str:
    """Run the periods that are missing; returns what went wrong, or nothing."""
    directory = new_directory()
    total_s = report.header["hours"] * 3600
    try:
        with (
            progress("Soaking", total=total_s, quiet=quiet, log_every_s=LOG_EVERY_S) as shown,
            SoakCluster(directory, report.header["seed"] + report.stretch) as cluster,
        ):
            report.header["means"] = cluster.means
            cluster.rest()
            cluster.fill_events(int(CONSTANTS["max_events"]))
            _count(report, cluster, Period(0, report.stretch, {}, {}))
            rests_s = 0.0
            while not report.is_complete:
                rests_s = _run_period(report, cluster, total_s / PERIODS, rests_s, shown)
                if report.losses():
                    break
    except AssertionError as error:
        shutil.copytree(directory, FOLDER / "logs", dirs_exist_ok=True, ignore=_all_but_logs)
        return f"in period {report.next_number}: {error}"
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return ""


def _all_but_logs(folder: str, names: list[str]) -> list[str]:
    return [n for n in names if not n.endswith(".log") and not (Path(folder) / n).is_dir()]


def _run_period(
    report: SoakReport,
    cluster: SoakCluster,
    period_s: float,
    rests_s: float,
    shown: ProgressDisplay,
) -> float:
    """One period; returns how long it took to come to rest."""
    number = report.next_number
    began_s = time.monotonic()
    plants = report.header["plants"]
    cluster.begin()
    # As long as the last one, this rest is a part of the period.
    works_s = period_s - min(rests_s, period_s / 2)
    faults = [
        fault
        for fault in plan(report.header["seed"], number, works_s)
        if cluster.has_slow_disk or fault.kind is not FaultKind.SLOW_DISK
    ]

    def tell(at_s: float, note: str) -> None:
        shown.update(
            done=(number - 1) * period_s + at_s,
            title=f"Period {number} of {PERIODS}",
            note=note,
        )

    cluster.work(faults, works_s, tell)
    worked_s = time.monotonic() - began_s
    tell(worked_s, "coming to rest")
    for how in {"bit", "tensor"} & set(plants) if number == 1 else ():
        cluster.call(PLANTS[how], "spoil", how)
    cluster.rest()
    for kind in plants:
        if kind == "key":
            with cluster.client() as client:
                client.set(f"{{aqua}}:lease:leak-{number}", "")
        elif kind not in {"bit", "tensor"}:
            cluster.call(PLANTS[kind], "leak", kind)
    rests_s = time.monotonic() - began_s - worked_s
    _count(
        report,
        cluster,
        Period(
            number,
            report.stretch,
            {},
            {},
            tally=dict(cluster.tallies),
            accounted=cluster.accounted,
            faults=dict(cluster.done),
            works_s=round(worked_s, 1),
            rests_s=round(rests_s, 1),
            load=round(os.getloadavg()[0], 1),
        ),
    )
    return rests_s


def _count(report: SoakReport, cluster: SoakCluster, period: Period) -> None:
    counts, details = count_all(cluster)
    period.counts.update(counts)
    period.details.update(details)
    report.add(period)
    assert not (strange := strange_keys(details)), f"keys without an end: {strange}"


def _tell(report: SoakReport, failure: str, *, as_json: bool) -> int:
    """Say what was found; the exit status."""
    summary = report.summary() if len(report.periods) > 1 else dict(report.header)
    found = [failure] * bool(failure) + summary.get("losses", []) + summary.get("grows", [])
    again = " ".join(
        f"{name}={value}"
        for name, value in (
            ("HOURS", report.header["hours"]),
            ("SEED", report.header["seed"]),
            ("PLANT", ",".join(report.header["plants"])),
        )
        if value != ""
    )
    remedy = ""
    if found:
        remedy = f"make soak {again} repeats its faults"
        remedy += f"; logs are in {FOLDER}/logs" if failure else ""
    elif not summary.get("judged"):
        found = ["interrupted too often to judge growth"]
        remedy = f"Remove {FOLDER} and let make soak {again} run through."
    if as_json:
        sys.stdout.write(json.dumps(summary | {"found": found, "remedy": remedy}) + "\n")
    else:
        _say_table(report, summary)
        for line in found:
            say(f"soak: {line}")
        say(f"  {remedy}" if found else "soak: nothing grows, nothing is wrong, nothing is lost")
    return ExitCode.FAILED if found else ExitCode.DONE


def _say_table(report: SoakReport, summary: dict[str, object]) -> None:
    for key, value in summary.items():
        if key not in {"before", "after", "grows", "losses"}:
            say(f"{key}: {value}")
    if len(report.periods) < 2:
        return
    after = report.periods[-1].counts
    for subject, counts in after.items():
        for name in counts:
            values = [value for stretch in report.series(subject, name) for value in stretch]
            judged = "" if name in JUDGED else "  (not judged)"
            before = report.periods[0].counts[subject][name]
            shown = " ".join(f"{value:.4g}" for value in values)
            say(f"{subject:>20} {name:<16} {before:6.4g} | {shown}{judged}")


if __name__ == "__main__":
    sys.exit(main())
