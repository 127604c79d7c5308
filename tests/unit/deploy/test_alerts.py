"""Each alert has a page in the runbook, and two cases in which it fires and stays silent."""

from __future__ import annotations

import re
from typing import Any, Final

import pytest
import yaml

from harness import promql
from harness.source_tree import ROOT

RUNBOOK: Final = ROOT / "docs" / "operations" / "runbook"
ALERTS: Final = {rule["alert"]: rule for rule in promql.rules(promql.ALERT_RULES)}
RECORDED: Final = {rule["record"]: rule["expr"] for rule in promql.rules()}
CASES: Final = yaml.safe_load(promql.ALERT_TESTS.read_text(encoding="utf-8"))["tests"]


def read_by(text: str) -> set[str]:
    """The series that an expression reads, through recording rules down to what is scraped."""
    names: set[str] = set()
    for name in promql.Expression("", text).metrics():
        names |= read_by(RECORDED[name]) if name in RECORDED else {name}
    return names


def fed(case: dict[str, Any]) -> set[str]:
    """The series that a case makes up."""
    return {row["series"].partition("{")[0] for row in case["input_series"]}


def test_the_runbook_has_a_page_for_each_alert_and_no_other() -> None:
    pages = {path.stem for path in RUNBOOK.glob("*.md")} - {"README"}
    assert pages == set(ALERTS)
    listed = re.findall(r"^- \[(\w+)\]", (RUNBOOK / "README.md").read_text(), re.MULTILINE)
    assert listed == list(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_a_page_says_what_it_means_whom_it_hurts_how_to_find_the_cause_and_what_to_do(
    alert: str,
) -> None:
    path = RUNBOOK / f"{alert}.md"
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"^#+ (.+)$", text, re.MULTILINE) == [
        alert,
        *("Meaning", "Impact", "Diagnosis", "Mitigation"),
    ]
    assert ALERTS[alert]["annotations"]["runbook_url"] == str(path.relative_to(ROOT))


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_has_a_case_in_which_it_fires_and_one_in_which_it_stays_silent(
    alert: str,
) -> None:
    ours = [case for case in CASES if case["name"].split()[0] == alert]
    fires, silent = ours
    assert fires["name"] == f"{alert} fires"
    assert silent["name"].startswith(f"{alert} stays silent: ")
    (expected,) = fires["promql_expr_test"][0]["exp_samples"]
    labels = set(re.findall(r"(\w+)=", expected["labels"]))
    words = "".join(ALERTS[alert]["annotations"].values())
    assert set(re.findall(r"\$labels\.(\w+)", words)) <= labels, "a word that would stay empty"
    assert f'severity="{ALERTS[alert]["labels"]["severity"]}"' in expected["labels"]
    read = read_by(ALERTS[alert]["expr"])
    assert fed(silent) & read, "silence for want of series shows nothing"
    if alert != "AquaCoordinatorAbsent":
        assert fed(fires) <= read
