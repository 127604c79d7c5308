"""Prometheus' own tool over what `deploy/` gives to Prometheus."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from harness import promql

PROMTOOL: Final = shutil.which("promtool")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROMTOOL is None, reason="no promtool: apt-get install prometheus"),
]


def promtool(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["promtool", *args], check=False, capture_output=True, text=True, timeout=240
    )


def test_the_scrape_example_and_its_rules_are_valid() -> None:
    done = promtool("check", "config", promql.DEPLOY / "prometheus" / "prometheus.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_and_stays_silent_as_its_cases_say() -> None:
    done = promtool("test", "rules", promql.ALERT_TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_case_fails_when_its_rule_is_another(tmp_path: Path) -> None:
    """The negative control: thresholds that nothing reaches silence every alert that has one."""
    folder = tmp_path / "tests"
    folder.mkdir()
    for path in (promql.RECORDING_RULES, promql.ALERT_RULES):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    text = promql.ALERT_RULES.read_text(encoding="utf-8").replace(" > 1.1", " > 1000")
    (tmp_path / promql.ALERT_RULES.name).write_text(text, encoding="utf-8")
    cases = promql.ALERT_TESTS.read_text(encoding="utf-8")
    head, _, rest = cases.partition("  - name: AquaLendingSlowsLender fires")
    one, _, _ = rest.partition("  - name:")
    head = head.partition("tests:")[0] + "tests:\n"
    (folder / "alerts.yaml").write_text(
        head + "  - name: AquaLendingSlowsLender fires" + one, encoding="utf-8"
    )
    done = promtool("test", "rules", folder / "alerts.yaml")
    assert done.returncode == 1
    assert "AquaLendingSlowsLender" in done.stdout + done.stderr
