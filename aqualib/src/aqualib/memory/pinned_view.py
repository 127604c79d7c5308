"""A view of pinned bytes whose death can be seen.

All tensors over a slab share one storage, so torch's reference count cannot tell who still looks at
one tensor's bytes. A view is a storage of its own over a part of the slab: when everything made
from it is gone, its count says so, and the pin that it stands for may end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from aqualib.transports.base import MappedSlab

if TYPE_CHECKING:
    from aqualib.ranges import Range


class PinnedView(MappedSlab):
    """Bytes of a pinned slab; `close` ends it, or raises `BufferError` while somebody looks.

    Args:
        memory: The slab, which stays mapped for as long as the view is open.
        run: Which bytes of it.
    """

    def __init__(self, memory: MappedSlab, run: Range) -> None:
        whole = memory.tensor
        super().__init__(whole.data_ptr() + run.start, run.size, whole.device)

    def _let_go(self) -> None:
        """The memory belongs to the slab."""


def still_alive(views: Iterable[PinnedView]) -> list[PinnedView]:
    """Those that somebody still looks at; the others are closed."""
    alive = []
    for view in views:
        try:
            view.close()
        except BufferError:
            alive.append(view)
    return alive
