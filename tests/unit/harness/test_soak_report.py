"""The report of a soak: what it keeps, where it goes on, and what it calls growth and loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.soak_report import PERIODS, Period, SoakReport

HEADER: dict[str, Any] = {"commit": "c0ffee", "hours": 0.5, "seed": 0, "plants": []}


def period(number: int, stretch: int = 0, *, fds: int = 27, **changes: Any) -> Period:  # noqa: ANN401 - of Period
    return Period(
        number,
        stretch,
        counts={"coordinator-steady": {"fds": fds, "rss MiB": 200 + 10 * number}},
        details={"coordinator-steady fds": {"socket:[N]": fds - 7, "pipe:[N]": 7}},
        **changes,
    )


def test_nothing_grows_where_counts_stay(tmp_path: Path) -> None:
    report = SoakReport(tmp_path / "s", HEADER)
    for number in range(PERIODS + 1):
        report.add(period(number, tally={"verified": 10, "wrong": 0}))
    assert report.is_complete
    assert report.growths() == []  # Resident memory is told, not judged.
    assert report.losses() == []
    assert report.summary()["verified_bytes"] == 110


def test_what_grows_is_named_with_what_it_consists_of(tmp_path: Path) -> None:
    report = SoakReport(tmp_path / "s", HEADER)
    for number in range(PERIODS + 1):
        report.add(period(number, fds=27 + number))
    (growth,) = report.growths()
    assert str(growth) == (
        "coordinator-steady: fds grow by 1.00 a period (at least 1.00), from 28 to 37: "
        "socket:[N] +9"
    )


def test_wrong_and_lost_bytes_are_told_and_those_of_killed_consumers_are_not(
    tmp_path: Path,
) -> None:
    report = SoakReport(tmp_path / "s", HEADER)
    report.add(period(0))
    report.add(period(1, tally={"wrong": 1, "lost": 0, "missing": 4096}, accounted=1 << 20))
    assert report.losses() == ["period 1: 1 bytes wrong", "period 1: 4096 bytes missing"]
    assert report.summary()["lost_bytes_with_killed_consumers"] == 1 << 20


def test_an_interrupted_soak_goes_on_in_another_stretch(tmp_path: Path) -> None:
    report = SoakReport(tmp_path / "s", HEADER)
    for number in range(8):
        report.add(period(number))
    again = SoakReport(tmp_path / "s", HEADER)
    assert (again.next_number, again.stretch, again.is_complete) == (8, 1, False)
    for number in (0, 8, 9, 10):
        again.add(period(number, 1, fds=90))
    assert again.is_complete
    assert again.growths() == []
    assert again.series("coordinator-steady", "fds") == [[27] * 7, [90] * 3]


def test_another_soak_or_a_complete_one_begins_anew(tmp_path: Path) -> None:
    report = SoakReport(tmp_path / "s", HEADER)
    report.add(period(0))
    assert SoakReport(tmp_path / "s", HEADER | {"seed": 1}).periods == []
    report = SoakReport(tmp_path / "s", HEADER)
    for number in range(PERIODS + 1):
        report.add(period(number))
    assert SoakReport(tmp_path / "s", HEADER).periods == []
