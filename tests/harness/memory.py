"""Slab memory for tests: some that holds no bytes, some whose making is counted and may fail."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aqua_protocol import TransportError
from aqualib.memory.copy_pace import CopyPace
from aqualib.transports.base import Handle, OwnedSlab
from aqualib.transports.memfd import MemfdTransport

if TYPE_CHECKING:
    import torch

    from aqualib.memory.frame import PeerSlab


class PaperSlab(OwnedSlab):
    """An `OwnedSlab` without bytes.

    Args:
        nbytes: What it claims to have.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._is_closed = False

    @property
    def tensor(self) -> torch.Tensor:
        """There is none."""
        raise NotImplementedError

    @property
    def is_closed(self) -> bool:
        """Whether it was closed."""
        return self._is_closed

    def export(self) -> Handle:
        """A handle that leads nowhere."""
        return Handle(payload=b"", fd=None)

    def close(self) -> None:
        """Note that it was closed; closing twice is a mistake of whoever owns it."""
        assert not self._is_closed, "closed twice"
        self._is_closed = True


class CountedMemory(MemfdTransport):
    """Host memory that counts the slabs it made, and can run short."""

    def __init__(self) -> None:
        self.made_count = 0
        self.refusals_left = 0

    def create(self, nbytes: int) -> OwnedSlab:
        """A slab, unless refusals are left."""
        if self.refusals_left:
            self.refusals_left -= 1
            raise TransportError("out of memory")
        slab = super().create(nbytes)
        self.made_count += 1
        return slab


@dataclass(eq=False)
class PaperLender:
    """A lender that hears nothing."""

    producer_id: str = "producer"
    is_reclaiming: bool = False
    pace: CopyPace = field(default_factory=CopyPace)

    def take_back(self, slab: PeerSlab) -> None:
        raise NotImplementedError

    def strand(self, slab: PeerSlab) -> None:
        raise NotImplementedError
