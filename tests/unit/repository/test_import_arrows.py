"""The import contracts hold for every pair of packages, and a planted violation is refused.

The contracts are generated from `docs/arrows.toml`. Here they run over stand-in packages of the
same names, small enough to plant in them each import that the table forbids.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from itertools import permutations
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[3]
ARROWS: Final = tomllib.loads((ROOT / "docs" / "arrows.toml").read_text())
LINT_IMPORTS: Final = "import sys; from importlinter.cli import lint_imports_command as run; run()"

ALLOWED_PAIRS: Final = [
    (package, other) for package, row in ARROWS.items() for other in row["may_import"]
]
FORBIDDEN_PAIRS: Final = [
    pair for pair in permutations(ARROWS, 2) if pair not in set(ALLOWED_PAIRS)
]


@pytest.fixture
def stand_ins(tmp_path: Path) -> Path:
    """Make an empty package for each of ours, with the folders that its contracts name."""
    for package, row in ARROWS.items():
        for of, layers in [
            (package, row.get("rooms", [])),
            *((inner["of"], inner["rooms"]) for inner in row.get("inner_rooms", [])),
        ]:
            container = tmp_path / of.replace(".", "/")
            rooms = [room.strip() for layer in layers for room in layer.split("|")]
            for folder in (container.parent, container, *(container / room for room in rooms)):
                folder.mkdir(parents=True, exist_ok=True)
                if folder != tmp_path:
                    (folder / "__init__.py").touch()
    return tmp_path


def _plant(sources: Path, package: str, imported: str) -> None:
    init = sources / package / "__init__.py"
    init.write_text(init.read_text() + f"import {imported}\n")


def _lint(sources: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT_IMPORTS, "--config", str(ROOT / ".importlinter")]
    return subprocess.run(
        [*command, "--no-cache"],
        cwd=sources,
        env={**os.environ, "PYTHONPATH": str(sources), "COLUMNS": "500"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_table_names_every_package_of_the_repository() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/src/*/__init__.py")}
    assert packages == set(ARROWS)


def test_the_arrows_make_no_circle() -> None:
    below: set[str] = set()
    while len(below) < len(ARROWS):
        ground = {name for name, row in ARROWS.items() if set(row["may_import"]) <= below}
        assert ground - below, f"a circle among {sorted(set(ARROWS) - below)}"
        below |= ground


def test_all_allowed_imports_together_pass(stand_ins: Path) -> None:
    for package, other in ALLOWED_PAIRS:
        _plant(stand_ins, package, other)
    run = _lint(stand_ins)
    assert run.returncode == 0, run.stdout


def test_each_forbidden_import_is_refused(stand_ins: Path) -> None:
    for package, other in FORBIDDEN_PAIRS:
        _plant(stand_ins, package, other)
    run = _lint(stand_ins)
    assert run.returncode == 1, run.stdout
    refused = set(re.findall(r"(\w+) is not allowed to import (\w+)", run.stdout))
    assert refused == set(FORBIDDEN_PAIRS)


def test_a_third_party_is_refused_through_others_too(stand_ins: Path) -> None:
    _plant(stand_ins, "aqua_client", "redis")
    _plant(stand_ins, "aqualib", "aqua_client")
    run = _lint(stand_ins)
    assert "aqualib is not allowed to import redis" in run.stdout
