"""A day out of a real Prometheus, backfilled with what engines would have shown it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx
import numpy as np
import pytest

from aqua_protocol.errors import ConfigError, UnavailableError
from aqua_simulator.whatif.answer import STEP_DEVIATIONS
from aqua_simulator.whatif.cluster import Cluster, read_cluster
from aqua_simulator.whatif.jobs import CapacityJob, GapJob, OnlineJob, SimulationInput
from aqua_simulator.whatif.prometheus import PrometheusSource, read_prometheus
from aqua_simulator.whatif.step_times import fitted
from harness.bounds import HANG_S
from harness.planted_day import (
    DayShape,
    PlantedDay,
    drawn_day,
    openmetrics,
    planted_day,
    recovered,
    shaped_day,
    write_day,
)
from harness.slices import examples, shuffled
from harness.vllm_server import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("promtool") and shutil.which("prometheus")),
        reason="no prometheus: apt-get install prometheus",
    ),
]

START_S: Final = 1_700_000_400.0
WINDOW_S: Final = 60.0


@contextmanager
def backfilled(folder: Path, text: str) -> Iterator[str]:
    """A Prometheus with that past, and nothing to scrape; gives its address."""
    (folder / "day.txt").write_text(text)
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics"]
    made = [*command, str(folder / "day.txt"), str(folder / "data")]
    subprocess.run(made, check=True, capture_output=True, timeout=HANG_S)
    (folder / "prometheus.yaml").write_text("{}\n")
    url = f"http://127.0.0.1:{free_port()}"
    arguments = [
        "prometheus",
        f"--config.file={folder}/prometheus.yaml",
        f"--storage.tsdb.path={folder}/data",
        "--storage.tsdb.retention.time=100y",
        f"--web.listen-address={url.removeprefix('http://')}",
        "--log.level=warn",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(arguments, stderr=log) as process:
        try:
            while True:
                assert process.poll() is None, (folder / "log").read_text()
                try:
                    if httpx.get(f"{url}/-/ready", trust_env=False, timeout=HANG_S).is_success:
                        break
                except httpx.TransportError:
                    # No one listens yet; there is no event to wait for across processes.
                    try:
                        process.wait(0.1)
                    except subprocess.TimeoutExpired:
                        continue
            yield url
        finally:
            process.terminate()
            process.wait(HANG_S)


@pytest.fixture(scope="module")
def day() -> PlantedDay:
    return planted_day(phase_s=300.0)


@pytest.fixture(scope="module")
def cluster(day: PlantedDay, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    found, _ = read_cluster(write_day(tmp_path_factory.mktemp("cluster"), day)[0])
    return found


def source(url: str, day: PlantedDay) -> PrometheusSource:
    return PrometheusSource(url, START_S, START_S + day.span_s, WINDOW_S)


def test_planted_savings_come_back_within_ten_percent_from_histograms(
    day: PlantedDay, cluster: Cluster, tmp_path: Path
) -> None:
    with backfilled(tmp_path, openmetrics(day, START_S)) as url:
        recorded = read_prometheus(source(url, day), cluster)
        with pytest.raises(ConfigError, match="knows no model"):
            read_prometheus(PrometheusSource(url, START_S - 7200, START_S - 3600, 60), cluster)
    # DCGM's exporter was not scraped, and is named for it.
    assert {each.where for each in recorded.findings} == {
        "DCGM_FI_DEV_GPU_UTIL",
        "DCGM_FI_DEV_FB_FREE",
    }
    times = fitted(recorded.loads, cluster.engines)
    assert times["chat"].step_s == pytest.approx(day.times.step_s, rel=0.1)
    background = SimulationInput(cluster, recorded, times)
    today = OnlineJob(0).run(background)
    idle_s = 4 * day.span_s - sum(each["busy_s"] for each in today.by_model.values())
    assert idle_s / 3600.0 == pytest.approx(day.idle_gpu_hours, rel=0.1)
    background = replace(background, short=("docs",), today=today.by_model)
    lent = OnlineJob(0, is_harvesting=True).run(background).lending
    assert lent.offered_gb_s / 3600.0 == pytest.approx(day.spare_gb_hours, rel=0.1)
    # One of the three chat engines is enough.
    assert CapacityJob(0, "chat", has_aqua=False).run(background) == 1
    observed = recorded.loads["chat"].observed
    for name in ("ttft_mean_s", "tpot_mean_s"):
        assert today.by_model["chat"][name] == pytest.approx(observed[name], rel=0.1)


DRAWN: Final = range(1, 1 + examples(1, whole=28))
SHAPED: Final = shuffled([(shape, seed) for seed in (0, 1, 7) for shape in DayShape])


def savings_come_back(day: PlantedDay, folder: Path) -> None:
    cluster, _ = read_cluster(write_day(folder, day)[0])
    with backfilled(folder, openmetrics(day, START_S)) as url:
        recorded = read_prometheus(source(url, day), cluster)
    times = fitted(recorded.loads, cluster.engines)
    background = SimulationInput(cluster, recorded, times, sample_count=3, sample_s=100.0)
    found = recovered(day, background)
    assert found[:2] == pytest.approx((1.0, 1.0), rel=0.1), found
    # Or as far off as the answer's interval says that it may be.
    if found.offline_work != pytest.approx(1.0, rel=0.1):
        assert (
            min(moved(background, off) for off in (-STEP_DEVIATIONS, STEP_DEVIATIONS))
            < (1.0 / found.offline_work)
            < max(moved(background, off) for off in (-STEP_DEVIATIONS, STEP_DEVIATIONS))
        ), found


def moved(background: SimulationInput, deviations: float) -> float:
    """Offline work with step times so many standard errors off, over that without."""
    tokens_per_s = [
        sum(
            shape.deployed.replicas
            * GapJob(0, name, deviations=each).run(background).offline_tokens_per_s
            for name, shape in background.cluster.engines.items()
        )
        for each in (deviations, 0.0)
    ]
    return tokens_per_s[0] / tokens_per_s[1]


@pytest.mark.parametrize("seed", DRAWN)
def test_savings_of_a_drawn_day_come_back_from_histograms(seed: int, tmp_path: Path) -> None:
    savings_come_back(drawn_day(seed, phase_s=300.0), tmp_path)


@pytest.mark.parametrize(("shape", "seed"), SHAPED[: examples(2, whole=18)])
def test_savings_of_days_of_other_shapes_come_back_from_histograms(
    shape: DayShape, seed: int, tmp_path: Path
) -> None:
    savings_come_back(shaped_day(shape, seed, span_s=1200.0), tmp_path)


def test_requests_come_when_scrapes_saw_them(
    day: PlantedDay, cluster: Cluster, tmp_path: Path
) -> None:
    with backfilled(tmp_path, openmetrics(day, START_S)) as url:
        asked = PrometheusSource(url, START_S, START_S + day.span_s, 300.0)
        recorded = read_prometheus(asked, cluster)
    for name, rows in day.served.items():
        scrapes = np.arange(0.0, day.span_s + 15.0, 15.0)
        there, _ = np.histogram([row.first_token_s for row in rows], scrapes)
        found, _ = np.histogram(recorded.loads[name].arrival_s, scrapes)
        # Of a window five minutes long.
        assert np.abs(np.cumsum(found - there)).max() <= 2


def test_gaps_and_resets_are_named(day: PlantedDay, cluster: Cluster, tmp_path: Path) -> None:
    text = openmetrics(day, START_S, reset_s=400.0, silent_s=(600.0, 900.0))
    with backfilled(tmp_path, text) as url:
        recorded = read_prometheus(source(url, day), cluster)
    kinds = {each.kind for each in recorded.findings}
    assert {"gap", "counter reset", "missing metric"} <= kinds
    assert recorded.span_s == pytest.approx(day.span_s - 300.0, abs=WINDOW_S)
    counted = sum(len(load) for load in recorded.loads.values())
    outside = [
        row
        for rows in day.served.values()
        for row in rows
        if not 600.0 <= row.first_token_s < 900.0
    ]
    assert counted == pytest.approx(len(outside), rel=0.1)


def test_a_model_without_requests_is_idle_and_two_of_one_name_are_refused(
    day: PlantedDay, cluster: Cluster, tmp_path: Path
) -> None:
    none: dict[str, list[Any]] = {"chat": []}
    quiet = replace(day, served=day.served | none, steps=day.steps | none, gaps=day.gaps | none)
    twins = {
        name: replace(shape, deployed=shape.deployed.model_copy(update={"metrics_name": "docs"}))
        for name, shape in cluster.engines.items()
    }
    with backfilled(tmp_path, openmetrics(quiet, START_S)) as url:
        recorded = read_prometheus(source(url, day), cluster)
        with pytest.raises(ConfigError, match="chat and docs report as the same"):
            read_prometheus(source(url, day), replace(cluster, engines=twins))
    assert ("no requests", "chat") in {(each.kind, each.where) for each in recorded.findings}
    assert recorded.unknown == ()
    assert list(recorded.loads) == ["docs"]


def test_step_times_do_not_depend_on_windows_resets_or_gaps(
    day: PlantedDay, cluster: Cluster, tmp_path: Path
) -> None:
    text = openmetrics(day, START_S, reset_s=400.0, silent_s=(600.0, 900.0))
    with backfilled(tmp_path, text) as url:
        for window_s in (15.0, 62.5, 300.0):
            asked = PrometheusSource(url, START_S, START_S + day.span_s, window_s)
            found = fitted(read_prometheus(asked, cluster).loads, cluster.engines)["chat"]
            assert found.step_s == pytest.approx(day.times.step_s, rel=0.01)
            assert found.token_s == pytest.approx(day.times.token_s, rel=0.05)
            assert found.context_s == pytest.approx(day.times.context_s, rel=0.2)


def test_nothing_there_is_said(cluster: Cluster, day: PlantedDay) -> None:
    with pytest.raises(UnavailableError, match="no Prometheus"):
        read_prometheus(source(f"http://127.0.0.1:{free_port()}", day), cluster)
