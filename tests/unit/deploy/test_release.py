"""Version, requirements, changelog, chart and tag of a release agree, or it says which does not."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from harness.source_tree import ROOT

SCRIPT: Final = Path("deploy") / "release.py"
BASE: Final = f"docker.io/library/python:3.12-slim-bookworm@sha256:{'5d' * 32}"
CHANGELOG: Final = (
    "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- It.\n\n## [0.0.9] - 2026-01-01\n"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository with our distributions' metadata, a chart, and something unreleased."""
    images = [ROOT / "deploy/compose/compose.yaml", ROOT / "docs/operations/install.md"]
    dockerfiles = ROOT.glob("docker/*.Dockerfile")
    for path in [*ROOT.glob("*/pyproject.toml"), ROOT / SCRIPT, *images, *dockerfiles]:
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    chart = tmp_path / "helm" / "aqua" / "Chart.yaml"
    chart.parent.mkdir(parents=True)
    chart.write_text('name: aqua\nversion: 7.7.7\nappVersion: "0.0.9"\n')
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    git(tmp_path, "init", "-q")
    commit(tmp_path)
    return tmp_path


def git(tree: Path, *arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *who, *arguments], cwd=tree, check=True, capture_output=True)


def commit(tree: Path) -> None:
    git(tree, "add", "-A")
    git(tree, "commit", "-q", "-m", "All")


def release(tree: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], cwd=tree, check=False, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def test_a_bumped_committed_and_tagged_tree_is_a_release(tree: Path) -> None:
    assert release(tree, "bump", "3.2.1", "--base", BASE)[0] == 0
    assert "changes that are not committed" in release(tree, "check")[1]
    commit(tree)
    assert release(tree, "check") == (1, "this commit is not tagged v3.2.1: git tag -a v3.2.1\n")
    git(tree, "tag", "-a", "v3.2.1", "-m", "3.2.1")
    assert release(tree, "check") == (0, "this commit is 3.2.1\n")
    assert 'version: 3.2.1\nappVersion: "3.2.1"' in (tree / "helm/aqua/Chart.yaml").read_text()
    assert '"aqualib[torch,transformers]==3.2.1"' in (tree / "demo/pyproject.toml").read_text()
    assert "## [Unreleased]\n\n## [3.2.1] - 20" in (tree / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(
    ("path", "old", "new", "says"),
    [
        ("batch/pyproject.toml", 'version = "3.2.1"', 'version = "3.2.0"', "its version is not"),
        ("client/pyproject.toml", "protocol==3.2.1", "protocol", "not aqua-protocol==3.2.1"),
        ("aqualib/pyproject.toml", "schedulers==3.2.1", "schedulers==3.2.0", "aqua-schedulers=="),
        ("helm/aqua/Chart.yaml", '"3.2.1"', '"3.2.0"', "its images are not of 3.2.1"),
        ("deploy/compose/compose.yaml", ":-3.2.1", ":-3.2.0", "its images are not of 3.2.1"),
        ("docs/operations/install.md", ":3.2.1 .", ":3.2.0 .", "its images are not of 3.2.1"),
        ("helm/aqua/Chart.yaml", "version: 3.2.1", "version: 3.2.0", "its version is not 3.2.1"),
        ("docker/placer.Dockerfile", BASE, "python:3.12-slim", "BASE has no digest; `bump"),
        ("CHANGELOG.md", "[3.2.1] - 20", "[3.2.0] - 20", "no dated section [3.2.1]"),
        ("CHANGELOG.md", "[Unreleased]\n", "[Unreleased]\n\n- That.\n", "is [Unreleased]"),
    ],
)
def test_what_disagrees_is_named(tree: Path, path: str, old: str, new: str, says: str) -> None:
    assert release(tree, "bump", "3.2.1", "--base", BASE)[0] == 0
    text = (tree / path).read_text()
    assert old in text
    (tree / path).write_text(text.replace(old, new, 1))
    commit(tree)
    git(tree, "tag", "v3.2.1")
    code, said = release(tree, "check")
    assert (code, len(said.splitlines())) == (1, 1), said
    assert said.startswith(f"{path}: ")
    assert says in said


@pytest.mark.parametrize(
    ("version", "says"),
    [("3.2", "no version"), ("v3.2.1", "no version"), ("0.0.9", "was released")],
)
def test_a_version_that_cannot_be_is_refused(tree: Path, version: str, says: str) -> None:
    code, said = release(tree, "bump", version)
    assert code == 2
    assert says in said


def test_a_candidates_chart_has_its_version_as_helm_writes_it(tree: Path) -> None:
    assert release(tree, "bump", "3.2.1rc1", "--base", BASE)[0] == 0
    chart = (tree / "helm/aqua/Chart.yaml").read_text()
    assert 'version: 3.2.1-rc.1\nappVersion: "3.2.1rc1"' in chart
    commit(tree)
    git(tree, "tag", "v3.2.1rc1")
    assert release(tree, "check") == (0, "this commit is 3.2.1rc1\n")


def test_a_base_stays_until_another_is_named_and_has_a_digest(tree: Path) -> None:
    code, said = release(tree, "bump", "3.2.1", "--base", BASE.partition("@")[0])
    assert code == 2
    assert "has no digest" in said
    assert release(tree, "bump", "3.2.1", "--base", BASE)[0] == 0
    (tree / "CHANGELOG.md").write_text(CHANGELOG)
    assert release(tree, "bump", "3.2.2")[0] == 0
    for path in tree.glob("docker/*.Dockerfile"):
        assert f"\nARG BASE={BASE}\n" in path.read_text()


def test_a_release_with_nothing_new_is_refused(tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n")
    code, said = release(tree, "bump", "3.2.1")
    assert code == 2
    assert "nothing under [Unreleased]" in said
