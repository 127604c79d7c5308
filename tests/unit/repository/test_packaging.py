"""The distributions agree with each other, with the import arrows and with the Makefile.

import-linter checks what the code imports; this checks what the metadata declares, so that
`pip install` of one distribution brings neither too little nor too much of the others.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[3]
PROJECT_FILES: Final = sorted(ROOT.glob("*/pyproject.toml"))

# What a distribution may require of ours, from the table that also makes the import contracts.
ARROWS: Final = tomllib.loads((ROOT / "docs" / "arrows.toml").read_text())
ALLOWED: Final[dict[str, set[str]]] = {
    package.replace("_", "-"): {other.replace("_", "-") for other in row["may_import"]}
    for package, row in ARROWS.items()
}

per_distribution = pytest.mark.parametrize(
    "path", PROJECT_FILES, ids=[path.parent.name for path in PROJECT_FILES]
)


def _project(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(path.read_text())["project"]
    return table


def _name_of(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return match.group().lower()


@per_distribution
def test_declared_dependencies_follow_the_import_arrows(path: Path) -> None:
    project = _project(path)
    ours = {_name_of(requirement) for requirement in project["dependencies"]} & set(ALLOWED)
    assert ours <= ALLOWED[project["name"]]


@per_distribution
def test_our_distributions_require_each_other_in_their_own_version(path: Path) -> None:
    """What runs together was tested together."""
    project = _project(path)
    extras = project.get("optional-dependencies", {}).values()
    requirements = [*project["dependencies"], *(one for extra in extras for one in extra)]
    for requirement in requirements:
        if _name_of(requirement) in ALLOWED:
            assert requirement.endswith(f"=={project['version']}"), requirement


@per_distribution
def test_every_distribution_is_typed_and_shares_version_licence_and_python(path: Path) -> None:
    project = _project(path)
    import_name = project["name"].replace("-", "_")
    assert (path.parent / "src" / import_name / "py.typed").is_file()
    reference = _project(ROOT / "protocol" / "pyproject.toml")
    for field in ("version", "license", "requires-python"):
        assert project[field] == reference[field], field


@per_distribution
def test_make_installs_every_distribution(path: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    folder = re.escape(path.parent.name)
    assert re.search(rf"-e '?{folder}(\[[a-z,]+\])?'?(\s|$)", makefile)


@pytest.mark.parametrize("name", sorted(path.name for path in ROOT.glob("constraints*.txt")))
def test_constraints_are_exact_and_leave_torch_to_the_machine(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    for pin in pins:
        # No URL, no path, no local version: each of them ties the file to one machine.
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9A-Za-z.!]+", pin), pin
        assert not re.match(r"(torch|triton|cupy|nvidia-)", pin), pin
