"""The page on plans as pods: its files and commands, as printed, in order.

`make test-docs` types all of the page; this looks at what its files become, without a coordinator.
The chart takes what is rendered in `tests/chart/aqua/test_plans.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from generators.page_commands import blocks
from harness.bounds import HANG_S
from harness.engine_values import can_borrow

PAGE: Final = Path(__file__).resolve().parents[3] / "docs/operations/plans.md"


def run(folder: Path, line: str, **variables: str) -> None:
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=folder,
        env={**os.environ, "PATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, (line, done.stderr)


def engines(folder: Path) -> dict[str, dict[str, Any]]:
    """What is rendered now, by the names under which engines report."""
    values = yaml.safe_load((folder / "rendered" / "values.yaml").read_text())
    return {
        entry["value"]: engine
        for server in values["servers"].values()
        for engine in server["engines"].values()
        for entry in engine["env"]
        if entry["name"] == "AQUA_MEMBER"
    }


def borrowers(folder: Path) -> set[str]:
    """Consumers of what is rendered now; each of them has flags by which it can be one."""
    found = {name: one for name, one in engines(folder).items() if one["role"] == "consumer"}
    assert [name for name, one in found.items() if not can_borrow(one)] == []
    return {*found}


def test_the_files_of_the_page_become_a_plan_and_values(tmp_path: Path) -> None:
    found = blocks(PAGE)
    for block in found:
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text)
    lines = [
        command.text
        for block in found
        if block.is_shell and "needs" not in block.marks
        for command in block.commands()
        if " --url " not in command.text
    ]
    assert len(lines) == 6
    for line in lines:
        run(tmp_path, line)
    values = yaml.safe_load((tmp_path / "rendered" / "values.yaml").read_text())
    assert set(values["servers"]) == {"dgx-0", "dgx-1"}
    node = values["servers"]["dgx-0"]["nodeSelector"]
    assert node == {"gpu": "h100", "kubernetes.io/hostname": "gpu-node-3"}
    today = {"image.0", "image.1", "image.2", "llama-70b", "mistral"}
    assert engines(tmp_path).keys() == today
    assert borrowers(tmp_path) == {"llama-70b", "mistral"}

    # The hook, as it is started; what it starts of others only has to be started.
    (tmp_path / "bin").mkdir()
    for tool in ("kubectl", "helm"):
        (tmp_path / "bin" / tool).write_text("#!/bin/sh\n")
        (tmp_path / "bin" / tool).chmod(0o755)
    (command,) = [line for line in PAGE.read_text().splitlines() if "--hook" in line]
    hook = command.partition("--hook ")[2].split()[0]
    run(tmp_path, hook, AQUA_STEPS_DONE="1")
    assert engines(tmp_path).keys() == today | {"late"}
    assert borrowers(tmp_path) == {"llama-70b", "mistral", "late"}
