"""The decisions of `make gpu`: what runs, what a sweep says, what is written where."""

from __future__ import annotations

import math
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from aqua_protocol import KIB
from aqualib.transports import gpu_thresholds
from aqualib.transports.gpu_thresholds import CopyThresholds, read_thresholds, thresholds_of
from harness.bounds import until
from harness.cuda.stand_in import stand_in
from harness.gpu import needs, pages, predictions
from harness.gpu.__main__ import main
from harness.gpu.choice import Compared, choose, choose_lanes, lanes_of, thresholds
from harness.gpu.copies import LANES, lanes
from harness.gpu.device import StandInGpu
from harness.gpu.order import order
from harness.gpu.outcome import Outcome, State
from harness.gpu.plan import (
    BUDGET_MINUTES,
    LIMIT_S,
    STEPS,
    Budget,
    fingerprint,
    still_to_run,
    unknown,
)
from harness.gpu.provenance import COMMIT_VARIABLE, Origin, commit_of
from harness.gpu.races import busy_kernels
from harness.gpu.records import Record, alone, read_records, write_records
from harness.gpu.sampling import Figure
from harness.gpu.step import by_function, read_pytest

ROOT = Path(__file__).resolve().parents[3]
STEP = STEPS[0]
REAL = Origin("H100", "580.1", "2.11", "abc", "2026-11-23 12:00:00", is_stand_in=False)
STANDS_IN = replace(REAL, gpu="stand-in", is_stand_in=True)


def record(outcome: Outcome, *, mark: str = "mark", origin: Origin = REAL) -> Record:
    return Record(STEP.name, mark, 1.0, origin, outcome)


# --- Numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [6, 9, 30])
def test_an_interval_holds_the_true_median_as_often_as_it_says(count: int) -> None:
    generator = random.Random(count)
    held = 0
    for _ in range(2000):
        figure = Figure.of([generator.lognormvariate(0, 1) for _ in range(count)])
        assert figure.low <= figure.median <= figure.high
        held += figure.low <= 1 <= figure.high
    assert held >= 0.94 * 2000


def test_few_rounds_give_their_whole_range() -> None:
    assert Figure.of([3.0, 1.0, 2.0]) == Figure(2.0, 1.0, 3.0)


def test_more_rounds_give_a_narrower_interval() -> None:
    values = [float(n) for n in range(30)]
    few, many = Figure.of(values[::5]), Figure.of(values)
    assert many.high - many.low < few.high - few.low
    assert many.median == statistics.median(values)


# --- Thresholds -------------------------------------------------------------------------------


def compared(kib: int, staged: float, direct: float, noise: float = 1.0) -> Compared:
    return Compared(
        kib * KIB,
        Figure(staged, staged - noise, staged + noise),
        Figure(direct, direct - noise, direct + noise),
    )


def test_a_clear_crossing_is_taken() -> None:
    sweep = [compared(8, 40, 5), compared(16, 40, 10), compared(32, 40, 50), compared(64, 40, 54)]
    choice = choose(sweep, 256 * KIB)
    assert choice.nbytes == 32 * KIB
    assert choice.evidence.endswith("up to 16 KiB, copying directly from 32 KiB; chosen")


def test_the_default_stays_where_the_sweep_does_not_speak_against_it() -> None:
    sweep = [compared(64, 40, 10), compared(256, 40, 41), compared(1024, 40, 50)]
    assert choose(sweep, 256 * KIB).nbytes == 256 * KIB


def test_noise_moves_no_threshold() -> None:
    sweep = [compared(kib, 40, 30 + kib / 100, noise=30) for kib in (4, 64, 1024)]
    assert choose(sweep, 256 * KIB).nbytes == 256 * KIB


def test_the_worst_of_two_ways_decides() -> None:
    sweep = [compared(64, 40, 50), compared(64, 40, 10), compared(128, 40, 50)]
    assert choose(sweep, 4 * KIB).nbytes == 128 * KIB


def test_packing_that_always_wins_is_kept_beyond_the_sweep() -> None:
    sweep = [compared(kib, 40, 10) for kib in (64, 512)]
    assert choose(sweep, 256 * KIB).nbytes == 1024 * KIB


def sweep_figures(crossing_bytes: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for side in ("host", "device"):
        for way in ("out", "in"):
            for row_bytes in (4096, 65536, 1 << 20):
                direct = 50 if row_bytes >= crossing_bytes else 5
                for route, value in (("staged", 40), ("direct", direct)):
                    for part, offset in (("median", 0), ("low", -1), ("high", 1)):
                        figures[f"{side} {way} {route} {row_bytes}x1 {part}"] = value + offset
    return figures


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({1: (50, 50), 2: (50, 51), 4: (50, 50)}, 1),
        ({1: (370, 370), 2: (430, 371), 4: (431, 372)}, 2),
        ({1: (370, 370), 2: (430, 300), 4: (431, 369)}, 4),
        ({1: (370, 370), 2: (430, 300), 4: (431, 300)}, 1),
        ({1: (300, 300), 2: (330, 330), 4: (360, 360)}, 4),
        ({}, 1),
    ],
    ids=["noise", "two", "four, since two are worse in", "no gain without a loss", "all", "none"],
)
def test_as_many_lanes_are_taken_as_surely_pay(
    rates: dict[int, tuple[float, float]], chosen: int
) -> None:
    sweep = {
        count: [Figure(rate, rate - 2, rate + 2) for rate in pair] for count, pair in rates.items()
    }
    assert choose_lanes(sweep, 1)[0] == chosen


def test_lanes_to_other_gpus_are_tried_where_there_are_any() -> None:
    for gpu_count, sides in ((1, {"host"}), (3, {"host", "device"})):
        with stand_in(seed=3, gpu_count=gpu_count) as standing:
            found = lanes(StandInGpu(standing)).figures
        swept = {side for side in ("host", "device") if lanes_of(found, side)}
        assert swept == sides
        assert list(lanes_of(found, "host")) == list(LANES)


def test_lanes_are_written_where_they_were_measured(tmp_path: Path) -> None:
    (tmp_path / "aqualib/src/aqualib/transports").mkdir(parents=True)
    figures = {
        f"device {way} over {count} lanes {part}": count * 100.0 + offset
        for way in ("out", "in")
        for count in (1, 2)
        for part, offset in (("median", 0), ("low", -1), ("high", 1))
    }
    records = {
        "rows": replace(record(Outcome(figures=sweep_figures(65536))), step="rows"),
        "lanes": replace(record(Outcome(figures=figures)), step="lanes"),
    }
    written = pages.write_thresholds(tmp_path, tmp_path / "out", records)
    assert written is not None
    found = read_thresholds(written)["H100"]
    assert (found.device_lanes, found.host_lanes) == (2, 1)
    assert found.provenance is not None
    assert "2 of 2 tried" in found.provenance.evidence["device_lanes"]
    assert "not measured" in found.provenance.evidence["host_lanes"]
    assert found.host_run_bytes == 65536, "the rows' own sweep counts as before"


def test_what_is_written_is_what_the_transports_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = Outcome(figures=sweep_figures(65536))
    records = {"rows": replace(record(outcome), step="rows")}
    folder = tmp_path / "aqualib/src/aqualib/transports"
    folder.mkdir(parents=True)
    written = pages.write_thresholds(tmp_path, tmp_path / "out", records)
    assert written == folder / "gpu_thresholds.json"
    found = read_thresholds(written)
    assert found == {"H100": thresholds(outcome.figures, REAL)}
    assert found["H100"].host_run_bytes == 65536
    assert found["H100"].provenance is not None
    assert found["H100"].provenance.commit == "abc"
    monkeypatch.setattr(gpu_thresholds, "FILE", written)
    monkeypatch.setattr(gpu_thresholds, "read_thresholds", lambda: read_thresholds(written))
    assert thresholds_of("H100").host_run_bytes == 65536
    assert thresholds_of("another") == CopyThresholds()


def test_a_second_kind_of_gpu_is_added(tmp_path: Path) -> None:
    (tmp_path / "aqualib/src/aqualib/transports").mkdir(parents=True)
    for name in ("H100", "A100"):
        outcome = Outcome(figures=sweep_figures(65536))
        kept = record(outcome, origin=replace(REAL, gpu=name))
        written = pages.write_thresholds(tmp_path, tmp_path, {"rows": replace(kept, step="rows")})
    assert written is not None
    assert set(read_thresholds(written)) == {"H100", "A100"}


def test_the_packages_file_can_be_read_and_names_real_gpus_only() -> None:
    for name, entry in read_thresholds().items():
        assert entry.provenance is not None, name
        assert "stand-in" not in name


# --- What runs --------------------------------------------------------------------------------


def test_a_repeat_runs_what_failed_changed_or_never_ran() -> None:
    first, second, third, fourth = STEPS[:4]
    marks = {step.name: "now" for step in STEPS}
    records = {
        first.name: record(Outcome(), mark="now"),
        second.name: record(Outcome(), mark="before"),
        third.name: record(Outcome(State.FAILED), mark="now"),
        fourth.name: record(Outcome(State.NOT_RUN), mark="now"),
    }
    left = still_to_run(STEPS[:5], records, marks)
    assert left == [second, third, fourth, STEPS[4]]


def test_a_fingerprint_follows_sources_and_hardware(tmp_path: Path) -> None:
    source = tmp_path / STEP.sources[0]
    source.parent.mkdir(parents=True)
    source.write_text("one")
    before = fingerprint(STEP, tmp_path, "H100")
    assert fingerprint(STEP, tmp_path, "H100") == before
    assert fingerprint(STEP, tmp_path, "H200") != before
    (tmp_path / "README.md").write_text("elsewhere")
    assert fingerprint(STEP, tmp_path, "H100") == before
    source.write_text("two")
    assert fingerprint(STEP, tmp_path, "H100") != before


def test_every_step_fits_the_budget_and_has_sources() -> None:
    assert len({step.name for step in STEPS}) == len(STEPS)
    assert all(0 < step.usual_s <= step.limit_s <= LIMIT_S for step in STEPS)
    assert sum(step.usual_s for step in STEPS) <= BUDGET_MINUTES * 60
    for step in STEPS:
        assert all(list(ROOT.glob(source)) for source in step.sources), step.name
    assert unknown(["machine", "nonsense"]) == ["nonsense"]


def test_a_step_begins_only_with_its_usual_time_left_and_ends_with_the_budget() -> None:
    budget = Budget(total_s=STEP.usual_s + 100)
    assert budget.allows(STEP)
    assert budget.limit_s(STEP) == min(STEP.limit_s, STEP.usual_s + 100)
    budget.spent_s = 101
    assert not budget.allows(STEP)


def test_the_last_line_of_pytest_is_read() -> None:
    said = "FAILED a.py::b - boom\nSKIPPED [2] tests/c.py:1: one GPU here\n1 failed, 3 passed in 2s"
    outcome = read_pytest(said, 1)
    assert outcome.state is State.FAILED
    assert outcome.figures["tests passed"] == 3
    assert "skipped 2: tests/c.py:1: one GPU here" in outcome.notes
    assert read_pytest("5 passed in 1s", 0).state is State.PASSED
    assert read_pytest("9 deselected in 1s", 5).state is State.FAILED, "nothing ran, nothing shown"


# --- What is written --------------------------------------------------------------------------


def test_records_survive_the_disk(tmp_path: Path) -> None:
    outcome = Outcome(figures={"a": 1.5}, notes=["n"])
    outcome.table("t", "x").add(3)
    outcome.check("c", False, "f")
    outcome.curve("p", "l").x.append(1.0)
    records = [record(outcome), record(outcome, origin=replace(REAL, gpu="A100"))]
    write_records(tmp_path, records)
    assert read_records(tmp_path) == records
    assert read_records(tmp_path / "elsewhere") == []


def test_a_figure_that_is_no_number_takes_no_other_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcome = Outcome(figures={"a": math.nan, "b": 1.0})
    outcome.curve("plot", "line").y.append(math.inf)
    module = SimpleNamespace(step=lambda _: outcome)
    monkeypatch.setitem(sys.modules, "harness.gpu.not_numbers", module)
    found = by_function(replace(STEP, runs="not_numbers:step"), stands_in=True)
    write_records(tmp_path, [record(found)])
    kept = read_records(tmp_path)[0].outcome
    assert kept.figures == {"b": 1.0}
    assert [check.what for check in kept.checks] == ["a is a number", "plot, line: numbers"]
    assert kept.state is State.FAILED


def test_the_stand_in_never_reaches_the_docs(tmp_path: Path) -> None:
    outcome = Outcome(figures=sweep_figures(65536))
    records = {
        STEP.name: record(outcome, origin=STANDS_IN),
        "rows": replace(record(outcome, origin=STANDS_IN), step="rows"),
    }
    folder = tmp_path / "out"
    folder.mkdir()
    written = pages.write_page(tmp_path, folder, records)
    assert written == folder / "gpu.md"
    assert "no figure here means anything" in written.read_text()
    assert pages.write_thresholds(tmp_path, folder, records) == folder / "thresholds.json"
    assert not (tmp_path / "docs").exists()
    assert not (tmp_path / "aqualib").exists()


def test_the_page_says_what_was_found_and_what_was_not_run(tmp_path: Path) -> None:
    outcome = Outcome(figures={"plain to pinned GB/s": 12.0})
    outcome.check("bytes come back", False, "3 | 4")
    text = pages.page({"plain": replace(record(outcome), step="plain")}, {})
    assert "12.0 GB/s: below" in text
    assert "**NO** (3 / 4)" in text
    assert "| rows | not run yet" in text
    assert "H100; driver 580.1; torch 2.11; commit abc" in text


def test_the_docs_have_every_prediction_as_it_stands() -> None:
    text = (ROOT / "docs/gpu.md").read_text()
    missing = [line for line in predictions.as_table() if line not in text]
    assert not missing, "write the rows of harness.gpu.predictions.as_table() into docs/gpu.md"
    names = {step.name for step in STEPS}
    assert {each.step for each in predictions.PREDICTIONS} <= names


def test_a_tree_without_history_is_named_by_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of(tmp_path) == "unknown"
    monkeypatch.setenv(COMMIT_VARIABLE, "abc123")
    assert commit_of(tmp_path) == "abc123"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The command, in this process."""
    monkeypatch.setattr(sys, "argv", ["harness.gpu", *arguments])
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    return main()


def test_without_a_gpu_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needs, "why_no_gpu", lambda: "nvidia-smi is alone")
    assert run(monkeypatch) == 3
    said = capsys.readouterr().err
    assert "make gpu needs a GPU, and there is none to use: nvidia-smi is alone" in said
    assert "STAND_IN=1" in said


def test_a_missing_package_is_named_with_a_way_to_bring_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(needs, "is_there", lambda module: module != "pydantic_settings")
    assert run(monkeypatch, "--stand-in") == 3
    assert "-d wheels pydantic-settings" in capsys.readouterr().err


def test_a_step_that_is_none_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--only", "nonsense", "--stand-in")
    assert "interference" in capsys.readouterr().err, "the names are listed"


@pytest.mark.parametrize("minutes", ["0", "-1", "nan"])
def test_a_run_takes_some_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], minutes: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, "--minutes", minutes, "--stand-in")
    assert "must be more than 0" in capsys.readouterr().err


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """Arguments of runs that have nothing to do."""
    monkeypatch.setattr("harness.gpu.__main__.STEPS", ())
    return ("--stand-in", "--records", str(tmp_path))


@pytest.mark.parametrize("damaged", ["[{", '[{"step": "rows"}]', "\x00"])
def test_damaged_records_end_no_run_and_are_kept(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    here: tuple[str, ...],
    damaged: str,
) -> None:
    folder = Path(here[-1])
    (folder / "records.json").write_text(damaged)
    for looks in ("--list", "--report"):
        assert run(monkeypatch, *here, looks) == 1
        assert "records.json holds no records" in capsys.readouterr().err
    assert run(monkeypatch, *here) == 0
    assert "every step is run" in capsys.readouterr().err
    assert (folder / "records.damaged.json").read_text() == damaged


def test_a_step_that_the_end_of_a_run_cuts_off_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("harness.gpu.__main__.STEPS", [replace(STEP, usual_s=0.0)])
    before = [replace(record(Outcome(State.FAILED)), step="rows")]
    write_records(tmp_path, before)
    options = ("--stand-in", "--records", str(tmp_path), "--minutes", "0.001")
    assert run(monkeypatch, *options) == 1
    assert f"no time was left for {STEP.name}: run it again" in capsys.readouterr().err
    assert read_records(tmp_path) == before


def test_a_second_run_at_once_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: tuple[str, ...]
) -> None:
    with alone(Path(here[-1])):
        assert run(monkeypatch, *here) == 1
    assert "another run writes to" in capsys.readouterr().err
    assert run(monkeypatch, *here) == 0


def test_a_report_of_nothing_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: tuple[str, ...]
) -> None:
    assert run(monkeypatch, *here, "--report") == 1
    assert "no records in" in capsys.readouterr().err


def test_records_that_cannot_be_written_end_a_run_with_a_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], here: tuple[str, ...]
) -> None:
    (Path(here[-1]) / "lock").mkdir()
    assert run(monkeypatch, *here) == 1
    assert "make gpu cannot go on" in capsys.readouterr().err


def test_what_must_not_wait_loads_no_kernel_while_a_stream_is_busy() -> None:
    with stand_in(seed=1) as standing:
        assert order(StandInGpu(standing)).state is State.PASSED


def test_kernels_beside_a_walk_end_none_of_its_captures() -> None:
    with stand_in(seed=1) as standing:
        gpu, queued = StandInGpu(standing), standing.machine.submissions
        with busy_kernels(gpu), gpu.capturing():
            before = queued.total()
            until(lambda: queued.total() > before + 50, "waited for between")


@pytest.mark.slow
def test_a_step_on_the_stand_in_is_recorded_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    here = ("--stand-in", "--records", str(tmp_path))
    of_another = record(Outcome(figures={"a": 1.5}))
    write_records(tmp_path, [of_another])
    assert run(monkeypatch, *here, "--only", "pinning") == 0
    assert "passed in" in capsys.readouterr().err
    assert run(monkeypatch, *here, "--list") == 0
    lines = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    assert lines["pinning"] == "passed"
    assert lines["rows"] == "to"
    first, second = read_records(tmp_path)
    assert first == of_another, "what was measured on other hardware is not had again"
    assert second.origin.is_stand_in
