"""What an engine's lending says to its ranks and hears from them.

Orders and answers are packets over a Unix socket. One order is under way to a rank at a time, and
each is answered with how the rank stands then, not with what has changed; so an answer that comes
late is as good as one in time. A rank also speaks of its own accord (`number` 0) when lent memory
is back.

The pace of consumers' copies rides on the step's plan instead, as the step's number does: it
matters while there are steps and at no other time, and a rank that is busy with an order hears it.
"""

from __future__ import annotations

import base64
import zlib
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import numpy as np
from pydantic import Field, TypeAdapter

from aqua_protocol.members import LoadReport
from aqua_protocol.wire import ByteCount, Wire
from aqualib.engines.vllm.lending.granules import GranuleMap
from aqualib.ranges import Range

if TYPE_CHECKING:
    from aqualib.engines.vllm.lending.granules import GranuleMask


PACE: Final = "aqua_pace"
"""The attribute of a scheduler's output that holds the `CopyRate` for ranks to tell, if any."""


class OrderKind(StrEnum):
    """What a rank is told to do."""

    OPEN = "open"
    """Become a member of the books, and say how the cache lies in memory."""
    RELEASE = "release"
    RESTORE = "restore"
    OFFER = "offer"
    """Make slabs of what has been given up."""
    RECLAIM = "reclaim"
    BORROW = "borrow"
    """Borrow from now on, or give back what is borrowed and stop."""
    LOOK = "look"
    """Say how you stand."""
    CLOSE = "close"


class RankOrder(Wire):
    """An order to one rank.

    Attributes:
        number: From 1 on, one higher each time.
        granules: To release or restore, packed.
        after_step: Nothing is released before this step has ended on the rank.
        nbytes: What has been given up, to offer; or what to take back.
        load: The engine's.
        may_borrow: Whether to borrow.
        producer_id: The rank's name in the books.
        model: What runs there, for people.
    """

    number: int = Field(ge=1)
    kind: OrderKind
    granules: str = ""
    after_step: int = Field(default=0, ge=0)
    nbytes: ByteCount = 0
    load: LoadReport | None = None
    may_borrow: bool = True
    producer_id: str = ""
    model: str | None = None


class RankLayout(Wire):
    """Where a rank's blocks lie: what a `GranuleMap` is made of, and its slabs."""

    regions: list[tuple[int, int]]
    rows: list[tuple[int, int]]
    block_count: int
    granule_bytes: int
    slab_bytes: int
    device: str
    node: str
    gpu_uuid: str

    def granule_map(self) -> GranuleMap:
        """The same map as the rank's own."""
        return GranuleMap(
            [Range(*each) for each in self.regions],
            [Range(*each) for each in self.rows],
            block_count=self.block_count,
            granule_bytes=self.granule_bytes,
        )


class RankFigures(Wire):
    """How a rank's producer stands.

    Attributes:
        lasting_bytes: Offered, once open reclaims are done and lost slabs replaced.
        returning_bytes: What open reclaims have still to find.
        open_reclaims: Numbers of the orders whose memory is not all back.
        is_borrowing: The rank holds memory of others, or asks for some.
    """

    committed_bytes: ByteCount = 0
    lasting_bytes: ByteCount = 0
    returning_bytes: ByteCount = 0
    leased_bytes: ByteCount = 0
    quarantined_bytes: ByteCount = 0
    open_reclaims: list[int] = Field(default_factory=list)
    is_borrowing: bool = False
    is_coordinated: bool = False


class RankAnswer(Wire):
    """How a rank stands after an order.

    Attributes:
        number: The order's; 0 of its own accord.
        error: Why the order was not carried out.
        absent: Granules without memory, packed.
        is_leaving: The worker ends, as it should.
    """

    number: int = Field(ge=0)
    error: str = ""
    absent: str = ""
    figures: RankFigures = RankFigures()
    layout: RankLayout | None = None
    is_leaving: bool = False


ORDERS: Final[TypeAdapter[RankOrder]] = TypeAdapter(RankOrder)
ANSWERS: Final[TypeAdapter[RankAnswer]] = TypeAdapter(RankAnswer)


def packed(granules: GranuleMask) -> str:
    """A mask as text: a bit each, of runs next to nothing, and 44 KB of 262,144 at the worst."""
    return base64.b64encode(zlib.compress(np.packbits(granules).tobytes(), 1)).decode()


def unpacked(text: str, count: int) -> GranuleMask:
    """The mask of `count` granules.

    Raises:
        ValueError: It is not one.
    """
    raw = zlib.decompress(base64.b64decode(text, validate=True)) if text else b""
    bits = np.frombuffer(raw, np.uint8)
    if len(bits) != -(-count // 8):
        raise ValueError(f"a mask of {count} granules has {len(bits)} bytes")
    return np.unpackbits(bits, count=count).astype(np.bool_)
