"""Prefixes that the tier keeps until they are unpinned, each by an id of its caller's.

A pin names a prefix by its tokens. Blocks of it that are in the tier are not given up for others
from then on; blocks that are not there yet are kept as soon as a request brings them. Pinned blocks
are moved like all others when a peer wants its memory back: to another peer, or to host memory.

Pins are bounded together, by a share of the tier, because what they keep is not there for requests
that are preempted. One that is over the bound is refused, and then nothing has changed. A block
that several pins name counts once.

Not promised: that a pinned block is there. One that turns out lost is computed again by the next
request that needs it, and kept again; so is all of it after the weights have changed. Pins end with
the engine.

Owned by the scheduler's thread.

Source: Aqua section 8, "a new prefill caching API with unique IDs".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from aqua_protocol.errors import (
    QuotaExceededError,
    RequestInvalidError,
    UnavailableError,
    UnknownResourceError,
)
from aqualib.engines.vllm.paging.block_table import BlockTable

MAX_TTL_S: Final = 30 * 86400.0
"""Longest life of a pin that has one, by judgement: a forgotten one ends within a month. Doubled,
it takes its memory for two."""


class PinRequest(BaseModel):
    """What is to be pinned.

    Attributes:
        id: The caller's name for it; a pin that has it already is replaced.
        prompt_token_ids: The prefix; what does not fill a block at its end is left out.
        cache_salt: As in the requests that share the prefix.
        ttl_s: Seconds until it is unpinned by itself; None leaves that to the caller.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")
    prompt_token_ids: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    ttl_s: float | None = Field(default=None, gt=0, le=MAX_TTL_S)


class Prefix(NamedTuple):
    """What a pin keeps.

    Attributes:
        tokens: So many, from the first, can be loaded once all of it is there.
        keys: Of its blocks.
    """

    tokens: int
    keys: Sequence[Hashable]


@dataclass(frozen=True, slots=True)
class _Pin:
    prefix: Prefix
    ends_s: float | None


class PrefixPinTable:
    """Pins blocks of a table.

    Args:
        table: Where blocks of the tier are found.
        share: Of the table's places that pins may take.
        read_prefix: Finds the keys of what is to be pinned.
        clock: Monotonic.
    """

    def __init__(
        self,
        table: BlockTable,
        share: float,
        read_prefix: Callable[[PinRequest], Prefix],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._table = table
        self._share = share
        self._read_prefix = read_prefix
        self._clock = clock
        self._pins: dict[str, _Pin] = {}
        self._has_pinned = False

    @property
    def limit_blocks(self) -> int:
        """Blocks that all pins may keep."""
        return int(self._share * self._table.capacity_blocks)

    def pin(self, request: PinRequest) -> dict[str, Any]:
        """Keep a prefix from now on; how it stands.

        Raises:
            RequestInvalidError: It does not fill a block.
            QuotaExceededError: Pins would keep more than they may.
            UnavailableError: The workers have not said yet how large the tier is.
        """
        table = self._table
        if not table.capacity_blocks:
            raise UnavailableError(
                "the engine has made no step yet, so its tier has no size",
                remedy="Try again in a moment.",
                retry_after_s=1.0,
            )
        prefix = self._read_prefix(request)
        if not prefix.keys:
            raise RequestInvalidError(
                f"{len(request.prompt_token_ids)} tokens do not fill a block",
                remedy="Pin a longer prefix.",
            )
        self.expire()
        earlier = self._pins.get(request.id)
        replaced = () if earlier is None else earlier.prefix.keys
        table.unpin(replaced)
        table.pin(prefix.keys)
        if table.pinned_count > self.limit_blocks:
            wanted = table.pinned_count
            table.unpin(prefix.keys)
            table.pin(replaced)
            raise QuotaExceededError(
                f"pins may keep {self.limit_blocks} of the tier's {table.capacity_blocks} blocks, "
                f"and would keep {wanted} with this one",
                remedy='Unpin others, pin a shorter prefix, or start with a larger "pinned_share".',
                limit_blocks=self.limit_blocks,
                wanted_blocks=wanted,
            )
        ends_s = None if request.ttl_s is None else self._clock() + request.ttl_s
        self._pins[request.id] = _Pin(prefix, ends_s)
        self._has_pinned = True
        return self._state(request.id)

    def unpin(self, name: str) -> None:
        """Let a prefix go, as any other that no request holds.

        Raises:
            UnknownResourceError: There is no such pin, or it has ended.
        """
        self.expire()
        pin = self._pins.pop(name, None)
        if pin is None:
            raise UnknownResourceError(
                f"no pin {name}", remedy="GET /aqua/pins lists those there are."
            )
        self._table.unpin(pin.prefix.keys)

    def expire(self) -> None:
        """Unpin what has lived its time."""
        if not self._pins:
            return
        now_s = self._clock()
        ended = [
            name
            for name, pin in self._pins.items()
            if pin.ends_s is not None and pin.ends_s <= now_s
        ]
        for name in ended:
            self._table.unpin(self._pins.pop(name).prefix.keys)

    def states(self) -> dict[str, Any]:
        """All pins, and what they take together."""
        self.expire()
        return {
            "pins": [self._state(name) for name in self._pins],
            "pinned_blocks": self._table.pinned_count,
            "limit_blocks": self.limit_blocks,
        }

    def levels(self) -> dict[str, float]:
        """Figures by the names of `operations.metrics`; none while nothing was ever pinned."""
        if not self._has_pinned:
            return {}
        return {"pinned_prefixes": len(self._pins), "pinned_blocks": self._table.pinned_count}

    def _state(self, name: str) -> dict[str, Any]:
        prefix, ends_s = self._pins[name].prefix, self._pins[name].ends_s
        return {
            "id": name,
            "tokens": prefix.tokens,
            "blocks": len(prefix.keys),
            "present_blocks": len(self._table.present(prefix.keys)),
            "ttl_s": None if ends_s is None else round(ends_s - self._clock(), 3),
        }
