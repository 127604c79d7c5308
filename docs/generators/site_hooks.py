"""What MkDocs is told about this repository: pages outside docs/, links to sources, `llms.txt`.

MkDocs calls these functions by their names (`hooks` in `mkdocs.yml`). Pages are written for people
who read them in the repository, so a link may lead to any file of it. In the site a link to another
page leads there; one to a source leads to `AQUA_SOURCE_URL` (for example
`https://git.example/aqua/blob/main/`), and without that variable it is only its words. What does
not exist is a warning, and a warning fails the build.
"""

from __future__ import annotations

import os.path
import re
import shutil
from pathlib import Path
from typing import Any, Final
from urllib.parse import urljoin

from generators.navigation import LINK, ROOT, llms_text, page_at, pages_of, source_of, unfold

FENCED: Final = re.compile(r"^( *)```[^\n]*\n.*?^\1```$", re.DOTALL | re.MULTILINE)
MARKS: Final = re.compile(r"(?<=\w) .*")
LEADING_COMMENT: Final = re.compile(r"\A\s*<!--.*?-->\s*", re.DOTALL)
OUTSIDE: Final = re.compile(r"[a-z]+:|#")
"""How the target of a link begins that leads out of the repository, or stays on its page."""

STATIC: Final = {
    ".docs-tools/mermaid.min.js": "assets/mermaid.min.js",
    ".docs-tools/iframe-worker.js": "assets/iframe-worker.js",
}
"""Scripts that the theme would load from elsewhere, and where they stand in the site."""


def on_config(config: Any) -> Any:
    """Unfold the folders of the map."""
    config.nav = unfold(config.nav)
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside docs/, the images that they show, and the scripts."""
    from mkdocs.structure.files import File

    known = {file.src_uri for file in files}
    for page in pages_of(config.nav):
        if page not in known and source_of(page).exists():
            text = source_of(page).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=text))
    for source, place in STATIC.items():
        content = (ROOT / source).read_bytes()
        files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links into the site or at sources, and indent code in lists as MkDocs wants it."""
    source = source_of(page.file.src_uri)
    in_site = {file.src_uri for file in files if file.inclusion.is_included()}

    def pointed(found: re.Match[str]) -> str:
        words, target = found.groups()
        if OUTSIDE.match(target):
            return found[0]
        path, _, anchor = target.partition("#")
        there = Path(os.path.normpath(source.parent / path))
        if not there.exists():
            return found[0]  # MkDocs warns.
        if there.is_dir():
            index = there / "README.md"
            there = index if index.exists() and page_at(index) in in_site else there
        name = page_at(there)
        if name in in_site:
            here = os.path.relpath(name, Path(page.file.src_uri).parent)
            return f"{words}({here}{'#' + anchor if anchor else ''})"
        url = config.extra.get("source_url")
        return (
            f"{words}({urljoin(url, there.relative_to(ROOT).as_posix())})" if url else words[1:-1]
        )

    pieces, end = [], 0
    for fence in FENCED.finditer(markdown):
        pieces += [LINK.sub(pointed, markdown[end : fence.start()]), _indented(fence)]
        end = fence.end()
    # A comment above the title would hide it from MkDocs.
    return LEADING_COMMENT.sub("", "".join([*pieces, LINK.sub(pointed, markdown[end:])]))


def _indented(fence: re.Match[str]) -> str:
    """Indent a block by four or none, and take what is said to tests from its first line."""
    missing = " " * (-len(fence[1]) % 4)
    first, *rest = fence[0].split("\n")
    return "\n".join(missing + line for line in [MARKS.sub("", first), *rest])


def on_post_build(config: Any) -> None:
    """Put each page's Markdown beside it, and the map for language models at the top."""
    site = Path(config.site_dir)
    for page in pages_of(config.nav):
        place = site / page
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source_of(page), place)
    (site / "llms.txt").write_text(llms_text(in_site=True), encoding="utf-8")
