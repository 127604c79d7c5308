"""Commands that pages print: what a test runs as it is written, and what it cannot run.

A fenced block of a shell (`console`, `bash`, `sh`) is run by `make test-docs`, in order, in a fresh
folder, unless the line that opens it says what it needs and a test does not have, as in

    ```console needs=cluster

In `console` a command begins with `$ ` and goes on until the shell has all of it; what follows is
its output. In `bash` the whole block is one command. `file=NAME` on the opening line of any block,
or `# NAME` as its first line, makes it a file of that folder. `needs` stays out of the site.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from generators.navigation import DOCS, ROOT, pages_of, read_map, source_of, title_and_summary

SHELLS: Final = frozenset({"console", "bash", "sh", "shell"})
NEEDS: Final = {
    "gpu": "an NVIDIA GPU",
    "vllm": "vLLM; `make test-engine` and `make test-dashboards` run one with these switches",
    "cluster": "a Kubernetes cluster; `make test-chart` renders what is installed",
    "images": "a container builder; `make test-images` builds from these files",
    "host": "users and services of a machine of one's own",
    "network": "an index of packages, or another service outside",
    "members": "engines that lend and borrow meanwhile",
    "people": "somebody at a terminal or a browser, or answers of an operator",
    "hours": "longer than a test may take; CI runs these by themselves",
}
"""What a block may need that `make test-docs` has not, and why it is marked so."""

KINDS: Final = ("Tutorials", "How-to")
"""Sections of the map whose pages tell people what to type; and the README."""

_FENCE: Final = re.compile(
    r"^(?P<indent> *)```(?P<language>\w+)(?P<marks>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_NAME: Final = re.compile(r"\A(?:#!.*\n)?# ([\w.-]+\.\w+)\n")


@dataclass(frozen=True)
class Command:
    """A command as it is printed, and what is printed below it as its output."""

    text: str
    output: str = ""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its text without indentation, and its marks."""

    page: Path
    line: int
    language: str
    marks: dict[str, str]
    text: str

    @property
    def file(self) -> str | None:
        """The file that this block is; None if it is none."""
        named = _NAME.match(self.text)
        return self.marks.get("file") or (named[1] if named else None)

    @property
    def is_shell(self) -> bool:
        """Whether people type it."""
        return self.language in SHELLS and self.file is None

    def commands(self) -> list[Command]:
        """Take the block apart into commands with their outputs.

        Raises:
            ValueError: A `console` block does not begin with `$ `, or ends within a command.
        """
        if self.language != "console":
            return [Command(self.text)]
        found: list[Command] = []
        lines = self.text.splitlines()
        if not lines or not lines[0].startswith("$ "):
            raise ValueError(f"{self.page}:{self.line}: a console block begins with `$ `")
        while lines:
            text = lines.pop(0).removeprefix("$ ")
            while not is_whole(text):
                if not lines:
                    raise ValueError(f"{self.page}:{self.line}: ends within a command: {text}")
                text += "\n" + lines.pop(0)
            output = []
            while lines and not lines[0].startswith("$ "):
                output.append(lines.pop(0))
            found.append(Command(text, "\n".join(output)))
        return found


def is_whole(text: str) -> bool:
    """Whether the shell has all of a command: nothing open, no here-document without its end."""
    shell = ["/bin/bash", "-n"]
    # It only reads: `-n`.
    asked = subprocess.run(shell, input=text, capture_output=True, text=True, check=False)  # noqa: S603
    return not asked.stderr and not text.endswith("\\")


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page that name a language, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(text):
        marks = dict(mark.split("=", 1) for mark in fence["marks"].split())
        inner = re.sub(f"^{fence['indent']}", "", fence["text"], flags=re.MULTILINE)
        line = text.count("\n", 0, fence.start()) + 1
        found.append(Block(page, line, fence["language"], marks, inner))
    return found


def pages_to_type() -> list[Path]:
    """Pages that tell people what to type: README, tutorials, how-tos and the runbook."""
    home, *sections = read_map()
    chosen = (section[kind] for section in sections for kind in KINDS if kind in section)
    return [source_of(page) for page in chain([home], *map(pages_of, chosen))]


def pages_to_run() -> list[Path]:
    """Those of them with a block that a test runs."""
    return [
        page
        for page in pages_to_type()
        if any(block.is_shell and "needs" not in block.marks for block in blocks(page))
    ]


def not_run_page(notice: str) -> str:
    """List every block that no test runs as it is printed, by what it needs."""
    marked = [
        block
        for page in pages_to_type()
        for block in blocks(page)
        if block.is_shell and "needs" in block.marks
    ]
    lines = [
        *(notice, "# Commands that no test types", ""),
        "Every command of the README, the tutorials, the how-tos and the runbook is typed by",
        *("`make test-docs`, in order and as it is printed, but for these.", ""),
    ]
    for need, words in NEEDS.items():
        lines += [f"## `{need}`: {words}", "", *_listed(marked, need), ""]
    return "\n".join(lines)


def _listed(marked: list[Block], need: str) -> Iterator[str]:
    for block in marked:
        if block.marks["needs"] == need:
            first = block.commands()[0].text.splitlines()[0].removesuffix("\\").strip()
            title, _ = title_and_summary(block.page)
            up = "../" if block.page.is_relative_to(DOCS) else "../../"
            base = DOCS if up == "../" else ROOT
            place = up + block.page.relative_to(base).as_posix()
            yield f"- [{title}]({place}): `{first}`"
