"""Each command that a page prints is typed by `make test-docs`, or marked with what it needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from generators.page_commands import NEEDS, blocks, is_whole, pages_to_type
from harness.source_tree import ROOT

PAGES = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages_to_type()]


@pytest.mark.parametrize("page", PAGES)
def test_a_block_of_a_shell_can_be_typed_and_its_marks_are_known(page: Path) -> None:
    found = blocks(page)
    for block in found:
        assert set(block.marks) <= {"needs", "file"}, block.marks
        assert block.marks.get("needs", "gpu") in NEEDS, block.marks
        if block.is_shell:
            assert all(is_whole(command.text) for command in block.commands())


def test_a_block_is_taken_apart_into_commands_and_their_outputs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "1. Do this:\n\n   ```console needs=gpu\n"
        "   $ first \\\n       --more\n   said\n   $ cat <<E\n   x\n   E\n   ```\n"
    )
    (block,) = blocks(page)
    assert block.marks == {"needs": "gpu"}
    first, second = block.commands()
    assert (first.text, first.output) == ("first \\\n    --more", "said")
    assert (second.text, second.output) == ("cat <<E\nx\nE", "")


def test_a_console_block_without_a_prompt_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\nmake demo\n```\n")
    with pytest.raises(ValueError, match=r"page.md:1: a console block begins with"):
        blocks(page)[0].commands()
