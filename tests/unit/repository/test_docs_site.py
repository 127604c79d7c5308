"""The site's map names every page once, and no page leads to what is not there.

`make docs-site` builds the site and finds dead anchors too; it needs an environment of its own.
"""

from __future__ import annotations

import re

from generators.navigation import LINK, llms_text, pages_of, read_map, source_of
from harness.source_tree import ROOT

DOCS = ROOT / "docs"


def test_the_map_names_every_page_once() -> None:
    pages = list(pages_of(read_map()))
    assert sorted(pages) == sorted(set(pages))
    assert not [page for page in pages if not source_of(page).exists()]
    below_docs = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert not below_docs - set(pages), "a page outside the map (`nav` of mkdocs.yml)"


def test_every_link_of_a_page_leads_to_something() -> None:
    dead = []
    for page in pages_of(read_map()):
        path = source_of(page)
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for found in LINK.finditer(text):
            target = found[2].partition("#")[0]
            outside = not target or re.match(r"[a-z]+:", target)
            if not outside and not (path.parent / target).exists():
                dead.append(f"{page}: {found[2]}")
    assert not dead


def test_the_text_for_language_models_has_a_line_for_each_page() -> None:
    text = llms_text()
    assert re.match(r"# Aqua\n\n> \S.*\n\n## Tutorials\n\n- \[", text)
    places = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", text, flags=re.MULTILINE)
    home, *pages = pages_of(read_map())
    assert home == "README.md"
    assert [ROOT / place for place in places] == [source_of(page) for page in pages]
