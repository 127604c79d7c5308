"""What a consumer stores with a producer that lends, and where it is."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from aqualib.consumer import Aqua
from aqualib.producer.producer import Producer
from aqualib.tensor import AquaTensor, Location
from harness.bounds import until
from harness.consumers import grant
from harness.producers import SLAB
from harness.raw_consumer import TokenIssuer

COUNT = 8
"""Slabs that a producer of these tests lends."""


def lend(aqua: Aqua, issuer: TokenIssuer, producer: Producer, count: int = COUNT) -> None:
    aqua.attach(grant(issuer, producer.endpoint, count))


def values(count: int = COUNT, nbytes: int = SLAB, seed: int = 1) -> list[torch.Tensor]:
    order = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=order) for _ in range(count)
    ]


def fill(aqua: Aqua, count: int = COUNT) -> list[tuple[AquaTensor, torch.Tensor]]:
    """Store values of a slab each, other ones at each call: what holds them, and they."""
    stored = [torch.randint(0, 256, (SLAB,), dtype=torch.uint8) for _ in range(count)]
    return [(aqua.offload(value), value) for value in stored]


def require_intact(pairs: Iterable[tuple[AquaTensor, torch.Tensor]]) -> None:
    for tensor, value in pairs:
        assert torch.equal(tensor.load(), value), tensor


def await_progress(rounds: list[int]) -> None:
    """Wait until every counter has gone up."""
    seen = list(rounds)
    until(lambda: all(map(int.__gt__, rounds, seen)), "every thread pages")


def locations(tensors: list[AquaTensor]) -> list[Location]:
    return [tensor.location for tensor in tensors]
