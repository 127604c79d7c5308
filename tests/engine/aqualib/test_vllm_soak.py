"""A round of `make soak-engine`: a real engine in a storm answers as vLLM by itself."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from harness.soak_engine import EngineSoak

pytestmark = [
    pytest.mark.timeout(900),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]


def test_a_storm_within_the_engine_and_around_it_changes_no_answer() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="aqua-", dir="/tmp") as folder,
        EngineSoak(Path(folder), seed=1) as soak,
    ):
        soak.run_round()
        soak.control()
    assert soak.verdict.found() == []
    assert soak.verdict.counts["answers"] > 20
