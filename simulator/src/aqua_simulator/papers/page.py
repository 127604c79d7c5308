"""The page of all reproductions: `docs/measurements/papers.md`, written by `aqua-sim paper all`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
