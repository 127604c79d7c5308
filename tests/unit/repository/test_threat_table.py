"""`docs/operations/security.md` names a test for each threat, and each of them exists."""

from __future__ import annotations

import re
from typing import Final

import pytest

from harness.source_tree import ROOT

PAGE: Final = ROOT / "docs" / "operations" / "security.md"
COLUMNS: Final = 4
_, _, TABLE = PAGE.read_text(encoding="utf-8").partition("\n## Threats\n")
ROWS: Final = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TABLE.splitlines()
    if line.startswith("| ") and not line.startswith("| actor ")
]
ACTORS: Final = {"tenant consumer", "tenant producer", "operator", "neighbour process", "network"}


def test_every_actor_has_threats() -> None:
    assert {actor.partition(",")[0] for actor, *_ in ROWS} == ACTORS


@pytest.mark.parametrize("row", ROWS, ids=[f"{row[0]}: {row[1]}" for row in ROWS])
def test_a_threat_names_what_stops_it_and_a_test_that_exists(row: list[str]) -> None:
    assert len(row) == COLUMNS
    assert all(row)
    named = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", row[-1])
    assert named, row[-1]
    text = (ROOT / named[1]).read_text(encoding="utf-8")
    assert re.search(rf"^\s*(async )?def {named[2]}\(", text, flags=re.MULTILINE)
