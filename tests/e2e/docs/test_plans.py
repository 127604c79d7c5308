"""The page on plans as pods: its files and commands, as printed, in order.

What needs a cluster is not run here: `kubectl`, `helm`, and commands with an address. The chart
takes what is rendered in `tests/chart/aqua/test_plans.py`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

import yaml

from harness.bounds import HANG_S

PAGE: Final = Path(__file__).resolve().parents[3] / "docs/operations/plans.md"
NEEDS_A_CLUSTER: Final = re.compile(r"kubectl |helm |.* --url ")


def test_the_files_of_the_page_become_a_plan_and_values(tmp_path: Path) -> None:
    text = PAGE.read_text()
    for name, content in re.findall(r"```yaml\n# (\S+)\n(.*?)```", text, flags=re.DOTALL):
        (tmp_path / name).write_text(content)
    # Tomorrow one more model is there.
    problem = yaml.safe_load((tmp_path / "cluster.yaml").read_text())
    problem["models"].append({"name": "late", "need_gb": 5})
    (tmp_path / "tomorrow.yaml").write_text(yaml.safe_dump(problem))
    lines = [
        line.removeprefix("$ ")
        for block in re.findall(r"```console\n(.*?)```", text, flags=re.DOTALL)
        for line in block.splitlines()
    ]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    run = [line for line in lines if not NEEDS_A_CLUSTER.match(line)]
    assert len(run) == 4
    for line in run:
        done = subprocess.run(
            shlex.split(line),
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
