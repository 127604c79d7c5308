"""Replay of a recorded engine run: the same requests, the same engine, predicted times.

Serves the arrivals of a `Recording` with `Engine` and compares what the users saw. Step times come
from kernel tables of the same GPU in the recordings' folder, or from a fit; where neither knows the
GPU, from its data sheet, and the replay says so.

One constant may be calibrated: the host overhead per step, chosen so that the first part of the
run (by arrivals) shows the recorded time per output token. The rest of the run never enters it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from aqua_protocol.errors import ConfigError
from aqua_simulator.serving.engine import Engine
from aqua_simulator.serving.memory import PagedMemory
from aqua_simulator.serving.recordings import Recording, catalogued
from aqua_simulator.serving.request import Served, summary
from aqua_simulator.serving.setup import iteration_time as fitted_time
from aqua_simulator.timing.fit import Fit, fit_samples
from aqua_simulator.timing.iteration import IterationTime, from_data_sheet, from_kernels
from aqua_simulator.timing.profiles import Samples, read_folder

COMPARED: Final = (
    *("makespan_s", "tokens_per_s", "output_tokens_per_s", "ttft_mean_s", "ttft_p99_s"),
    *("tpot_mean_s", "tpot_p99_s", "completion_mean_s", "completion_p99_s"),
)
"""Rows of the comparison."""


def simulate(recording: Recording, time_of: IterationTime) -> tuple[list[Served], Engine]:
    """Serve the recorded arrivals."""
    memory = PagedMemory(recording.block_count, recording.block_tokens)
    engine = Engine(recording.gpu, recording.settings, time_of, memory)
    return engine.run(recording.arrivals), engine


def calibrate(recording: Recording, time_of: IterationTime, *, first: float) -> IterationTime:
    """Choose the host overhead from the first part of the run.

    The simulated time per output token of the first `first` of the requests (by arrival) is made
    equal to the recorded one by bisection; 0 if the tables alone are already too slow. Requests of
    one token tell nothing: with these alone the times stay as they are.
    """
    ordered = sorted(recording.served, key=lambda row: row.arrival_s)
    chosen = {row.request_id for row in ordered[: max(1, int(first * len(ordered)))]}
    target = _tpot([row for row in recording.served if row.request_id in chosen])
    if target is None:
        return time_of

    def tpot(overhead_s: float) -> float:
        served, _ = simulate(recording, replace(time_of, overhead_s=overhead_s))
        found = _tpot([row for row in served if row.request_id in chosen])
        assert found is not None, "the same lengths are served"
        return found

    low, high = 0.0, HIGHEST_OVERHEAD_S
    if tpot(low) >= target:
        return replace(time_of, overhead_s=low)
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if tpot(middle) < target else (low, middle)
    return replace(time_of, overhead_s=(low + high) / 2)


HIGHEST_OVERHEAD_S: Final = 0.02
"""Seconds of host time per step, far above any seen (2.6 ms on an H100 host). Doubled, the search
for it takes one step more for the same precision."""


def _tpot(rows: Sequence[Served]) -> float | None:
    times = [row.tpot_s for row in rows if row.output_tokens > 1]
    return sum(times) / len(times) if times else None


def compare(recording: Recording, served: Sequence[Served]) -> list[dict[str, Any]]:
    """Recorded against simulated: name, both values, difference in percent.

    Metrics that the recording does not have (a time per output token where every output is one
    token) are left out.
    """
    real, ours = summary(recording.served), summary(served)
    return [
        {
            "name": name,
            "recorded": real[name],
            "simulated": ours[name],
            "difference_percent": (ours[name] / real[name] - 1.0) * 100.0,
        }
        for name in COMPARED
        if real[name]
    ]


def errors_by_metric(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Errors over all recordings of a folder: mean of the absolute values, and the worst.

    Args:
        found: The rows of `compare` by the recording's name.
    """
    errors = []
    for metric in COMPARED:
        off = {
            name: float(row["difference_percent"])
            for name, rows in found.items()
            for row in rows
            if row["name"] == metric
        }
        if off:
            worst = max(off, key=lambda name: abs(off[name]))
            errors.append(
                {
                    "name": metric,
                    "recordings": len(off),
                    "mean_absolute_percent": sum(map(abs, off.values())) / len(off),
                    "worst_percent": off[worst],
                    "worst_recording": worst,
                }
            )
    return errors


def iteration_time(
    folder: Path, recording: Recording, fit: Fit | None = None
) -> tuple[IterationTime, str]:
    """Step times of the recording's engine, and what they come from.

    Raises:
        ConfigError: Nothing is known of the GPU.
    """
    prefix = f"{recording.gpu}/{recording.model_key}/"
    if fit is None:
        groups = [group for group in _tables(folder) if group.key.startswith(prefix)]
        fit = fit_samples(iter(groups)) if groups else None
    if fit is not None and f"{prefix}tp1/mixed_attention" in fit:
        time_of = from_kernels(fit, recording.gpu, recording.model_key, recording.model)
        return time_of, "kernel tables of the same GPU and model"
    gpu = catalogued(recording.gpu)
    if gpu is None:
        raise ConfigError(
            f"{recording.name}: no kernel tables of {recording.gpu}, and no data sheet",
            remedy="Put its tables in the folder, or give --fit or --gpu.",
        )
    if fit is not None:
        return fitted_time(fit, recording.model, gpu, 1), "the fit"
    return from_data_sheet(gpu, recording.model), "a roofline of the data sheet, a rough guess"


def _tables(folder: Path) -> list[Samples]:
    """Profile tables of the folder; none is no error here."""
    try:
        return read_folder(folder)
    except ConfigError as error:
        if "column" in error.message:
            raise
        return []
