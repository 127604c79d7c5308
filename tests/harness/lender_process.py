"""A real producer in a process of its own, which can be killed or frozen at any moment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final, Self

from aqua_protocol import TransportKind
from aqua_protocol.members import ProducerAck
from aqualib.producer.producer import Producer
from aqualib.reporter import Identity
from aqualib.transports import select
from harness.bounds import HANG_S
from harness.patience import patient_client
from harness.program import Program, say


class LenderProcess(Program):
    """A `Producer` that obeys, and has offered when entered.

    Args:
        endpoint: Of its lease channel.
        slab_bytes: Of its slabs.
        slab_count: What it offers from the start.
        ack: The answer of a coordinator that does not exist; None with a real one.
        url: Of a real coordinator.
        producer_id: Name in the books.
    """

    def __init__(
        self,
        endpoint: Path,
        *,
        slab_bytes: int,
        slab_count: int,
        ack: ProducerAck | None = None,
        url: str | None = None,
        producer_id: str = "producer",
    ) -> None:
        self.endpoint: Final = endpoint
        self.slab_bytes: Final = slab_bytes
        options = {
            "endpoint": str(endpoint),
            "slab_bytes": slab_bytes,
            "slab_count": slab_count,
            "ack": None if ack is None else ack.model_dump_json(),
            "url": url,
            "producer_id": producer_id,
        }
        super().__init__(_serve, json.dumps(options), within_s=HANG_S)

    def __enter__(self) -> Self:
        self.answer()
        return self

    def offer(self, slab_count: int) -> None:
        """Grow the offer to so many slabs."""
        self.call("offer", slab_count * self.slab_bytes)

    def reclaim(self, slab_count: int) -> None:
        """Begin to take so many slabs back."""
        self.call("reclaim", slab_count * self.slab_bytes)

    def await_reclaimed(self) -> None:
        """Wait until every slab of the last `reclaim` is back."""
        assert self.call("wait"), "the reclaim did not end in time"

    def slabs(self) -> dict[str, int]:
        """Slabs offered, free, leased and quarantined."""
        found: dict[str, int] = self.call("slabs")
        return found

    def close(self) -> None:
        """Let it leave in good order, and wait for that."""
        self.call("close")


def _serve(argument: str) -> None:
    options: dict[str, Any] = json.loads(argument)
    slab_bytes = options["slab_bytes"]
    producer = Producer(
        options["producer_id"],
        transport=select(TransportKind.MEMFD),
        link=None if options["url"] is None else patient_client(options["url"]),
        endpoint=Path(options["endpoint"]),
        identity=Identity(node="node", domain="domain", gpu_uuid=f"GPU-{options['producer_id']}"),
        slab_bytes=slab_bytes,
        deadline_s=HANG_S,
        heartbeat_s=0.1,
    )
    if options["ack"] is not None:
        producer.acknowledge(ProducerAck.model_validate_json(options["ack"]))
    producer.offer(options["slab_count"] * slab_bytes)
    say(True)
    reclaim = None
    for line in sys.stdin:
        match json.loads(line):
            case ["offer", nbytes]:
                say(producer.offer(nbytes))
            case ["reclaim", nbytes]:
                reclaim = producer.reclaim(nbytes)
                say(True)
            case ["wait"]:
                say(reclaim is not None and reclaim.wait(HANG_S))
            case ["slabs"]:
                sizes = {
                    "offered": producer.offered_bytes,
                    "free": producer.free_bytes,
                    "leased": producer.leased_bytes,
                    "quarantined": producer.quarantined_bytes,
                }
                say({name: nbytes // slab_bytes for name, nbytes in sizes.items()})
            case ["close"]:
                producer.close()
                say(True)
