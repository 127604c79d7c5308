"""Every test is run by a target of the Makefile, and by one of `make test` and `make test-slow`."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Final

import pytest

from harness.source_tree import ROOT

MAKEFILE: Final = (ROOT / "Makefile").read_text(encoding="utf-8")
TIERS: Final = sorted(
    path.name for path in (ROOT / "tests").iterdir() if any(path.glob("*/**/test_*.py"))
)
OWN_TARGET: Final = {"dashboards", "release", "chart", "images", "console", "docs", "engine", "gpu"}


def targets_of(*marks: str) -> list[str]:
    """Which of the two take a test with these marks."""
    selections = dict(re.findall(r"^(QUICK|SLOW) = (.+)$", MAKEFILE, re.MULTILINE))
    has = defaultdict(bool, dict.fromkeys(marks, True))
    return [name for name, each in selections.items() if eval(each, {}, has)]  # noqa: S307 - our own


@pytest.mark.parametrize("tier", TIERS)
def test_every_tier_has_a_target(tier: str) -> None:
    if tier in OWN_TARGET:
        assert re.search(rf"^test-{tier}:", MAKEFILE, re.MULTILINE)
        assert not targets_of(tier)
    else:
        assert len(targets_of(tier)) == 1
        assert targets_of(tier, "slow") == ["SLOW"]
        assert not targets_of(tier, "engine") + targets_of(tier, "gpu")
