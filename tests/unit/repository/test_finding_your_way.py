"""`docs/finding-your-way.md` leads to five acts, in at most four hops that exist and connect."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import pytest

from harness.source_tree import ROOT

PAGE: Final = ROOT / "docs" / "finding-your-way.md"
MOST_HOPS: Final = 4
HOP: Final = re.compile(
    r"^\d+\. \[`(?P<shown>[^`]+)`\]\((?P<link>[^)]+)\) `(?P<name>[\w.]+)`", re.MULTILINE
)


@dataclass(frozen=True)
class Hop:
    """One step of a walk: a file, and the function, method or class to read in it."""

    shown: str
    link: str
    name: str

    @property
    def text(self) -> str:
        return (PAGE.parent / self.link).read_text(encoding="utf-8")


def _walks() -> dict[str, list[Hop]]:
    _, *sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        section.partition("\n")[0]: [Hop(**found.groupdict()) for found in HOP.finditer(section)]
        for section in sections
    }


WALKS: Final = _walks()
per_walk = pytest.mark.parametrize("hops", WALKS.values(), ids=list(WALKS))


def test_the_page_walks_five_acts() -> None:
    assert len(WALKS) == 5


@per_walk
def test_a_walk_has_at_most_four_hops(hops: list[Hop]) -> None:
    assert 1 <= len(hops) <= MOST_HOPS


@per_walk
def test_each_hop_is_a_file_that_defines_what_it_names(hops: list[Hop]) -> None:
    for hop in hops:
        assert hop.link.endswith(hop.shown)
        if hop.link.endswith(".py"):
            assert hop.name in _definitions(hop.text), hop
        else:
            assert re.search(rf"\b{re.escape(hop.name)}\b", hop.text), hop


@per_walk
def test_each_hop_names_the_next(hops: list[Hop]) -> None:
    """A reader who searches a file for the next name finds it: the walk has no gap."""
    for hop, following in pairwise(hops):
        spoken = {*following.name.split("."), following.link.rpartition("/")[2]}
        assert any(re.search(rf"\b{re.escape(word)}\b", hop.text) for word in spoken), following


def _definitions(text: str) -> set[str]:
    names = set()
    stack: list[tuple[str, ast.AST]] = [("", ast.parse(text))]
    while stack:
        prefix, parent = stack.pop()
        for node in ast.iter_child_nodes(parent):
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                    names.add(prefix + node.name)
                    stack.append((f"{prefix}{node.name}.", node))
                case ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(prefix + name)
                case _:
                    stack.append((prefix, node))
    return names
