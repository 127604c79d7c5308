"""The sources of a vLLM, looked at without importing it: a folder, or a wheel as it was downloaded.

Importing vLLM takes torch and seconds, and a build for GPUs cannot be imported on every machine.
Its syntax trees say which names a class has: those it defines, those that any of its methods sets
on `self`, and all of its bases, followed through imports. What is set from outside is not seen.

A fingerprint is of a function's own words: comments, its docstring and blank lines do not count.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import tokenize
import zipfile
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Final, NamedTuple

FINGERPRINT_DIGITS: Final = 12
"""Hexadecimal digits of a fingerprint: two functions that differ agree once in 2^48. Doubled, the
contracts are longer, and no surer."""

FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


class SourceClass(NamedTuple):
    """A class or function of vLLM, in the module that defines it."""

    module: str
    node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class VllmSource:
    """The sources under `place`: a folder that holds `vllm`, or a wheel."""

    def __init__(self, place: Path) -> None:
        self._place: Final = place
        self._wheel = zipfile.ZipFile(place) if place.is_file() else None
        self._tree = cache(self._read_tree)
        self._lines = cache(self._read_lines)

    def text(self, path: str) -> str | None:
        """A file's text; None if there is none."""
        try:
            if self._wheel is not None:
                return self._wheel.read(path).decode()
            return (self._place / path).read_text(encoding="utf-8")
        except (FileNotFoundError, KeyError):
            return None

    def version(self) -> str:
        """The version that the sources say they are; empty if they do not."""
        found = re.search(
            r"^(?:__version__ = version|version) = ['\"](.+)['\"]",
            self.text("vllm/_version.py") or "",
            flags=re.MULTILINE,
        )
        return "" if found is None else found.group(1)

    def find(self, module: str, name: str) -> SourceClass | None:
        """A class or function by its name in a module, which may have imported it."""
        tree = self._tree(module)
        # Most are at the top, and a walk looks at all that is below them on its way.
        for node in [] if tree is None else chain(tree.body, ast.walk(tree)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
                return SourceClass(module, node)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                for alias in node.names:
                    if name == (alias.asname or alias.name):
                        return self.find(node.module or "", alias.name)
        return None

    def members(self, found: SourceClass) -> dict[str, tuple[str, ast.AST]]:
        """Every attribute of a class and of its bases: name to where it stands and its node."""
        assert isinstance(found.node, ast.ClassDef), found
        seen: dict[str, tuple[str, ast.AST]] = {}
        for node in found.node.body:
            for name in _names(node):
                seen.setdefault(name, (found.module, node))
        for each in ast.walk(found.node):
            if not isinstance(each, ast.Attribute) or not isinstance(each.ctx, ast.Store):
                continue
            if isinstance(each.value, ast.Name) and each.value.id == "self":
                seen.setdefault(each.attr, (found.module, each))
        for base in found.node.bases:
            name = ast.unparse(base).partition("[")[0]  # Of a generic base, too.
            more = self.find(found.module, name)
            if more is not None and isinstance(more.node, ast.ClassDef):
                seen = self.members(more) | seen
        return seen

    def fingerprint(self, module: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
        """The fingerprint of a function."""
        segment = "\n".join(self._lines(module)[node.lineno - 1 : node.end_lineno])
        bare = _bare(segment[node.col_offset :])
        return hashlib.sha256(bare.encode()).hexdigest()[:FINGERPRINT_DIGITS]

    def _read_tree(self, module: str) -> ast.Module | None:
        lines = self._lines(module)
        return ast.parse("\n".join(lines)) if lines else None

    def _read_lines(self, module: str) -> list[str]:
        text = self.text(_path(module)) or self.text(_path(f"{module}.__init__"))
        return [] if text is None else text.split("\n")


def is_abstract(node: ast.AST) -> bool:
    """Whether a method has to be implemented."""
    return isinstance(node, FUNCTIONS) and any(
        ast.unparse(each).endswith("abstractmethod") for each in node.decorator_list
    )


def _path(module: str) -> str:
    return f"{module.replace('.', '/')}.py"


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, FUNCTIONS):
        return [node.name]
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return [each.id for each in targets if isinstance(each, ast.Name)]


def _bare(segment: str) -> str:
    """A function's text without comments, docstring, blank lines and spaces at the ends."""
    lines = segment.splitlines()
    function = ast.parse(segment).body[0]
    assert isinstance(function, FUNCTIONS), segment
    for token in tokenize.generate_tokens(io.StringIO(segment).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    if ast.get_docstring(function) is not None:
        doc = function.body[0]
        for row in range(doc.lineno, (doc.end_lineno or doc.lineno) + 1):
            lines[row - 1] = ""
    return "\n".join(line.strip() for line in lines if line.strip())
