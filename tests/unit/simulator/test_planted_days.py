"""What is planted in days of many shapes, drawn by seed, comes back from their traces."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from aqua_simulator.whatif.calibration import calibrated
from aqua_simulator.whatif.cluster import read_cluster
from aqua_simulator.whatif.jobs import SimulationInput
from aqua_simulator.whatif.recorded_day import read_day
from harness.planted_day import (
    DayShape,
    PlantedDay,
    drawn_day,
    recovered,
    shaped_day,
    write_day,
)
from harness.slices import examples, shuffled

DAYS: Final = examples(2, whole=20)
SHAPED: Final = shuffled([(shape, seed) for seed in range(3) for shape in DayShape])


def savings_come_back(day: PlantedDay, folder: Path) -> None:
    cluster_path, trace = write_day(folder, day)
    cluster, _ = read_cluster(cluster_path)
    recorded = read_day([trace], list(cluster.engines), hours=day.span_s / 3600.0)
    times = calibrated(cluster, recorded)
    background = SimulationInput(cluster, recorded, times, sample_count=1, sample_s=100.0)
    found = recovered(day, background)
    assert found == pytest.approx((1.0, 1.0, 1.0), rel=0.05), found


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(DAYS))
def test_planted_savings_come_back_within_five_percent_from_traces(
    seed: int, tmp_path: Path
) -> None:
    savings_come_back(drawn_day(seed, phase_s=100.0), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "seed"), SHAPED[: examples(2, whole=18)])
def test_savings_of_days_of_other_shapes_come_back_within_five_percent_from_traces(
    shape: DayShape, seed: int, tmp_path: Path
) -> None:
    savings_come_back(shaped_day(shape, seed, span_s=600.0), tmp_path)
