"""What a what-if simulation has found, as values: for tables, JSON and the HTML report.

Every number has three values: of the recorded day, and the least and most over it and the drawn
ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

from aqua_simulator.whatif.cluster import InputFinding

LATENCIES: Final = ("ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s")


@dataclass(frozen=True, slots=True)
class Interval:
    """A number of the recorded day, and its least and most over the drawn days."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class CheckRow:
    """A number of the recording beside its simulation."""

    model: str
    name: str
    recorded: float
    simulated: float

    @property
    def error_percent(self) -> float:
        """How far the simulated number is off."""
        return (self.simulated / self.recorded - 1.0) * 100.0


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """What a scenario brings, by the names of `NUMBERS`, and latencies by model."""

    scenario: str
    numbers: dict[str, Interval]
    latencies: dict[str, dict[str, Interval]]


@dataclass(frozen=True, slots=True)
class ContentionRow:
    """What sharing links and memory costs a model or a lending GPU in a scenario, in percent.

    Attributes:
        copying_percent: Of the day, when copies ran on its links.
        kernels_percent, worst_percent: By how much its kernels took longer for what others copied,
            a mean over the day, and in the worst second.
        ttft_p99_percent, tpot_mean_percent: Latencies against the same day without contention; None
            where there are none.
    """

    scenario: str
    name: str
    copying_percent: float
    kernels_percent: float
    worst_percent: float
    ttft_p99_percent: float | None
    tpot_mean_percent: float | None


@dataclass(frozen=True, slots=True)
class SensitivityRow:
    """How far one assumption moves what all parts together bring."""

    assumption: str
    offline_gpu_hours: tuple[float, float]
    memory_gb_hours: tuple[float, float]
    share: float


@dataclass(frozen=True, slots=True)
class SavingsReport:
    """All of it.

    Attributes:
        step_times: By model: the fitted coefficients, and whether they are the data sheet's.
        targets: By model: what counts as the same service.
        swings: The assumption that matters most first.
        remarks: What the numbers cannot say.
        rates: Requests per second over the recorded day, by model.
        interference: Where the curve is from that says what copies cost kernels; None: contention
            was left out.
    """

    hours: float
    gpu_count: int
    checks: list[CheckRow]
    findings: list[InputFinding]
    step_times: dict[str, dict[str, float | bool]]
    targets: dict[str, tuple[float, float]]
    idle_gpu_hours: Interval
    outlooks: list[ScenarioResult]
    swings: list[SensitivityRow]
    remarks: list[str] = field(default_factory=list)
    rates: dict[str, list[float]] = field(default_factory=dict)
    interference: str | None = None
    contention: list[ContentionRow] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """The answer as JSON has it."""
        document = asdict(self)
        for row, check in zip(document["checks"], self.checks, strict=True):
            row["error_percent"] = check.error_percent
        return document


NUMBERS: Final[dict[str, tuple[str, str]]] = {
    "memory_gb_hours": ("memory to be had at peers", "GB h"),
    "memory_used_gb_hours": ("memory used at peers", "GB h"),
    "gpu_hours": ("GPU time harvested", "GPU h"),
    "offline_tokens": ("offline tokens", "million"),
    "offline_gpu_hours": ("offline work in GPU time of its own", "GPU h"),
    "blend_gain": ("offline throughput of an engine alone", "x"),
    "reclaims": ("reclaims", ""),
    "reclaim_s": ("a reclaim takes", "s"),
    "producer_ttft_percent": ("p99 TTFT of producers", "%"),
    "producer_tpot_percent": ("mean TPOT of producers", "%"),
    "gpus_fewer": ("GPUs fewer for the same service", ""),
    "money_per_day": ("money a day", ""),
}
"""Names of an outlook's numbers: for people, and their unit."""


class ReportTable(NamedTuple):
    """A table of the report as text."""

    title: str
    columns: Sequence[str]
    rows: list[tuple[str, ...]]


def check_table(report: SavingsReport) -> ReportTable:
    """The simulated day beside the recorded one; no rows where nothing can be compared."""
    return ReportTable(
        "How far the simulation is off the recording",
        ("model", "", "recorded", "simulated", "error, %"),
        [
            (
                *(row.model, row.name, f"{row.recorded:.4g}", f"{row.simulated:.4g}"),
                f"{row.error_percent:+.1f}",
            )
            for row in report.checks
        ],
    )


def number_table(report: SavingsReport) -> ReportTable:
    """What each scenario brings, by the names of `NUMBERS`."""
    return ReportTable(
        "What Aqua would bring",
        ("", "with", "", "unit"),
        [
            (text, each.scenario, interval_text(each.numbers[key]), unit)
            for key, (text, unit) in NUMBERS.items()
            for each in report.outlooks
            if key in each.numbers
        ],
    )


def latency_table(report: SavingsReport, text_of: Callable[[Interval | None], str]) -> ReportTable:
    """Latencies by model and scenario, each as `text_of` writes it."""
    return ReportTable(
        "Latencies, ms",
        ("model", "with", *(key.removesuffix("_s").replace("_", " ") for key in LATENCIES)),
        [
            (model, each.scenario, *(text_of(each.latencies[model].get(key)) for key in LATENCIES))
            for model in report.outlooks[0].latencies
            for each in report.outlooks
        ],
    )


def contention_table(report: SavingsReport) -> ReportTable:
    """The costs of contention by model or lender and scenario."""
    return ReportTable(
        "What sharing links and memory costs",
        (
            *("", "with", "copies run, % of time", "kernels longer, %", "worst second"),
            *("p99 TTFT, %", "mean TPOT, %"),
        ),
        [
            (
                each.name,
                each.scenario,
                f"{each.copying_percent:.2g}",
                f"{each.kernels_percent:.2g}",
                f"{each.worst_percent:.2g}",
                *(
                    "-" if value is None else f"{value:+.2f}"
                    for value in (each.ttft_p99_percent, each.tpot_mean_percent)
                ),
            )
            for each in report.contention
        ],
    )


def interval_text(found: Interval | None, factor: float = 1.0) -> str:
    """A number with its interval, three digits; empty for none."""
    if found is None:
        return ""
    value, low, high = (f"{each * factor:.3g}" for each in (found.value, found.low, found.high))
    return value if low == high else f"{value} ({low} to {high})"
