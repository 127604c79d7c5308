"""Tests read public behaviour: they do not reach into private fields of our objects.

Where a test needs one, the interface lacks something. Those that still do are listed in `REACHES`
with their number, and the list only shrinks: one more fails, and so does one less until its entry
is lowered. A new entry is a review's business, not this test's.

Private are names with one leading underscore. Not counted: a test's own classes, what belongs to
others (`sys._current_frames`), and the methods that named tuples have to spell so.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[3]
TESTS: Final = ROOT / "tests"
OURS: Final = ("aqua", "harness")
NAMED_TUPLE: Final = frozenset({"_replace", "_asdict", "_fields", "_make"})
BY_NAME: Final = frozenset({"setattr", "getattr", "delattr", "object"})
"""Functions and methods (`monkeypatch.setattr`, `patch.object`) that take a field's name."""

REACHES: Final[dict[str, int]] = {
    "engine/aqualib/test_vllm_lending.py": 1,
    "engine/batch/test_vllm.py": 1,
    "harness/consumers.py": 2,
    "harness/cuda/library.py": 1,  # What ctypes' `byref` refers to.
    "harness/cuda/torch_side.py": 2,  # torch's: what a function of its own reads and writes.
    "harness/cuda/torch_tensors.py": 1,  # torch's: a subclass over the same memory.
    "harness/vllm_program.py": 1,
    "integration/aqualib/test_leasing_reclaims.py": 3,
    "integration/demo/test_processes.py": 2,
    "property/aqualib/test_memory_machine.py": 1,
    "unit/aqualib/test_aqua_cache_generation.py": 4,
    "unit/aqualib/test_memfd.py": 2,
    "unit/aqualib/test_transport_selection.py": 1,
}


def is_private(name: str) -> bool:
    """Whether a name says that others keep off."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def reaches(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines on which a module reaches into something private, and what."""
    nodes = list(ast.walk(tree))
    foreign = {"self", "cls"}.union(*(_foreign(node) for node in nodes))
    own = {name for node in nodes if isinstance(node, ast.ClassDef) for name in _fields(node)}
    for node in nodes:
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith(OURS):
                yield from ((node.lineno, each.name) for each in names if is_private(each.name))
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in foreign or (
                attr in own
            ):
                pass
            case ast.Attribute(attr=attr) if is_private(attr) and attr not in NAMED_TUPLE:
                yield node.lineno, ast.unparse(node)
            case ast.Call(func=called, args=[_, ast.Constant(value=str(word)), *_]) if (
                is_private(word) and _function(called) in BY_NAME
            ):
                yield node.lineno, ast.unparse(node)


def _foreign(node: ast.AST) -> set[str]:
    """Names that an import binds to modules of others."""
    if not isinstance(node, ast.Import):
        return set()
    names = {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return {name for name in names if not name.startswith(OURS)}


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Names that a class of the test itself sets on its objects, or defines."""
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
            yield part.name
        elif isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store):
            yield part.attr
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            yield part.target.id


def _function(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


@cache
def found() -> dict[str, list[tuple[int, str]]]:
    """All that reach, by file."""
    by_file = {
        path.relative_to(TESTS).as_posix(): sorted(reaches(ast.parse(path.read_text())))
        for path in TESTS.rglob("*.py")
    }
    return {name: lines for name, lines in sorted(by_file.items()) if lines}


def test_no_test_reaches_into_private_fields_but_those_listed() -> None:
    lines = found()
    grown = [
        f"{name}:{number}: {what}"
        for name, reached in lines.items()
        if len(reached) > REACHES.get(name, 0)
        for number, what in reached
    ]
    assert not grown, "use public behaviour, or give the interface what it lacks:\n" + "\n".join(
        grown
    )


def test_the_list_of_those_that_reach_is_not_longer_than_they_are() -> None:
    lines = found()
    shrunk = {name: len(lines.get(name, [])) for name in REACHES}
    assert shrunk == REACHES, "lower the numbers in REACHES: the list only shrinks"


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("store.aqua._books", 1),
        ("from aqualib.memory import _hidden", 1),
        ("monkeypatch.setattr(store, '_clock', 1)", 1),
        ("import sys\nsys._current_frames()", 0),
        ("pair._replace(x=1)", 0),
        ("class A:\n    def __init__(self, other: A):\n        self._x = other._x", 0),
        ("aqua.__class__", 0),
    ],
)
def test_a_planted_reach_is_found(text: str, count: int) -> None:
    assert len(list(reaches(ast.parse(text)))) == count
