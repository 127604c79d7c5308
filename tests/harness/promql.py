"""The expressions of `deploy/`: of dashboards, their variables, recording rules and alerts.

Owns: reading them, filling in a dashboard's variables as Grafana does, and taking an expression
apart into its selectors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import promql_parser
import yaml

from harness.source_tree import ROOT

DEPLOY: Final = ROOT / "deploy"
RECORDING_RULES: Final = DEPLOY / "prometheus" / "recording-rules.yaml"
ALERT_RULES: Final = DEPLOY / "prometheus" / "alert-rules.yaml"
ALERT_TESTS: Final = DEPLOY / "prometheus" / "tests" / "alerts.yaml"

ALL: Final = ".*"
"""What a variable stands for while all of its values are chosen."""


@dataclass(frozen=True, slots=True)
class Expression:
    """An expression as it is sent to Prometheus, and where it stands."""

    where: str
    text: str

    def selectors(self) -> list[str]:
        """Each selector of series in it, without ranges and offsets."""
        found: list[str] = []

        def note(node: promql_parser.Expr) -> None:
            if isinstance(node, promql_parser.VectorSelector):
                found.append(f"{node.name or ''}{node.matchers}")

        promql_parser.walk(promql_parser.parse(self.text), note)
        return found

    def metrics(self) -> set[str]:
        """The names of the series that it reads."""
        return {selector.partition("{")[0] for selector in self.selectors()}


def dashboards() -> list[dict[str, Any]]:
    """Every dashboard, as Grafana reads it."""
    return [
        json.loads(path.read_text(encoding="utf-8"))
        for path in sorted((DEPLOY / "grafana").glob("*.json"))
    ]


def panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Its panels, without the titles of rows."""
    for panel in dashboard["panels"]:
        yield from panel.get("panels") or []
        if panel["type"] != "row":
            yield panel


def panel_expressions(rate_interval: str = "1m", shown: str = "1h") -> list[Expression]:
    """All targets of all panels, each variable of a dashboard at all of its values."""
    return [
        Expression(
            f"{dashboard['uid']}: {panel['title']}",
            filled(target["expr"], rate_interval, shown),
        )
        for dashboard in dashboards()
        for panel in panels(dashboard)
        for target in panel["targets"]
    ]


def filled(text: str, rate_interval: str = "1m", shown: str = "1h") -> str:
    """The expression with what Grafana puts in the place of variables."""
    text = text.replace("$__rate_interval", rate_interval).replace("$__range", shown)
    return re.sub(r"\$\w+", ALL, text)


def label_queries() -> list[tuple[str, str, str]]:
    """Of each variable with values from Prometheus: where it is, its series, its label."""
    found = []
    for dashboard in dashboards():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"])
                assert match, variable
                where = f"{dashboard['uid']}: ${variable['name']}"
                found.append((where, filled(match[1]), match[2]))
    return found


def rules(path: Path = RECORDING_RULES) -> list[dict[str, Any]]:
    """The rules of a file."""
    groups = yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def rule_expressions() -> list[Expression]:
    """Of recording rules and alerts."""
    return [
        Expression(rule.get("record") or rule["alert"], rule["expr"])
        for path in (RECORDING_RULES, ALERT_RULES)
        for rule in rules(path)
    ]
