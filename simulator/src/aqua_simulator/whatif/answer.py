"""The answer: what Aqua's parts bring on the recorded day, each alone and together.

Every number has three values: of the recorded day, and the least and most over it and the drawn
ones; of offline work also over step times as far off as their fit may be. The twin's own errors
stand first: the day without Aqua, simulated, beside the recording, on requests that no step time
was fitted to.

Fewer GPUs and offline work are alternatives (a GPU that is gone has no gaps), so that money counts
the larger of the two and never both. Without prices there is no money.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from aqua_simulator.serving.request import summary_of
from aqua_simulator.whatif.calibration import calibrated
from aqua_simulator.whatif.cluster import Cluster, InputFinding
from aqua_simulator.whatif.jobs import (
    CapacityJob,
    GapJob,
    Job,
    OfflineJob,
    OnlineJob,
    SimulationInput,
    run_all,
    targets,
)
from aqua_simulator.whatif.links import LinkUse
from aqua_simulator.whatif.members import Assumptions
from aqua_simulator.whatif.online import OnlineResult
from aqua_simulator.whatif.recorded_day import ModelLoad, RecordedLoad
from aqua_simulator.whatif.report import (
    LATENCIES,
    NUMBERS,
    CheckRow,
    ContentionRow,
    Interval,
    SavingsReport,
    ScenarioResult,
    SensitivityRow,
)
from aqua_simulator.whatif.step_times import FITTED_EVERY

SHORT_SHARE: Final = 0.95
"""Of an engine's KV memory in use, from which it counts as short. It cannot be doubled."""

CHECKED: Final = (
    *("output_tokens_per_s", "ttft_mean_s", "ttft_p99_s", "tpot_mean_s", "tpot_p99_s"),
)
"""What the recording and its simulation are compared in."""

STEP_DEVIATIONS: Final = 3.0
"""Standard errors of step times that intervals of offline work reach to: of 28 drawn days, one was
more than two off. Doubled, they are twice as wide."""

RATE_BINS: Final = 48
"""Parts of the day whose rates are shown. Doubled, the plot is finer."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """Which parts of Aqua there are."""

    name: str
    is_harvesting: bool = False
    is_fair: bool = False
    is_co_serving: bool = False
    is_blended: bool = False
    is_replaced: bool = False

    def online(self, seed: int, assumed: Assumptions) -> OnlineJob:
        """Its day of online requests."""
        return OnlineJob(seed, self.is_harvesting, self.is_fair, self.is_replaced, assumed)

    def gaps(self, seed: int, model: str, assumed: Assumptions, deviations: float = 0.0) -> GapJob:
        """Its samples with offline work, on which lenders' reserves and links have no bearing."""
        plain = Assumptions()
        assumed = replace(assumed, reserve_share=plain.reserve_share, contention=plain.contention)
        parts = self.is_harvesting, self.is_fair, self.is_blended
        return GapJob(seed, model, *parts, assumed, deviations)


TODAY: Final = Scenario("without Aqua")
TOGETHER: Final = Scenario("together", True, True, True, True)  # noqa: FBT003 - the four parts
SCENARIOS: Final = (
    TODAY,
    Scenario("harvesting", is_harvesting=True),
    Scenario("fair slices", is_fair=True),
    Scenario("co-serving", is_co_serving=True),
    Scenario("blended batches", is_blended=True),
    TOGETHER,
    replace(TOGETHER, name="together, placed anew", is_replaced=True),
)
PAGING: Final = tuple(each for each in SCENARIOS if each.is_harvesting or each.is_fair)
"""Those in which copies meet."""

NO_CONTENTION: Final = Assumptions(contention=0.0)

Sensitivity = tuple[str, Assumptions, Assumptions]

SENSITIVITIES: Final[tuple[Sensitivity, ...]] = (
    ("load, -20 % and +20 %", Assumptions(load=0.8), Assumptions(load=1.2)),
    ("output lengths, -20 % and +20 %", Assumptions(outputs=0.8), Assumptions(outputs=1.2)),
    ("speed of steps, -10 % and +10 %", Assumptions(speed=0.9), Assumptions(speed=1.1)),
    ("KV memory, -10 % and +10 %", Assumptions(memory=0.9), Assumptions(memory=1.1)),
    ("rate of links, half and twice", Assumptions(link=0.5), Assumptions(link=2.0)),
    (
        "reserve of lenders, half and twice",
        Assumptions(reserve_share=0.05),
        Assumptions(reserve_share=0.2),
    ),
    ("what copies cost kernels, none and twice", NO_CONTENTION, Assumptions(contention=2.0)),
)


def ask(  # noqa: PLR0913 - a question is that wide
    cluster: Cluster,
    day: RecordedLoad,
    findings: Sequence[InputFinding],
    *,
    seeds: int = 3,
    processes: int = 1,
    sample_count: int = 6,
    sample_s: float = 60.0,
    sensitivities: Sequence[Sensitivity] = SENSITIVITIES,
    is_exact: bool = False,
    on_progress: Callable[[float, str], None] = lambda _done, _note: None,
) -> SavingsReport:
    """Simulate all scenarios.

    Args:
        seeds: Days drawn beside the recorded one.
        processes: To use; the answer does not depend on it.
        sensitivities: Assumptions to move, one at a time.
        is_exact: Plan every step by itself, as `jobs.SimulationInput` says.
        on_progress: Told the share that is done, and what is being done.
    """
    cluster = cluster.without(day.unknown)
    on_progress(0.0, "calibrating step times")
    if cluster.interference is None:
        sensitivities = [each for each in sensitivities if each[1] != NO_CONTENTION]
    times = calibrated(cluster, day)
    background = SimulationInput(
        cluster, day, times, sample_count=sample_count, sample_s=sample_s, is_exact=is_exact
    )
    first = OnlineJob(0)
    today: OnlineResult = first.run(
        background, lambda done: on_progress(0.02 * done, "the recorded day without Aqua")
    )
    short = tuple(
        name
        for name, seen in today.by_model.items()
        if seen.get("preemption_count") or seen.get("peak_kv_share", 0.0) >= SHORT_SHARE
    )
    background = replace(background, short=short, today=today.by_model)
    jobs = _jobs(background, seeds, sensitivities)
    results = run_all(
        background,
        jobs,
        processes=processes,
        on_done=lambda count: on_progress(0.02 + 0.98 * count / len(jobs), "scenarios"),
    )
    results[first] = today
    on_progress(1.0, "done")
    return _answer(background, results, list(findings), seeds, sensitivities)


def _jobs(
    background: SimulationInput, seeds: int, sensitivities: Sequence[Sensitivity]
) -> list[Job]:
    """Everything to simulate, each once."""
    wanted: dict[Job, None] = {}
    plain, models = Assumptions(), list(background.cluster.engines)
    if background.cluster.interference is not None:
        wanted.update((each.online(0, NO_CONTENTION), None) for each in PAGING)
    for seed in range(seeds + 1):
        for scenario in SCENARIOS:
            wanted[scenario.online(seed, plain)] = None
            if scenario.is_co_serving:
                for off in _deviations(background, seed):
                    wanted.update((scenario.gaps(seed, name, plain, off), None) for name in models)
        for name in models:
            wanted[OfflineJob(seed, name)] = None
            wanted.update((CapacityJob(seed, name, has_aqua), None) for has_aqua in (False, True))
    for _, low, high in sensitivities:
        for assumed in (low, high):
            wanted[TOGETHER.online(0, assumed)] = None
            wanted.update((TOGETHER.gaps(0, name, assumed), None) for name in models)
    wanted.pop(OnlineJob(0), None)
    return list(wanted)


def _deviations(background: SimulationInput, seed: int) -> tuple[float, ...]:
    """By how many standard errors step times are moved: the recorded day's, if they have some."""
    has_errors = seed == 0 and any(each.errors for each in background.times.values())
    return (0.0, -STEP_DEVIATIONS, STEP_DEVIATIONS) if has_errors else (0.0,)


def _answer(
    background: SimulationInput,
    results: dict[Job, Any],
    findings: list[InputFinding],
    seeds: int,
    sensitivities: Sequence[Sensitivity],
) -> SavingsReport:
    cluster, day = background.cluster, background.day
    hours, plain = day.span_s / 3600.0, Assumptions()
    names = list(cluster.engines)
    total = sum(cluster.gpu_count(name) for name in names)

    def gpu_hours(seed: int) -> float:
        seen = results[TODAY.online(seed, plain)].by_model
        busy = sum(seen[name]["busy_s"] * cluster.engines[name].deployed.tp for name in names)
        return float(total * hours - busy / 3600.0)

    remarks = [
        f"Latencies and savings are of {hours:.2f} recorded hours; money is scaled to 24.",
        _contention_remark(cluster),
        "Fewer GPUs and offline work are alternatives: money counts the larger one.",
    ]
    if not cluster.has_prices():
        remarks.append("No price of an hour of its GPUs is given (gpu_hour): no money is reckoned.")
    outlooks = []
    for scenario in SCENARIOS:
        rows = [_numbers(background, results, scenario, seed, plain) for seed in range(seeds + 1)]
        moved = [
            _numbers(background, results, scenario, 0, plain, off)
            for off in (_deviations(background, 0) if scenario.is_co_serving else ())
        ]
        outlooks.append(
            ScenarioResult(
                scenario.name,
                {
                    key: _interval([row[key] for row in rows], [row[key] for row in moved])
                    for key in rows[0]
                    if key in NUMBERS
                },
                {
                    name: {
                        key: _interval(
                            [
                                _latency(results, scenario, seed, name, key)
                                for seed in range(seeds + 1)
                            ]
                        )
                        for key in LATENCIES
                        if results[TODAY.online(0, plain)].by_model[name].get(key) is not None
                    }
                    for name in names
                },
            )
        )
    checks = _checks(background)
    if not checks:
        findings.append(
            InputFinding(
                "unchecked", "recording", "no latencies: step times are the data sheet's, unchecked"
            )
        )
    elif sheets := [name for name in day.loads if not background.times[name].is_fitted]:
        message = "too little is known of its steps: their times are the data sheet's"
        findings += [InputFinding("data sheet", name, message) for name in sheets]
    if cluster.listed.gpu_hour:
        message = "no gpu_hour of it: money leaves out what its GPUs cost"
        findings += [InputFinding("no price", gpu, message) for gpu in cluster.unpriced()]
    unserved = results[TODAY.online(0, plain)].unserved
    findings += [
        InputFinding("too long", name, f"{count} requests fit in no engine: not simulated")
        for name, count in unserved.items()
    ]
    return SavingsReport(
        hours,
        total,
        checks,
        findings,
        {name: background.times[name].document() for name in names},
        {name: targets(background, name) for name in names},
        _interval([gpu_hours(seed) for seed in range(seeds + 1)]),
        outlooks,
        _swings(background, results, sensitivities),
        remarks,
        {name: _rates(load, day.span_s) for name, load in day.loads.items()},
        None if cluster.interference is None else cluster.interference.source,
        _contention(background, results),
    )


def _contention_remark(cluster: Cluster) -> str:
    if cluster.interference is None:
        return "Contention is left out: copies take nothing from kernels, collectives and others."
    return f"Copies beside kernels: {cluster.interference.source}."


def _contention(background: SimulationInput, results: dict[Job, Any]) -> list[ContentionRow]:
    """What sharing links and memory costs, on the recorded day."""
    rows = []
    if background.cluster.interference is None:
        return []
    for scenario in PAGING:
        day: OnlineResult = results[scenario.online(0, Assumptions())]
        free: OnlineResult = results[scenario.online(0, NO_CONTENTION)]
        for name in dict.fromkeys([*day.by_model, *day.links]):
            use = day.links.get(name, LinkUse(0.0, 1.0, 1.0))
            longer = [
                _longer(free.by_model.get(name, {}).get(key), day.by_model.get(name, {}).get(key))
                for key in ("ttft_p99_s", "tpot_mean_s")
            ]
            rows.append(
                ContentionRow(
                    scenario.name,
                    name,
                    use.copying_share * 100.0,
                    (use.slowdown - 1.0) * 100.0,
                    (use.worst_slowdown - 1.0) * 100.0,
                    *longer,
                )
            )
    return rows


def _longer(before: float | None, after: float | None) -> float | None:
    """By how many percent; None where there is nothing to compare."""
    return (after / before - 1.0) * 100.0 if before and after else None


def _rates(load: ModelLoad, span_s: float) -> list[float]:
    """Requests per second over the day."""
    counts, _ = np.histogram(load.arrival_s, bins=RATE_BINS, range=(0.0, span_s))
    return [float(each) for each in counts * RATE_BINS / span_s]


def _interval(values: Sequence[float], moved: Sequence[float] = ()) -> Interval:
    """Over days, and on either side as far as the recorded one is moved by its step times."""
    reach = max((abs(each - values[0]) for each in moved), default=0.0)
    low, high = values[0] - reach, values[0] + reach
    return Interval(values[0], min(*values, max(0.0, low)), max(*values, high))


def _numbers(
    background: SimulationInput,
    results: dict[Job, Any],
    scenario: Scenario,
    seed: int,
    assumed: Assumptions,
    deviations: float = 0.0,
) -> dict[str, float]:
    """The numbers of one day under one scenario; only those that its parts have."""
    cluster, span_s = background.cluster, background.day.span_s
    hours, found = span_s / 3600.0, dict[str, float]()
    names = list(cluster.engines)
    day: OnlineResult = results[scenario.online(seed, assumed)]
    is_plain = assumed == Assumptions()
    if scenario.is_harvesting:
        lending = day.lending
        # A load of so much more takes so much less time: all is told of the recorded hours.
        found["memory_gb_hours"] = lending.offered_gb_s * assumed.load / 3600.0
        found["memory_used_gb_hours"] = lending.used_gb_s * assumed.load / 3600.0
        found["reclaims"] = float(lending.reclaim_count)
        found["reclaim_s"] = lending.reclaim_s / max(1, lending.reclaim_count)
        if is_plain:
            found |= _cost(results[TODAY.online(seed, assumed)], day)
    worth = 0.0
    if scenario.is_co_serving:
        found |= {"gpu_hours": 0.0, "offline_tokens": 0.0, "offline_gpu_hours": 0.0}
        for name in names:
            filled = results[scenario.gaps(seed, name, assumed, deviations)]
            deployed = cluster.engines[name].deployed
            gpu_hours = cluster.gpu_count(name) * hours
            own_tokens_per_s, _ = results[OfflineJob(seed if is_plain else 0, name)]
            # Of the time that a GPU with nothing else would have worked on it.
            share = filled.offline_tokens_per_s / max(own_tokens_per_s, 1e-9)
            found["gpu_hours"] += max(0.0, filled.busy_share - filled.online_busy_share) * gpu_hours
            tokens = filled.offline_tokens_per_s * deployed.replicas * span_s
            found["offline_tokens"] += tokens / 1e6
            found["offline_gpu_hours"] += share * gpu_hours
            worth += share * gpu_hours * cluster.price(name)
    elif scenario.is_blended:
        gains = [results[OfflineJob(seed, name)][1] for name in names]
        found["blend_gain"] = sum(gains) / len(gains)
    if is_plain and (scenario == TODAY or (scenario.is_fair and scenario.is_harvesting)):
        fewer, saved = 0.0, 0.0
        for name in names:
            left = results[CapacityJob(seed, name, scenario != TODAY)]
            deployed = cluster.engines[name].deployed
            gone = (deployed.replicas - left) * deployed.tp
            fewer += gone
            saved += gone * hours * cluster.price(name)
        found["gpus_fewer"] = fewer
        worth = max(worth, saved)
    if cluster.has_prices() and (worth or "gpus_fewer" in found):
        found["money_per_day"] = worth * 24.0 / hours
    return found


def _cost(today: OnlineResult, day: OnlineResult) -> dict[str, float]:
    """What lending cost the producers in latency, requests weighing alike."""
    cost = {}
    for key, of in (
        ("producer_ttft_percent", "ttft_p99_s"),
        ("producer_tpot_percent", "tpot_mean_s"),
    ):
        before = after = 0.0
        for name in day.producers:
            if today.by_model[name].get(of) and day.by_model[name].get(of):
                weight = today.by_model[name]["request_count"]
                before += weight * today.by_model[name][of]
                after += weight * day.by_model[name][of]
        cost[key] = (after / before - 1.0) * 100.0 if before else 0.0
    return cost


def _latency(results: dict[Job, Any], scenario: Scenario, seed: int, name: str, key: str) -> float:
    """A latency of a model; co-serving lengthens it by the ratio of its samples."""
    value = float(results[scenario.online(seed, Assumptions())].by_model[name].get(key) or 0.0)
    if scenario.is_co_serving:
        filled = results[scenario.gaps(seed, name, Assumptions())]
        value *= filled.ttft_ratio if key.startswith("ttft") else filled.tpot_ratio
    return value


def _checks(background: SimulationInput) -> list[CheckRow]:
    """The simulated day beside the recorded one, without what step times were fitted to."""
    rows = []
    for name, load in background.day.loads.items():
        ours = background.today[name]
        seen = load.observed or _observed(load)
        simulated = ours if load.observed else ours.get("unfitted", ours)
        rows += [
            CheckRow(name, key, float(seen[key]), float(simulated[key]))
            for key in CHECKED
            if seen.get(key) and simulated.get(key)
        ]
    return rows


def _observed(load: ModelLoad) -> dict[str, Any]:
    """Latencies of the recorded requests that nothing was fitted to."""
    chosen = np.flatnonzero(~np.isnan(load.last_s))
    chosen = chosen[chosen % FITTED_EVERY != 0]
    if not len(chosen):
        return {}
    seen = load.known(chosen)
    steps = seen.output_tokens - 1
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot_s = np.where(steps > 0, (seen.last_s - seen.first_s) / steps, np.nan)
    return summary_of(
        seen.arrival_s,
        seen.last_s,
        seen.first_s - seen.arrival_s,
        tpot_s,
        prompt_tokens=int(seen.prompt_tokens.sum()),
        output_tokens=int(seen.output_tokens.sum()),
    )


def _swings(
    background: SimulationInput, results: dict[Job, Any], sensitivities: Sequence[Sensitivity]
) -> list[SensitivityRow]:
    """How far each assumption moves what the parts bring together."""
    keys = ("offline_gpu_hours", "memory_gb_hours")
    middle = _numbers(background, results, TOGETHER, 0, Assumptions())
    swings = []
    for text, low, high in sensitivities:
        ends = [_numbers(background, results, TOGETHER, 0, each) for each in (low, high)]
        moved = {key: (ends[0][key], ends[1][key]) for key in keys}
        share = (
            max(
                abs(end - middle[key]) / middle[key]
                for key in keys
                for end in moved[key]
                if middle[key]
            )
            if any(middle[key] for key in keys)
            else 0.0
        )
        swings.append(SensitivityRow(text, moved[keys[0]], moved[keys[1]], share))
    return sorted(swings, key=lambda each: -each.share)
