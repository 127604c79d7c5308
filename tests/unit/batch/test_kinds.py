"""Kinds of requests: what they ask for beside the prompt, and how long the prompt is."""

from __future__ import annotations

from typing import Any

from aqua_batch.kinds import KindTable


def kinds_of(*requests: tuple[dict[str, Any], int]) -> list[list[int]]:
    table = KindTable()
    for body, size in requests:
        table.add(body, size)
    return [kind.tolist() for kind in table.kinds()]


def test_requests_are_alike_in_task_and_size_then_in_either() -> None:
    one, other = {"model": "m", "max_tokens": 4}, {"model": "m", "max_tokens": 400}
    assert kinds_of((one, 100), (one, 1000), (other, 100), (one, 120)) == [
        [0, 1, 2, 0],
        [0, 0, 1, 0],
        [0, 1, 0, 0],
    ]


def test_a_task_is_neither_the_prompt_nor_who_asks() -> None:
    asked = {"model": "m", "messages": [], "seed": 1, "user": "a", "metadata": {"run": "1"}}
    again = {"messages": [1], "model": "m", "seed": 2, "user": "b"}
    tools = {**again, "tools": [{"type": "function"}]}
    assert kinds_of((asked, 9), (again, 9), (tools, 9))[0] == [0, 0, 1]
