"""What the compose file and the systemd units start, and what they set, is there to be had."""

from __future__ import annotations

import re
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

import pytest
import yaml

import aqualib.engines.vllm as for_vllm
from aqua_batch.service.settings import BatchSettings
from aqua_coordinator.settings import CoordinatorSettings
from aqualib.settings import Settings
from harness.command import run_here
from harness.source_tree import ROOT

COMPOSE: Final = (ROOT / "deploy" / "compose" / "compose.yaml").read_text(encoding="utf-8")
UNITS: Final = sorted((ROOT / "deploy" / "systemd").glob("*.service"))
SETTINGS: Final = {
    f"{kind.model_config.get('env_prefix', '')}{name}".upper()
    for kind in (CoordinatorSettings, Settings, BatchSettings)
    for name in kind.model_fields
}


def _require_taken(program: str, words: list[str]) -> None:
    """Ask for one option more that there is not: it has to be the only one that is refused."""
    (entry,) = entry_points(group="aqua.commands", name=program.removeprefix("aqua-"))
    said = run_here(entry.load(), program, *words, "--no-such-option")
    assert said.returncode == 2
    assert "No such option: --no-such-option" in said.stderr


def test_variables_of_the_compose_file_are_settings() -> None:
    services = yaml.safe_load(COMPOSE)["services"].values()
    given = {name for one in services for name in one.get("environment", {}) if "AQUA_" in name}
    assert "AQUA_BATCH_ENGINES" in given
    assert given <= SETTINGS


def test_what_the_compose_file_names_of_aqualib_is_there() -> None:
    named = re.findall(r"aqualib\.engines\.vllm\.(\w+)|\"kv_connector\": \"(\w+)\"", COMPOSE)
    assert len(named) == 4
    assert {first or second for first, second in named} <= set(for_vllm.__all__)


def test_commands_of_the_compose_file_are_taken() -> None:
    tokens = re.findall(r"(aqua-coordinator) (token [^>]+) >", COMPOSE)
    others = re.findall(
        r"docker compose (?:exec coordinator sh -c '.* aqua-coordinator|run --rm (batch)) (.+?)"
        r"(?:'|  .*)$",
        COMPOSE,
        re.MULTILINE,
    )
    assert (len(tokens), len(others)) == (2, 2)
    for program, words in tokens:
        _require_taken(program, words.split())
    for program, words in others:
        _require_taken("aqua-batch" if program else "aqua-coordinator", words.split())


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_a_command_that_is_taken_with_variables_that_are_settings(
    unit: Path,
) -> None:
    text = unit.read_text(encoding="utf-8")
    (line,) = re.findall(r"^ExecStart=/opt/aqua/bin/(.+)$", text, re.MULTILINE)
    program, *words = line.split()
    _require_taken(program, words)
    assert set(re.findall(r"\b(AQUA_\w+)=", text)) <= SETTINGS


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.stem)
def test_a_unit_starts_until_what_it_needs_is_there(unit: Path) -> None:
    lines = unit.read_text(encoding="utf-8").splitlines()
    assert "Restart=always" in lines
    assert "StartLimitIntervalSec=0" in lines[: lines.index("[Service]")]
