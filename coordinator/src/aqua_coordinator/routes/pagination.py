"""How listings are cut into pages."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import Query

from aqua_protocol.ids import MAX_EPOCH, Name

MAX_PAGE: Final = 1000
"""Entries, chosen by hand: some 300 KiB. Doubled, a page keeps other callers waiting longer."""

NameCursor = Annotated[
    Name | None, Query(description="`next_cursor` of the page before; names in ascending order.")
]
PositionCursor = Annotated[
    int | None,
    Query(ge=0, le=MAX_EPOCH, description="`next_cursor` of the page before; oldest first."),
]
Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="Entries on a page, at most.")]


def next_name(names: list[str], limit: int) -> str | None:
    """The cursor after a page of names; a short page is the last."""
    return names[-1] if len(names) == limit else None
