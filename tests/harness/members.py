"""What members of a test cluster do when told: a producer that lends, a consumer that remembers.

The consumer knows what every one of its tensors must hold, by seed, and compares all bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from aqua_protocol import TransportKind
from aqualib.consumer import Aqua
from aqualib.leasing import demand
from aqualib.producer.producer import Producer
from aqualib.reporter import Identity
from aqualib.tensor import AquaTensor, Location
from aqualib.transports import select
from harness.cluster import HEARTBEAT_S, SLAB
from harness.patience import patient_client

HOST_SLABS: Final = 32
TENSOR_BYTES: Final = 3 * SLAB // 5
"""So that tensors neither fill frames nor share them evenly."""

# A consumer waits after a reclaim so as not to thrash; a suite of hundreds cannot.
demand.CALM_S = 0.02  # type: ignore[misc] # faster than real
demand.MAX_CALM_S = 0.05  # type: ignore[misc] # as above
demand.FIRST_PAUSE_S = 0.02  # type: ignore[misc] # as above
demand.MAX_PAUSE_S = 0.1  # type: ignore[misc] # as above


def _identity(name: str) -> Identity:
    return Identity(node="node", domain="domain", gpu_uuid=f"GPU-{name}")


class ProducerMember:
    """Lends when told."""

    def __init__(self, url: str, endpoint: Path, name: str) -> None:
        self._producer = Producer(
            name,
            transport=select(TransportKind.MEMFD),
            link=patient_client(url),
            endpoint=endpoint,
            identity=_identity(name),
            slab_bytes=SLAB,
            heartbeat_s=HEARTBEAT_S,
        )

    def offer(self, slab_count: int) -> None:
        """Offer that many slabs in all."""
        self._producer.offer(slab_count * SLAB)

    def reclaim(self, slab_count: int, deadline_s: float, wait_s: float) -> dict[str, Any]:
        """Take slabs out of the offer; says how far it got within `wait_s`."""
        reclaim = self._producer.reclaim(slab_count * SLAB, deadline_s)
        is_done = reclaim.wait(wait_s)
        return {
            "done": is_done,
            "returned": reclaim.returned_bytes // SLAB,
            "escalated": reclaim.escalated,
        }

    def state(self) -> dict[str, int]:
        """Slabs by what the producer says of them, after an audit of its pool."""
        producer = self._producer
        producer.audit()
        return {
            "offered": producer.offered_bytes // SLAB,
            "free": producer.free_bytes // SLAB,
            "held": (producer.leased_bytes + producer.quarantined_bytes) // SLAB,
            "quarantined": producer.quarantined_bytes // SLAB,
        }

    def close(self) -> None:
        """Leave."""
        self._producer.close(deadline_s=1.0)


class ConsumerMember:
    """Stores tensors of known content, and compares."""

    def __init__(self, url: str, name: str) -> None:
        self._aqua = Aqua(
            name,
            transport=select(TransportKind.MEMFD),
            link=patient_client(url),
            identity=_identity(name),
            host_bytes=HOST_SLABS * SLAB,
            slab_bytes=SLAB,
            heartbeat_s=HEARTBEAT_S,
        )
        self._tensors: list[tuple[AquaTensor, int]] = []

    def fill(self, count: int, seed: int) -> None:
        """Store `count` more tensors."""
        for number in range(seed, seed + count):
            self._tensors.append((self._aqua.offload(_content(number)), number))

    def rewrite(self, seed: int) -> None:
        """Store other content in every tensor."""
        for i, (tensor, _) in enumerate(self._tensors):
            tensor.store(_content(seed + i))
            self._tensors[i] = (tensor, seed + i)

    def release(self, count: int) -> None:
        """Drop the first tensors."""
        for tensor, _ in self._tensors[:count]:
            tensor.release()
        del self._tensors[:count]

    def verify(self) -> int:
        """Compare every byte; returns how many tensors there are."""
        for tensor, number in self._tensors:
            assert torch.equal(tensor.load(), _content(number)), f"{tensor!r} holds wrong bytes"
        return len(self._tensors)

    def corrupt(self) -> None:
        """Change one bit of what is stored, as no part of Aqua ever should."""
        tensor, _ = self._tensors[0]
        with tensor.pinned() as values:
            values[len(values) // 2] ^= 1

    def on_peer(self) -> bool:
        """Whether every tensor is in a peer's memory."""
        return all(tensor.location is Location.PEER for tensor, _ in self._tensors)

    def on_host(self) -> bool:
        """Whether every tensor is in host memory."""
        return all(tensor.location is Location.HOST for tensor, _ in self._tensors)

    def leased_slabs(self) -> int:
        """Slabs mapped, as the consumer says."""
        return self._aqua.stats().leased_bytes // SLAB

    def close(self) -> None:
        """Leave."""
        self._aqua.audit()
        self._aqua.close()


def _content(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (TENSOR_BYTES,), dtype=torch.uint8, generator=generator)
