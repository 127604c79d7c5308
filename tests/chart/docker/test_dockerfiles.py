"""Dockerfiles are clean by hadolint, and name what they are built on in one place."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from harness.chart import ROOT

DOCKERFILES: Final = sorted((ROOT / "docker").glob("*.Dockerfile"))
HADOLINT: Final = Path(sys.prefix) / "bin" / "hadolint"

each = pytest.mark.parametrize("path", DOCKERFILES, ids=[path.stem for path in DOCKERFILES])


@each
def test_hadolint_finds_nothing(path: Path) -> None:
    done = subprocess.run([HADOLINT, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@each
def test_every_stage_is_built_on_base_and_the_last_is_no_ones_root(path: Path) -> None:
    text = path.read_text()
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}
    assert re.search(r"^ARG BASE=\S+:\S+$", text, re.MULTILINE)
    last = text.rpartition("\nFROM ")[2]
    assert "USER 65532:65532" in last
    assert not re.search(r"^RUN .*pip", last, re.MULTILINE)


def test_there_is_one_for_each_image_of_the_chart() -> None:
    assert {path.stem for path in DOCKERFILES} == {"coordinator", "placer", "profiler"}
