"""The wheels of all distributions, installed from files into an empty environment, run the demo.

Third parties come from the index that pip is configured for, our distributions only from the files:
whatever one of them requires of another, and what it forgot to require, shows here.
"""

from __future__ import annotations

import email
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest

from harness.source_tree import ROOT

pytestmark = pytest.mark.timeout(3600)

TORCH: Final = os.environ.get("TORCH", "torch==2.13.0")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command as a shell of an operator would: nothing of this environment leaks in."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("AQUA_", "PYTHON"))}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=clean, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("wheels")
    run(sys.executable, ROOT / "deploy" / "release.py", "build", folder)
    return sorted(folder.glob("*.whl"))


def metadata(wheel: Path) -> Any:  # noqa: ANN401 - a message with headers
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_there_is_a_wheel_of_each_distribution_which_asks_for_the_others_in_its_version(
    wheels: list[Path],
) -> None:
    found = {metadata(wheel)["Name"]: metadata(wheel) for wheel in wheels}
    assert len(found) == len(list(ROOT.glob("*/pyproject.toml")))
    versions = {about["Version"] for about in found.values()}
    (version,) = versions
    for name, about in found.items():
        assert about["License-Expression"] == "Apache-2.0", name
        assert about["Requires-Python"] == ">=3.11", name
        for requirement in about.get_all("Requires-Dist", []):
            if re.match(r"[a-z-]+", requirement)[0] in found:  # type: ignore[index]  # it matches
                assert f"=={version}" in requirement, (name, requirement)


def test_a_wheel_carries_all_of_its_sources_and_nothing_else(wheels: list[Path]) -> None:
    for wheel in wheels:
        package = wheel.name.partition("-")[0]
        (source,) = ROOT.glob(f"*/src/{package}")
        kept = {
            str(path.relative_to(source.parent))
            for path in source.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        with zipfile.ZipFile(wheel) as archive:
            held = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert held == kept, wheel.name


def test_installed_from_files_into_an_empty_environment_the_demo_runs(
    wheels: list[Path], tmp_path: Path
) -> None:
    run(sys.executable, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt")
    run(*pip, TORCH)
    run(*pip, *wheels, cwd=tmp_path)
    run(python, "-m", "pip", "check")
    where = run(python, "-c", "import aqualib; print(aqualib.__file__)", cwd=tmp_path)
    assert where.startswith(str(tmp_path)), "not the repository's"
    versions = run(python.parent / "aqua", "--version", cwd=tmp_path)
    assert all(metadata(wheel)["Name"] in versions for wheel in wheels)
    report = run(python.parent / "aqua-demo", "--quick", "--json", cwd=tmp_path)
    assert json.loads(report)
