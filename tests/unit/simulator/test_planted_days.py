"""What is planted in days that are drawn by seed comes back from their traces."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from aqua_simulator.whatif.calibration import calibrated
from aqua_simulator.whatif.cluster import read_cluster
from aqua_simulator.whatif.jobs import SimulationInput
from aqua_simulator.whatif.recorded_day import read_day
from harness.planted_day import drawn_day, recovered, write_day
from harness.slices import examples

DAYS: Final = examples(2, whole=20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(DAYS))
def test_planted_savings_come_back_within_five_percent_from_traces(
    seed: int, tmp_path: Path
) -> None:
    day = drawn_day(seed, phase_s=100.0)
    cluster_path, trace = write_day(tmp_path, day)
    cluster, _ = read_cluster(cluster_path)
    recorded = read_day([trace], list(cluster.engines), hours=day.span_s / 3600.0)
    times = calibrated(cluster, recorded)
    background = SimulationInput(cluster, recorded, times, sample_count=1, sample_s=100.0)
    assert recovered(day, background) == pytest.approx((1.0, 1.0, 1.0), rel=0.05)
