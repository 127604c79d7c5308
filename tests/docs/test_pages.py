"""Every command that a page tells people to type is typed, in order, as it is printed.

What a page takes for granted stands in `BEFORE`: a coordinator that runs, an engine on a port. What
cannot be run here is marked on the page and listed in `docs/reference/not-run.md`.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

import pytest

from generators.page_commands import Block, blocks, pages_to_run
from harness.page_terminal import PageTerminal
from harness.source_tree import ROOT

COORDINATOR: Final = (
    "export AQUA_ALLOWED_HOSTS=coordinator,aqua-coordinator.aqua.svc",
    "aqua-coordinator serve",
    "export AQUA_COORDINATOR_URL=http://127.0.0.1:7700",
)
BEFORE: Final = {
    "docs/operations/disaster-recovery.md": COORDINATOR,
    "docs/operations/plans.md": COORDINATOR,
    "docs/placement.md": COORDINATOR,
    "docs/tutorials/batch-api.md": ("python -m harness.counting_server 8000 &",),
    "docs/operations/runbook/": COORDINATOR,
}
"""What runs already when a page, or one of a folder, begins."""

TOOLS: Final = {"deploy/README.md": "promtool"}
"""A command that not every machine has, and without which a page is skipped."""

# A page is a day of a cluster simulated, or profiles and the demo that follows them.
pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages_to_run()]
)
def test_the_commands_of_a_page_run_as_they_are_printed(page: Path, tmp_path: Path) -> None:
    name = str(page.relative_to(ROOT))
    if (tool := TOOLS.get(name)) and shutil.which(tool) is None:
        pytest.skip(f"no {tool} here")
    folder = tmp_path / "page"
    folder.mkdir()
    found = blocks(page)
    for block in found:
        if block.file is not None:
            write(folder, block)
    before = BEFORE.get(name, BEFORE.get(f"{Path(name).parent}/", ()))
    with PageTerminal(folder) as terminal:
        for command in before:
            terminal.type(command)
        for block in found:
            if block.is_shell and "needs" not in block.marks:
                for printed in block.commands():
                    terminal.type(printed.text, printed.output)


def write(folder: Path, block: Block) -> None:
    assert block.file is not None
    path = folder / block.file
    path.write_text(block.text)
    if re.match("#!", block.text):
        path.chmod(0o755)
