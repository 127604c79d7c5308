"""A producer in a process of its own, driven over its standard input.

Commands are lines of JSON, `["offer", bytes]` or `["reclaim", bytes]`, each answered by one, and in
the end `["close", 0]`. The lender of tests (`harness.lender_process`) is forked; this one has an
interpreter of its own, as a user's has.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final, Self

from aqua_protocol import TransportKind
from aqua_protocol.leases import LeaseGrant
from aqua_protocol.members import ProducerAck
from aqualib.producer.producer import Producer
from aqualib.reporter import Identity
from aqualib.settings import load_settings
from aqualib.transports import select

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from harness.consumers import grant
from harness.program import Program, say
from harness.raw_consumer import TokenIssuer

PRODUCER_ID: Final = "lender"
IDENTITY: Final = Identity(node="bench", domain="bench", gpu_uuid="lender")
RECLAIM_TIMEOUT_S: Final = 60.0


class Lender(Program):
    """The other process, and the coordinator's part of granting its memory.

    Args:
        endpoint: Where its lease channel shall be.
        slab_bytes: Size of its slabs.
        environment: Its `AQUA_*` variables.
    """

    def __init__(self, endpoint: Path, slab_bytes: int, **environment: str) -> None:
        self._endpoint = endpoint
        self._slab_bytes = slab_bytes
        self._issuer = TokenIssuer(PRODUCER_ID)
        options = [str(endpoint), slab_bytes, self._issuer.ack().model_dump_json()]
        super().__init__(
            __file__, json.dumps(options), within_s=2 * RECLAIM_TIMEOUT_S, **environment
        )

    def __enter__(self) -> Self:
        self.call("offer", 0)
        return self

    def __exit__(self, *raised: object) -> None:
        """Let it leave in good order: with tracing it still has spans to send."""
        self.tell(json.dumps(["close", 0]))
        self.process.wait(RECLAIM_TIMEOUT_S)
        super().__exit__(*raised)

    def grant(self, consumer_id: str, nbytes: int) -> LeaseGrant:
        """A lease as the coordinator would grant it."""
        return grant(
            self._issuer,
            self._endpoint,
            nbytes // self._slab_bytes,
            slab_bytes=self._slab_bytes,
            producer_id=PRODUCER_ID,
            consumer_id=consumer_id,
        )


def _serve(endpoint: str, slab_bytes: int, ack: str) -> None:
    with Producer(
        PRODUCER_ID,
        transport=select(TransportKind.MEMFD),
        link=None,
        endpoint=Path(endpoint),
        identity=IDENTITY,
        slab_bytes=slab_bytes,
        deadline_s=RECLAIM_TIMEOUT_S,
        tracer=load_settings().tracer(),
    ) as producer:
        producer.acknowledge(ProducerAck.model_validate_json(ack))
        for line in sys.stdin:
            verb, nbytes = json.loads(line)
            if verb == "close":
                return
            answer: dict[str, Any] = {
                "offered_bytes": producer.offered_bytes,
                "free_bytes": producer.free_bytes,
            }
            if verb == "offer":
                answer["offered_bytes"] = producer.offer(nbytes)
            else:
                reclaim = producer.reclaim(nbytes)
                answer["is_done"] = reclaim.wait(RECLAIM_TIMEOUT_S)
                answer["first_slab_ms"] = reclaim.first_slab_ms
                answer["total_ms"] = reclaim.total_ms
            say(answer)


if __name__ == "__main__":
    _serve(*json.loads(sys.argv[1]))
