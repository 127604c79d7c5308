"""What a command to evict requests says, without vLLM; `eviction_scheduler` does it."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_HOLD_S: Final = 3600.0
"""Longest hold, by judgement: longer than any client waits. Doubled, a request whose gateway has
died keeps its client waiting for twice as long."""

HOLD_S: Final = 30.0
"""Hold unless told otherwise, by judgement: an urgent request has had its answer, and most clients
wait. Doubled, a burst has memory for twice as long, and what was evicted is that much later."""

MAX_NAMED: Final = 1000
"""Requests of one command: more than run at once. Doubled, a step can wait twice as long."""


class EvictionRequest(BaseModel):
    """What is to be evicted: named requests, or so many.

    Attributes:
        request_ids: As clients know them (`X-Request-Id`, or the `id` of the answer), or vLLM.
        count: So many that run, the least urgent first, and of these the newest.
        hold_s: Seconds until they come back by themselves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    request_ids: list[str] | None = Field(default=None, min_length=1, max_length=MAX_NAMED)
    count: int | None = Field(default=None, ge=1, le=MAX_NAMED)
    hold_s: float = Field(default=HOLD_S, gt=0, le=MAX_HOLD_S)

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        if (self.request_ids is None) == (self.count is None):
            raise ValueError("give either request_ids or count")
        return self


def ids_of(name: str, ids: Collection[str]) -> list[str]:
    """Ids of a request that its client, or vLLM, knows by a name: several if it asked for several.

    The server writes the kind of request before it, and behind it a number for each prompt of a
    completion or each part of another. Several answers get a number before all that, and vLLM makes
    ids unique at their end. What else begins with the name is another's.
    """
    if name in ids:
        return [name]
    called = re.escape(name)
    pattern = re.compile(
        rf"(\d+_)?((?=cmpl-)(cmpl-)?{called}(-\d+)?|((chatcmpl|generate-tokens)-)?{called}(_\d+)?)"
        r"(-[0-9a-f]{8})?"
    )
    return [each for each in ids if pattern.fullmatch(each)]
