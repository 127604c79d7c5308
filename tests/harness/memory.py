"""Slab memory for tests of decisions: counts what is open, and holds no bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aqualib.transports.base import Handle, OwnedSlab

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
        self.closed = False

    @property
    def tensor(self) -> torch.Tensor:
        """There is none."""
        raise NotImplementedError

    def export(self) -> Handle:
        """A handle that leads nowhere."""
        return Handle(payload=b"", fd=None)

    def close(self) -> None:
        """Note that it was closed; closing twice is a mistake of whoever owns it."""
        assert not self.closed, "closed twice"
        self.closed = True


class PaperLender:
    """A lender that hears nothing."""

    producer_id = "producer"
    is_reclaiming = False

    def take_back(self, slab: PeerSlab) -> None:
        raise NotImplementedError

    def strand(self, slab: PeerSlab) -> None:
        raise NotImplementedError
