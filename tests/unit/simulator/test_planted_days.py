"""What is planted in days that are drawn by seed comes back from their traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from aqua_simulator.whatif.calibration import calibrated
from aqua_simulator.whatif.cluster import read_cluster
from aqua_simulator.whatif.jobs import GapJob, OnlineJob, SimulationInput
from aqua_simulator.whatif.recorded_day import read_day
from harness.planted_day import drawn_day, write_day
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
    today = OnlineJob(0).run(background).by_model
    idle_s = 4 * day.span_s - sum(each["busy_s"] for each in today.values())
    assert idle_s / 3600.0 == pytest.approx(day.idle_gpu_hours, rel=0.05)
    background = replace(background, short=("docs",), today=today)
    lent = OnlineJob(0, is_harvesting=True).run(background).lending
    assert lent.offered_gb_s / 3600.0 == pytest.approx(day.spare_gb_hours, rel=0.05)
    found = GapJob(0, "chat").run(background)
    known = GapJob(0, "chat").run(replace(background, times={"chat": day.times}))
    assert found.offline_tokens_per_s == pytest.approx(known.offline_tokens_per_s, rel=0.05)
