"""Dashboards are as their source has them, and every panel says what it shows."""

from __future__ import annotations

import re
from typing import Any

import pytest

from aqua_dashboards.__main__ import FOLDER, dashboards, stale
from harness import promql

BOARDS = {board["uid"]: board for board in promql.dashboards()}


def test_the_json_is_what_the_source_writes() -> None:
    assert not [path.name for path in stale()], "run `make dashboards`"
    assert {path.name for path in FOLDER.glob("*.json")} == set(dashboards())


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_every_panel_has_a_title_a_description_and_a_unit(board: dict[str, Any]) -> None:
    assert board["description"]
    titles = [panel["title"] for panel in promql.panels(board)]
    assert len(set(titles)) == len(titles)
    for panel in promql.panels(board):
        assert len(panel["description"]) > 20, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_panels_lie_beside_each_other(board: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_a_query_uses_the_chosen_source_and_variables_that_there_are(
    board: dict[str, Any],
) -> None:
    names = {variable["name"] for variable in board["templating"]["list"]}
    used = set()
    for panel in promql.panels(board):
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}", panel["title"]
            used |= set(re.findall(r"\$(\w+)", target["expr"]))
    assert used - {"__rate_interval", "__range"} <= names
    assert names - {"datasource"} <= used, "a variable that changes nothing"


def test_every_expression_can_be_parsed() -> None:
    for expression in promql.panel_expressions() + promql.rule_expressions():
        assert expression.selectors(), expression


def test_what_rules_record_is_read_by_a_panel_or_another_rule() -> None:
    read = set()
    for expression in promql.panel_expressions() + promql.rule_expressions():
        read |= expression.metrics()
    assert not {rule["record"] for rule in promql.rules()} - read
