"""Doubly linked lists of items by number, for compiled code: queues that lose items in the middle.

Items and the ends of lists live in one array: items have the numbers from 0, behind them comes one
*sentinel* for each list, which is its own neighbour while the list is empty. So no operation asks
whether an item is the first or the last. An item is in one list at most, and its owner
knows in which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from aqua_schedulers.compiled import compiled


@dataclass(slots=True)
class Neighbours:
    """Neighbours of an item or a sentinel."""

    before: int
    after: int


Links = Sequence[Neighbours]
"""As numba takes it: a structured array of 32-bit neighbours, shape (num_items + num_lists,)."""


def empty_lists(item_count: int, list_count: int = 1) -> Links:
    """Lists without items; the sentinel of list k is `item_count + k`."""
    links = np.empty(item_count + list_count, np.dtype([("before", np.int32), ("after", np.int32)]))
    links["before"] = links["after"] = np.arange(item_count + list_count)
    return cast("Links", links)


@compiled
def append(links: Links, sentinel: int, item: int) -> None:
    """Put an item at the end of a list."""
    last = links[sentinel].before
    links[item].before = last
    links[item].after = sentinel
    links[last].after = item
    links[sentinel].before = item


@compiled
def prepend(links: Links, sentinel: int, item: int) -> None:
    """Put an item at the front of a list."""
    append(links, links[sentinel].after, item)


@compiled
def remove(links: Links, item: int) -> None:
    """Take an item out of its list."""
    before, after = links[item].before, links[item].after
    links[before].after = after
    links[after].before = before
