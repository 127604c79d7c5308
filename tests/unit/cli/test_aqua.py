"""`aqua`: the tools under one name, each on its own, found without being loaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.main import get_command

from aqua_cli import aqua, distributions, doctor
from aqua_cli.program import run
from aqua_protocol.findings import Finding, FindingLevel, Probe

ROOT = Path(__file__).resolve().parents[3]
SUMMARY = "Puts things in their place."


def add(first: int, second: int) -> None:
    """Stand in for a tool of one command."""
    typer.echo(first + second)


TOOL = typer.Typer(add_completion=False)
TOOL.command()(add)


def entry(name: str, value: str) -> EntryPoint:
    """An entry point of a distribution that says what it is for."""
    found = EntryPoint(name, value, distributions.COMMANDS_GROUP)
    dist = SimpleNamespace(name="aqua-stub", metadata={"Summary": SUMMARY}, version="9")
    vars(found)["dist"] = dist
    return found


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tools: one that works, one that does not load."""
    monkeypatch.setitem(sys.modules, "stub_tool", SimpleNamespace(app=TOOL))
    found = {
        "place": entry("place", "stub_tool:app"),
        "batch": entry("batch", "there_is_no_such_module:app"),
    }
    monkeypatch.setattr(aqua, "tools", lambda: found)


def call(*args: str) -> int:
    return run(get_command(aqua.app), "aqua", args)


@pytest.mark.usefixtures("tools")
def test_a_tool_is_run_with_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("place", "1", "2") == 0
    assert capsys.readouterr().out == "3\n"
    assert call("place", "1") == 2
    assert "`aqua place --help` shows how" in capsys.readouterr().err


@pytest.mark.usefixtures("tools")
def test_the_help_lists_tools_by_their_summaries_without_loading_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EntryPoint, "load", lambda _: pytest.fail("loaded a tool"))
    assert call("--help") == 0
    shown = capsys.readouterr().out
    for word in ("place", "batch", "doctor", SUMMARY):
        assert word in shown


@pytest.mark.usefixtures("tools")
def test_a_tool_that_is_not_installed_says_what_to_install(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call("sim", "run") == 3
    assert "pip install aqua-simulator" in capsys.readouterr().err
    assert call("sim", "run", "--json") == 3
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "service_unavailable"


@pytest.mark.usefixtures("tools")
def test_a_broken_tool_is_named_and_breaks_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("batch", "order") == 3
    assert "there_is_no_such_module" in capsys.readouterr().err
    assert call("place", "1", "1") == 0


@pytest.mark.usefixtures("tools")
def test_an_unknown_name_is_wrong_usage_and_a_near_miss_is_guessed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert call("plaec") == 2
    assert "Did you mean 'place'?" in capsys.readouterr().err


def test_the_version_lists_all_distributions_and_says_when_they_disagree(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call("--version") == 0
    out, err = capsys.readouterr()
    assert out.splitlines() == [f"{name} 0.1.0" for name in distributions.DISTRIBUTIONS]
    assert err == ""
    monkeypatch.setattr(aqua, "installed", lambda: {"aqualib": "1", "aqua-a": "1", "aqua-b": "2"})
    assert call("--version") == 0
    assert "most are 1, but aqua-b 2" in capsys.readouterr().err


def test_the_table_of_distributions_is_that_of_the_repository() -> None:
    projects = {
        path.parent.name: tomllib.loads(path.read_text())["project"]
        for path in ROOT.glob("*/pyproject.toml")
    }
    assert {project["name"] for project in projects.values()} == set(distributions.DISTRIBUTIONS)
    offered = {
        name: project["name"]
        for project in projects.values()
        for name in project.get("entry-points", {}).get(distributions.COMMANDS_GROUP, {})
    }
    assert offered == distributions.DISTRIBUTION_OF
    for name in offered:
        assert any(f"aqua-{name}" in project.get("scripts", {}) for project in projects.values())


def test_completion_knows_the_tools_and_their_commands() -> None:
    def completed(line: str, word: int) -> list[str]:
        environment = {
            **os.environ,
            "_AQUA_COMPLETE": "complete_bash",
            "COMP_WORDS": line,
            "COMP_CWORD": str(word),
        }
        done = subprocess.run(
            [Path(sys.executable).with_name("aqua")],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.stdout.split()

    assert completed("aqua pl", 1) == ["place"]
    assert completed("aqua place so", 2) == ["solve"]


# --- The doctor ---------------------------------------------------------------------------


def examined(monkeypatch: pytest.MonkeyPatch, **probes: Probe) -> list[Finding]:
    monkeypatch.setattr(doctor, "probes", lambda: probes)
    return doctor.examine()


def bad() -> Iterable[Finding]:
    yield Finding(check="disk", level=FindingLevel.FAIL, message="full", remedy="Empty it.")


def broken() -> Iterable[Finding]:
    raise ImportError("no module of that name")


def test_a_probe_that_breaks_is_a_finding_and_spoils_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    findings = examined(monkeypatch, broken=broken, python=doctor.probe_python)
    assert [finding.level for finding in findings] == [FindingLevel.FAIL, FindingLevel.OK]
    assert "no module of that name" in findings[0].message


def test_the_doctor_fails_when_something_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "probes", lambda: {"disk": bad})
    assert call("doctor") == 1
    assert "Empty it." in capsys.readouterr().out
    assert call("doctor", "--json") == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding == {
        "check": "disk",
        "level": "fail",
        "message": "full",
        "remedy": "Empty it.",
        "details": {},
    }
    monkeypatch.setattr(doctor, "probes", lambda: {"python": doctor.probe_python})
    assert call("doctor") == 0


def test_versions_that_disagree_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    (fine,) = doctor.probe_versions()
    assert fine.level is FindingLevel.OK
    monkeypatch.setattr(doctor, "installed", lambda: {"a": "1", "b": "1", "c": "2"})
    (finding,) = doctor.probe_versions()
    assert finding.level is FindingLevel.FAIL
    assert "c 2" in finding.message


def test_the_probes_of_other_distributions_are_found() -> None:
    assert {"python", "versions", "machine", "coordinator"} <= set(doctor.probes())
