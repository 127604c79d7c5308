"""Every thread and task of the product is supervised: nothing starts one by other means.

Refused wherever it stands, called or not, are the ways to a thread or a task that Python offers.
What remains is `aqua_protocol.supervision`, which counts, logs and restarts, and by which the tests
of running members find each loop.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

import pytest

from harness.source_tree import modules

HELPER: Final = "protocol/src/aqua_protocol/supervision.py"
REFUSED: Final = frozenset(
    {
        "Thread",
        "Timer",
        "ThreadPoolExecutor",
        "ProcessPoolExecutor",
        "TaskGroup",
        "create_task",
        "ensure_future",
        "run_coroutine_threadsafe",
        "run_in_executor",
        "start_new_thread",
        "start_soon",
    }
)


def starts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines on which a module names a way to start a thread or task, and which."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.alias(name=name):
                if name in REFUSED:
                    yield node.lineno, name


def test_no_module_starts_a_thread_or_task_by_itself() -> None:
    found = [
        f"{module.path}:{line}: {name}"
        for module in modules()
        if module.path != HELPER
        for line, name in starts(module.tree)
    ]
    assert not found


@pytest.mark.parametrize(
    "source",
    [
        "import threading\nthreading.Thread(target=print).start()",
        "from threading import Thread as Loop",
        "class Watcher(threading.Thread): ...",
        "import asyncio\nasyncio.create_task(watch())",
        "asyncio.get_running_loop().create_task(watch())",
        "from asyncio import ensure_future",
        "start = loop.run_in_executor",
        "with ThreadPoolExecutor() as pool: ...",
    ],
)
def test_each_way_around_the_helper_is_seen(source: str) -> None:
    assert list(starts(ast.parse(source)))
