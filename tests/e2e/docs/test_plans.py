"""The page on plans as pods: its files and commands, as printed, in order.

`make test-docs` types all of the page; this looks at what its files become, without a coordinator.
The chart takes what is rendered in `tests/chart/aqua/test_plans.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import yaml

from generators.page_commands import blocks
from harness.bounds import HANG_S

PAGE: Final = Path(__file__).resolve().parents[3] / "docs/operations/plans.md"


def test_the_files_of_the_page_become_a_plan_and_values(tmp_path: Path) -> None:
    found = blocks(PAGE)
    for block in found:
        if block.file is not None:
            (tmp_path / block.file).write_text(block.text)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run = [
        command.text
        for block in found
        if block.is_shell and "needs" not in block.marks
        for command in block.commands()
        if " --url " not in command.text
    ]
    assert len(run) == 5
    for line in run:
        done = subprocess.run(
            ["bash", "-c", line],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0, (line, done.stderr)
    values = yaml.safe_load((tmp_path / "rendered" / "values.yaml").read_text())
    assert set(values["servers"]) == {"dgx-0", "dgx-1"}
    node = values["servers"]["dgx-0"]["nodeSelector"]
    assert node == {"gpu": "h100", "kubernetes.io/hostname": "gpu-node-3"}
    names = {
        entry["value"]
        for server in values["servers"].values()
        for engine in server["engines"].values()
        for entry in engine["env"]
        if entry["name"] == "AQUA_MEMBER"
    }
    assert names == {"image.0", "image.1", "image.2", "llama-70b", "mistral"}
    assert (tmp_path / "next.json").is_file()
