"""Dockerfiles are clean by hadolint, and name what they are built on in one place."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
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
    assert {path.stem for path in DOCKERFILES} == {"coordinator", "placer", "profiler", "batch"}


def _of_ours(name: str) -> set[str]:
    """A distribution's folder, and those of all of ours that it depends on."""
    about = tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]
    found = {re.split(r"[^a-z-]", each)[0] for each in about["dependencies"]}
    ours = {each.removeprefix("aqua-") for each in found if each.startswith("aqua-")}
    return {name}.union(*(_of_ours(each) for each in ours))


@each
def test_an_image_is_given_all_of_ours_that_its_program_depends_on(path: Path) -> None:
    text = path.read_text()
    copied = {a for a, b in re.findall(r"^COPY (\w+) (\w+)$", text, re.MULTILINE) if a == b}
    assert copied == _of_ours(path.stem)
    assert copied <= set((ROOT / ".dockerignore").read_text().replace("!", "").split())
    installed = set(re.findall(r"'?\./(\w+)", text))
    assert installed == copied
