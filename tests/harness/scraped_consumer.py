"""A consumer of aqualib in a process of its own that serves its metrics and pages all the while."""

from __future__ import annotations

import json
import select
import sys
from typing import Final

from harness.bounds import HANG_S
from harness.program import Program, say

PAUSE_S: Final = 0.05
"""Between two rounds of paging: enough of them for rates, and time for its neighbours."""


class ScrapedConsumer(Program):
    """Leases `nbytes` and serves `/metrics` on `port`; `answer()` comes when it has begun."""

    def __init__(self, port: int, nbytes: int, slab_bytes: int, **environment: str) -> None:
        options = {"port": port, "nbytes": nbytes, "slab_bytes": slab_bytes}
        super().__init__(__file__, json.dumps(options), within_s=HANG_S, **environment)


def _consume(port: int, nbytes: int, slab_bytes: int) -> None:
    import torch
    from prometheus_client import CollectorRegistry, start_http_server

    import aqualib

    registry = CollectorRegistry()
    with aqualib.connect(
        transport="memfd",
        slab_bytes=slab_bytes,
        wanted_bytes=nbytes,
        host_bytes=2 * nbytes,
        registry=registry,
    ) as aqua:
        start_http_server(port, addr="127.0.0.1", registry=registry)
        say({"event": "serving"})
        rows = torch.zeros((nbytes // slab_bytes, slab_bytes), dtype=torch.uint8)
        held = [aqua.offload(row) for row in rows]
        while not select.select([sys.stdin], [], [], PAUSE_S)[0]:
            aqua.step()
            for tensor in held:
                tensor.load()


if __name__ == "__main__":
    _consume(**json.loads(sys.argv[1]))
