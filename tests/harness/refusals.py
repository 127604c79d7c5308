"""A method that works some times and fails then, for what must survive a failure half-way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aqua_protocol import TransportError

if TYPE_CHECKING:
    import pytest


def refuse_after(patch: pytest.MonkeyPatch, kind: type, name: str, count: int) -> None:
    """Have a method of a class raise `TransportError` from its call number `count` on."""
    method = getattr(kind, name)
    left = count

    def refusing(*args: Any) -> Any:  # noqa: ANN401 - the method's own
        nonlocal left
        if not left:
            raise TransportError("refused")
        left -= 1
        return method(*args)

    patch.setattr(kind, name, refusing)
