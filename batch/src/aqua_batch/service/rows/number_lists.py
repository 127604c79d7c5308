"""Lists of numbers in a statement: one parameter, however many they are.

A parameter for each would make a statement anew for each length of the list, and SQLite takes
32,766 of them at most.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from sqlalchemy import (
    ARRAY,
    CTE,
    ColumnElement,
    Connection,
    Integer,
    any_,
    cast,
    func,
    select,
)


def is_among(
    connection: Connection, column: ColumnElement[int], numbers: Sequence[int]
) -> ColumnElement[bool]:
    """The condition that a column has one of these numbers."""
    if connection.dialect.name == "sqlite":
        each = func.json_each(json.dumps(numbers)).table_valued("value")
        return column.in_(select(each.c.value))
    return column == any_(cast(list(numbers), ARRAY(Integer)))


def numbered(connection: Connection, lines: Sequence[int]) -> CTE:
    """Lines as a table, with their places from 0 on."""
    if connection.dialect.name == "sqlite":
        each = func.json_each(json.dumps(list(lines))).table_valued("value", "key")
        query = select(each.c.value.label("line"), each.c.key.label("place"))
    else:
        array = cast(list(lines), ARRAY(Integer))
        each = func.unnest(array).table_valued("value", with_ordinality="number").render_derived()
        query = select(each.c.value.label("line"), cast(each.c.number - 1, Integer).label("place"))
    # SQLite would read the array anew for each request that waits.
    return query.cte("numbered").prefix_with("MATERIALIZED")
