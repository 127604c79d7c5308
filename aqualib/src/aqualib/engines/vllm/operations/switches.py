"""Which of Aqua's features an engine uses now: each can be turned off and on while it serves.

Off is what vLLM does by itself, from the next step on, and nothing is lost by it:

- `slicing` off: no request gives way to another at a slice's end, and requests are admitted in
  order of arrival. Those that were preempted before come back like all that wait.
- `paging` off: what is preempted from now on is computed again, and prefixes are neither kept nor
  looked up. Requests that were preempted before get their KV back by a load. Blocks that no
  request needs are dropped, so the store's memory comes free.
- `lending` off: what is lent is taken back, block by block as consumers let go, and no more is
  offered.

Owned by the scheduler's thread, which is told between two steps.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from aqua_protocol import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


class Feature(StrEnum):
    """What can be turned off and on."""

    SLICING = "slicing"
    PAGING = "paging"
    LENDING = "lending"


class SwitchState(BaseModel):
    """On, off, or, where None, not there; in a change, None leaves a switch as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    slicing: bool | None = None
    paging: bool | None = None
    lending: bool | None = None


class Switches:
    """An engine's switches: those of the features that it was started with, all on at first.

    Attributes:
        has_changed: Since the last step; figures leave an engine with a step, so an idle one makes
            one more.
    """

    def __init__(self) -> None:
        self._turn: dict[Feature, Callable[[bool], None]] = {}
        self._is_on: dict[Feature, bool] = {}
        self.has_changed = False

    def add(self, feature: Feature, turn: Callable[[bool], None]) -> None:
        """Have a switch, by which `turn` is told of each change."""
        self._turn[feature] = turn
        self._is_on[feature] = True

    def is_on(self, feature: Feature) -> bool:
        """Whether the engine does this now."""
        return self._is_on.get(feature, False)

    def change(self, change: SwitchState) -> None:
        """Turn what is named; all of it or nothing.

        Raises:
            ConfigError: The engine was started without one of them.
        """
        wanted = {Feature(name): on for name, on in change if on is not None}
        missing = wanted.keys() - self._turn.keys()
        if missing:
            raise ConfigError(
                f"this engine was started without {', '.join(sorted(missing))}",
                remedy=f"It has: {', '.join(self._turn) or 'nothing to switch'}.",
            )
        for feature, on in wanted.items():
            if self._is_on[feature] != on:
                self._is_on[feature] = on
                self.has_changed = True
                self._turn[feature](on)

    def states(self) -> SwitchState:
        """How they all stand."""
        return SwitchState(**{feature.value: on for feature, on in self._is_on.items()})

    def levels(self) -> dict[str, float]:
        """The same by the names of `operations.metrics`."""
        return {f"{feature}_on": float(on) for feature, on in self._is_on.items()}
