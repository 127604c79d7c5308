"""A real producer in a process of its own, which can be killed or frozen at any moment."""

from __future__ import annotations

import json
import os
import select as io_select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, Self

from aqua_protocol import TransportKind
from aqua_protocol.members import ProducerAck
from aqualib.channel import ChannelClosedError
from aqualib.coordinator_link import CoordinatorLink
from aqualib.producer.lender import Producer
from aqualib.reporter import Identity
from aqualib.transports import select

WITHIN_S: Final = 60.0
"""Bound of every wait; importing torch on a busy machine is the longest."""


class LenderProcess:
    """A `Producer` that obeys over its standard input; a context manager that kills it.

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
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=_environment(),
        )

    def __enter__(self) -> Self:
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def offer(self, slab_count: int) -> None:
        """Grow the offer to so many slabs."""
        self._call("offer", slab_count * self.slab_bytes)

    def reclaim(self, slab_count: int) -> None:
        """Begin to take so many slabs back."""
        self._call("reclaim", slab_count * self.slab_bytes)

    def await_reclaimed(self) -> None:
        """Wait until every slab of the last `reclaim` is back."""
        assert self._call("wait"), "the reclaim did not end in time"

    def slabs(self) -> dict[str, int]:
        """Slabs offered, free, leased and quarantined."""
        found: dict[str, int] = self._call("slabs")
        return found

    def freeze(self) -> None:
        """Stop the process as a hung one."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL it, and wait until it is gone."""
        self._process.kill()
        self._process.wait(WITHIN_S)

    def close(self) -> None:
        """Let it leave in good order, and wait for that."""
        self._call("close")

    def _call(self, verb: str, *arguments: object) -> Any:  # noqa: ANN401 - whatever the verb gives
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([verb, *arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:  # noqa: ANN401 - as above
        assert self._process.stdout is not None
        ready, _, _ = io_select.select([self._process.stdout], [], [], WITHIN_S)
        if not ready:
            raise TimeoutError(f"the producer process did not answer within {WITHIN_S} s")
        line = self._process.stdout.readline()
        if not line:
            raise ChannelClosedError("the producer process has ended")
        return json.loads(line)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("AQUA_")}


def _serve(options: dict[str, Any]) -> None:
    slab_bytes = options["slab_bytes"]
    producer = Producer(
        options["producer_id"],
        transport=select(TransportKind.MEMFD),
        link=None if options["url"] is None else CoordinatorLink(options["url"]),
        endpoint=Path(options["endpoint"]),
        identity=Identity(node="node", domain="domain", gpu_uuid=f"GPU-{options['producer_id']}"),
        slab_bytes=slab_bytes,
        deadline_s=WITHIN_S,
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
                say(reclaim is not None and reclaim.wait(WITHIN_S))
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


def say(answer: object) -> None:
    """Answer one line."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
