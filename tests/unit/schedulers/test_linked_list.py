"""Doubly linked lists for compiled code: order, removal from the middle, several lists."""

from __future__ import annotations

from typing import Any

from aqua_schedulers.linked_list import Links, append, empty_lists, prepend, remove


def items(links: Links, sentinel: int) -> list[int]:
    """The items of one list, and that they say the same backwards."""
    found, backwards = _walk(links, sentinel, "after"), _walk(links, sentinel, "before")
    assert backwards == found[::-1]
    return found


def _walk(links: Any, sentinel: int, side: str) -> list[int]:  # noqa: ANN401 - a structured array
    found: list[int] = []
    item = links[sentinel][side]
    while item != sentinel:
        found.append(int(item))
        item = links[item][side]
    return found


def test_items_come_out_in_order_and_leave_from_anywhere() -> None:
    links = empty_lists(5)
    assert items(links, 5) == []
    for item in (3, 1, 4):
        append(links, 5, item)
    prepend(links, 5, 0)
    assert items(links, 5) == [0, 3, 1, 4]
    for item in (1, 0, 4):
        remove(links, item)
    assert items(links, 5) == [3]
    remove(links, 3)
    append(links, 5, 3)
    assert items(links, 5) == [3]


def test_lists_beside_each_other_do_not_touch() -> None:
    links = empty_lists(4, list_count=2)
    append(links, 4, 0)
    append(links, 5, 1)
    prepend(links, 5, 2)
    assert items(links, 4) == [0]
    assert items(links, 5) == [2, 1]
    remove(links, 2)
    append(links, 4, 2)
    assert items(links, 4) == [0, 2]
    assert items(links, 5) == [1]
