"""The repository's own source, parsed: what the tests of its habits read.

Owns: where the packages are, and each module's classes, docstrings and constants as the syntax
tree has them. Nothing is imported, so a habit can be checked without a GPU or an engine.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Module:
    """One source file: its path below the root, its text, and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def package(self) -> str:
        """The import name of the distribution, such as `aqua_placer`."""
        return self.path.split("/")[2]

    @property
    def name(self) -> str:
        """The module's own name, or its folder's for an `__init__`."""
        path = Path(self.path)
        return path.parent.name if path.stem == "__init__" else path.stem

    def public_classes(self) -> Iterator[ast.ClassDef]:
        """Yield the classes at module level whose names do not begin with an underscore."""
        for node in self.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node

    def public_docstrings(self) -> Iterator[tuple[str, str]]:
        """Yield (name, docstring) of the module, its public classes, functions and methods."""
        if text := ast.get_docstring(self.tree):
            yield self.name, text
        stack: list[tuple[str, ast.AST]] = [("", self.tree)]
        while stack:
            prefix, parent = stack.pop()
            for node in ast.iter_child_nodes(parent):
                if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                if node.name.startswith("_"):
                    continue
                name = f"{prefix}{node.name}"
                if text := ast.get_docstring(node):
                    yield name, text
                if isinstance(node, ast.ClassDef):
                    stack.append((f"{name}.", node))


@dataclass(frozen=True)
class Constant:
    """A number at module level, with the words that stand by it."""

    module: str
    line: int
    name: str
    words: str


@cache
def modules() -> tuple[Module, ...]:
    """Parse every module of every distribution, in the order of their paths."""
    return tuple(
        Module(
            str(path.relative_to(ROOT)), text := path.read_text(encoding="utf-8"), ast.parse(text)
        )
        for path in sorted(ROOT.glob("*/src/**/*.py"))
    )


def constants(module: Module) -> Iterator[Constant]:
    """Yield the numeric constants of a module, each with the comment or docstring it has.

    A comment counts for all constants that follow it without a blank line.
    """
    lines = module.text.splitlines()
    body = module.tree.body
    for node, after in zip(body, [*body[1:], None], strict=True):
        match node:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                pass
            case _:
                continue
        if not _is_number(value):
            continue
        words = [lines[node.lineno - 1].partition("#")[2]]
        index = node.lineno - 2
        while index >= 0 and lines[index].strip():
            if lines[index].startswith("#"):
                words.append(lines[index])
            index -= 1
        match after:
            case ast.Expr(value=ast.Constant(value=str(text))):
                words.append(text)
        yield Constant(module.path, node.lineno, name, " ".join(words))


def _is_number(node: ast.expr) -> bool:
    match node:
        case ast.Constant(value=value):
            return isinstance(value, int | float) and not isinstance(value, bool)
        case ast.UnaryOp(operand=operand):
            return _is_number(operand)
        case ast.Name(id=name):
            return name.isupper()  # another constant, such as MIB
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
    return False
