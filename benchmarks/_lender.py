"""A producer in a process of its own, driven over its standard input.

Commands are lines of JSON, `["offer", bytes]` or `["reclaim", bytes]`; each is answered by one.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from aqua_protocol import LeaseState, TransportKind, capability
from aqua_protocol.leases import LeaseGrant, LeaseView
from aqua_protocol.members import ProducerAck
from aqualib.producer.producer import Producer
from aqualib.reporter import Identity
from aqualib.settings import load_settings
from aqualib.transports import select

PRODUCER_ID: Final = "lender"
IDENTITY: Final = Identity(node="bench", domain="bench", gpu_uuid="lender")
RECLAIM_TIMEOUT_S: Final = 60.0


class Lender:
    """The other process, and the coordinator's part of granting its memory.

    Args:
        endpoint: Where its lease channel shall be.
        slab_bytes: Size of its slabs.
    """

    def __init__(self, endpoint: Path, slab_bytes: int) -> None:
        self._endpoint = endpoint
        self._slab_bytes = slab_bytes
        self._key = capability.producer_key(b"benchmark", PRODUCER_ID, IDENTITY.incarnation)
        self._epoch = 1
        key = base64.b64encode(self._key).decode()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(endpoint), str(slab_bytes), key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        self.call("offer", 0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(RECLAIM_TIMEOUT_S)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def call(self, verb: str, nbytes: int) -> dict[str, Any]:
        """Run a command there and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([verb, nbytes]) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def grant(self, consumer_id: str, nbytes: int) -> LeaseGrant:
        """A lease as the coordinator would grant it."""
        self._epoch += 1
        lease_id = f"lease-{self._epoch}"
        claims = capability.Claims(
            lease_id=lease_id,
            epoch=self._epoch,
            producer_id=PRODUCER_ID,
            consumer_id=consumer_id,
            bytes=nbytes,
            not_after_s=time.time() + RECLAIM_TIMEOUT_S,
        )
        return LeaseGrant(
            lease=LeaseView(
                lease_id=lease_id,
                epoch=self._epoch,
                state=LeaseState.GRANTED,
                producer_id=PRODUCER_ID,
                consumer_id=consumer_id,
                bytes=nbytes,
                expires_in_s=RECLAIM_TIMEOUT_S,
            ),
            token=capability.sign(claims, self._key),
            endpoint=str(self._endpoint),
            transport=TransportKind.MEMFD,
            slab_bytes=self._slab_bytes,
        )


def _serve(endpoint: Path, slab_bytes: int, key: str) -> None:
    with Producer(
        PRODUCER_ID,
        transport=select(TransportKind.MEMFD),
        link=None,
        endpoint=endpoint,
        identity=IDENTITY,
        slab_bytes=slab_bytes,
        deadline_s=RECLAIM_TIMEOUT_S,
        tracer=load_settings().tracer(),
    ) as producer:
        producer.acknowledge(
            ProducerAck(
                books_id="benchmark",
                heartbeat_s=1.0,
                min_epoch=1,
                capability_key=key,
                grantable=True,
            )
        )
        for line in sys.stdin:
            verb, nbytes = json.loads(line)
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
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
