"""From profiles to a plan to the demo, as docs/profiling.md shows it; nothing edited by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.store_servers import short_directory

RUN_LIMIT_S = 900

pytestmark = pytest.mark.timeout(2 * RUN_LIMIT_S)


def _run(directory: Path, *command: str) -> str:
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run(
        [str(program), *command[1:]],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_LIMIT_S,
        env={**os.environ, "TMPDIR": str(directory)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _json(text: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(text)
    return content


@pytest.fixture
def directory() -> Iterator[Path]:
    """A path short enough for the demo's Unix sockets, whichever process of pytest runs this."""
    with short_directory() as path:
        yield path


def test_profiles_make_a_plan_and_the_demo_follows_it(directory: Path) -> None:
    images = _json(
        _run(
            directory,
            *("aqua-profile", "run", "batch", "--model", "image-service", "--largest", "2"),
            *("--program", "aqua_demo.programs.profiled:images_quick", "--threshold", "1MiB"),
            *("--output", "images.json", "--json"),
        )
    )
    assert images["label"] == "producer"
    llm = _json(
        _run(
            directory,
            *("aqua-profile", "run", "context", "--model", "llm", "--long-prompt-tokens", "1660"),
            *("--program", "aqua_demo.programs.profiled:llm_quick", "--threshold", "1MiB"),
            *("--output", "llm.json", "--json"),
        )
    )
    assert llm["label"] == "consumer"
    problem = _run(
        directory,
        *("aqua-profile", "show", "images.json", "llm.json", "--format", "placer", "--gpus", "2"),
    )
    (directory / "problem.yaml").write_text(problem)
    plan = _json(
        _run(directory, "aqua-place", "solve", "problem.yaml", "-o", "plan.json", "--json")
    )
    (match,) = plan["matches"]
    assert (match["consumer"], match["producer"]) == ("llm", "image-service")
    assert match["covered_gb"] == pytest.approx(llm["needed_bytes"] / 1e9)
    report = _json(
        _run(
            directory,
            *("aqua-demo", "--quick", "--transport", "memfd", "--plan", "plan.json", "--json"),
            *("--profile", "images.json", "--profile", "llm.json"),
        )
    )
    assert all(claim["holds"] for claim in report["claims"])
