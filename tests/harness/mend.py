"""A mend of the product, which a test takes back to see that something needs it."""

from __future__ import annotations

import contextlib
import inspect
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Mend:
    """A mend, by what it took away.

    Attributes:
        without: What the product does without it.
        scenario: What then goes wrong, by some seed.
        patches: An owner, a name, and what was there before.
        defect: Its number in the review; None for what was found later.
        is_met_by_walks: Whether a random walk (`gpu_walk`) meets it within its first operations.
    """

    without: str
    scenario: Callable[[int], None]
    patches: tuple[tuple[Any, str, Any], ...]
    defect: int | None = None
    is_met_by_walks: bool = False

    @contextlib.contextmanager
    def taken_back(self) -> Iterator[None]:
        """The product without the mend."""
        with contextlib.ExitStack() as stack:
            for owner, name, thing in self.patches:
                assert hasattr(owner, name), f"{owner} has no {name} any more"
                stack.enter_context(mock.patch.object(owner, name, thing))
            yield


def changed(owner: Any, name: str, old: str, new: str) -> tuple[Any, str, Any]:  # noqa: ANN401
    """A patch that puts back a stretch of a function's text as it was before a mend."""
    plain = inspect.unwrap(getattr(owner, name))
    text = textwrap.dedent(inspect.getsource(plain))
    assert text.count(old) == 1, f"{plain.__qualname__} has {text.count(old)} times {old!r}"
    future = "from __future__ import annotations\n"
    found: dict[str, Any] = {}
    code = compile(future + text.replace(old, new), inspect.getfile(plain), "exec")
    exec(code, plain.__globals__, found)  # noqa: S102 - the product's own text
    return owner, name, found[name]
