"""The map of the documentation: which pages there are, under which kind, and what each says first.

`mkdocs.yml` at the root of the repository holds the map. A name in it is a page below `docs/`, or
one of the root (README.md, helm/aqua/README.md); a name that ends with `/` stands for all pages of
that folder, its README first. The site (`site_hooks.py`) and `llms.txt` are made from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

import yaml

DOCS: Final = Path(__file__).resolve().parents[1]
ROOT: Final = DOCS.parent

LINK: Final = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^)\s]+)\)")
"""A Markdown link or image: its words in brackets, and its target."""

_COMMENT: Final = re.compile(r"<!--.*?-->", re.DOTALL)
_FENCED: Final = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)


class _MapLoader(yaml.SafeLoader):
    """YAML in which MkDocs' own tags are left alone."""


_MapLoader.add_multi_constructor("", lambda *_: None)


def read_map() -> list[Any]:
    """Read the map as it stands in `mkdocs.yml`, folders unfolded: home, then sections by title."""
    # A subclass of the safe loader; what it does not know is None.
    tree = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _MapLoader)  # noqa: S506
    return unfold(tree["nav"])


def unfold(entries: list[Any]) -> list[Any]:
    """Replace each folder in a map by its pages, at every depth."""
    return list(chain.from_iterable(map(_unfolded, entries)))


def _unfolded(entry: str | Mapping[str, Any]) -> list[Any]:
    if isinstance(entry, str):
        return list(_pages_of(entry)) if entry.endswith("/") else [entry]
    ((title, inner),) = entry.items()
    if isinstance(inner, str):  # A folder, or a page under another title than its own.
        return [{title: list(_pages_of(inner)) if inner.endswith("/") else inner}]
    return [{title: unfold(inner)}]


def _pages_of(folder: str) -> Iterator[str]:
    names = sorted(path.name for path in (DOCS / folder).glob("*.md"))
    yield from (folder + name for name in sorted(names, key=lambda name: name != "README.md"))


def pages_of(entries: str | list[Any] | Mapping[str, Any]) -> Iterator[str]:
    """Every page of an unfolded map, in order."""
    if isinstance(entries, str):
        yield entries
        return
    for entry in entries.values() if isinstance(entries, Mapping) else entries:
        yield from pages_of(entry)


def source_of(page: str) -> Path:
    """Where a page of the map lies: below `docs/`, or else at the root."""
    below = DOCS / page
    return below if below.exists() else ROOT / page


def page_at(path: Path) -> str:
    """Name a file of the repository as the map does; the opposite of `source_of`."""
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()


def title_and_summary(path: Path) -> tuple[str, str]:
    """Read a page's title, and the first sentence of its first paragraph, without markup."""
    text = _FENCED.sub("", _COMMENT.sub("", path.read_text(encoding="utf-8"))).strip()
    title, _, rest = text.partition("\n")
    paragraphs = (block.strip() for block in re.split(r"\n\s*\n", rest))
    first = next(
        (block for block in paragraphs if block and not re.match(r"[#|!]|[-*] |\d+\. ", block)), ""
    )
    words = " ".join(LINK.sub(lambda found: found[1][1:-1], first).split())
    sentence = re.match(r".*?[.](?= |$)", words)
    return title.lstrip("# "), (sentence[0] if sentence else words).rstrip(":")


def llms_text(*, in_site: bool = False) -> str:
    """Write `llms.txt` (llmstxt.org): the map with one line a page, for language models.

    Args:
        in_site: Name pages by their places in the site, not in the repository.
    """
    home, *sections = read_map()
    title, summary = title_and_summary(source_of(home))
    lines = [f"# {title}", "", f"> {summary}", ""]
    for section in sections:
        ((name, entries),) = section.items()
        lines += [f"## {name}", ""]
        for page in pages_of(entries):
            path = source_of(page)
            page_title, about = title_and_summary(path)
            place = page if in_site else path.relative_to(ROOT).as_posix()
            lines.append(f"- [{page_title}]({place})" + (f": {about}" if about else ""))
        lines.append("")
    return "\n".join(lines)
