"""The page of all reproductions: `docs/measurements/papers.md`, written by `aqua-sim paper all`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from aqua_simulator.papers.report import Reproduction

HEADER: Final = """# The papers, simulated again

Written by `aqua-sim paper all -o docs/measurements/papers.md --plots docs/measurements/images`; do
not edit. Numbers are those of a simulator with the policies of `aqua_schedulers`, not of a GPU;
`docs/simulation.md` says what it models and how far it is off a real engine.

Columns: what the paper prints, what we get, the difference (ours less published; for a range, how
far outside). "not printed" marks numbers that the paper shows only as a picture.
"""


def page(made: Sequence[Reproduction], images: Mapping[str, str]) -> str:
    """The whole page as Markdown.

    Args:
        images: Path of the picture of a figure, relative to the page, by key.
    """
    sections = [each.to_markdown(image=images.get(each.key)) for each in made]
    return "\n".join([HEADER, *sections])


def picture_of(key: str, folder: Path) -> Path:
    """Where the picture of a figure lies."""
    return folder / (f"{key}.png" if key.startswith("aqua") else f"blendserve-{key}.png")


def write_page(output: Path, made: Sequence[Reproduction], plots: Path | None) -> None:
    """Write the page, with those pictures that are in `plots`."""
    images = {
        each.key: os.path.relpath(picture_of(each.key, plots), output.parent)
        for each in made
        if plots is not None and picture_of(each.key, plots).is_file()
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(page(made, images))
