"""A real consumer in a process of its own that fills peer memory with bytes it can recognise."""

from __future__ import annotations

import json
import sys
from typing import Any, Self

from harness.bounds import HANG_S, until
from harness.program import Program, say


class HolderProcess(Program):
    """Leases `nbytes`, fills them, and says on request whether they are as they were.

    Ready when entered, that is, when the memory is leased and full.

    Args:
        url: Of the coordinator.
        nbytes: A multiple of `slab_bytes`.
        slab_bytes: Of the producer's slabs.
    """

    def __init__(self, url: str, nbytes: int, slab_bytes: int) -> None:
        options = {"url": url, "nbytes": nbytes, "slab_bytes": slab_bytes}
        super().__init__(
            __file__,
            json.dumps(options),
            within_s=HANG_S,
            AQUA_NODE="node",
            AQUA_DOMAIN="domain",
            AQUA_GPU_UUID="GPU-holder",
            AQUA_HEARTBEAT_S="0.1",
        )

    def __enter__(self) -> Self:
        self.answer()
        return self

    def look(self) -> dict[str, Any]:
        """Bytes leased now, and whether all that was stored reads as it did."""
        self.tell("look")
        answer: dict[str, Any] = self.answer()
        return answer

    def paces(self) -> dict[str, float | None]:
        """Bytes per second that each producer asks for, if it does."""
        self.tell("paces")
        paces: dict[str, float | None] = self.answer()
        return paces


def _hold(url: str, nbytes: int, slab_bytes: int) -> None:
    import torch

    import aqualib

    count = nbytes // slab_bytes
    rows = torch.randint(0, 256, (count, slab_bytes), dtype=torch.uint8)
    with aqualib.connect(
        coordinator_url=url,
        transport="memfd",
        slab_bytes=slab_bytes,
        wanted_bytes=nbytes,
        host_bytes=2 * nbytes,
    ) as aqua:
        until(
            lambda: sum(a.mapped_bytes for a in aqua.attachments) >= nbytes,
            "peer memory is leased",
        )
        held = [aqua.offload(row) for row in rows]
        say({"leased_bytes": aqua.stats().leased_bytes})
        for line in sys.stdin:
            if line == "paces\n":
                say({one.producer_id: one.pace.bytes_per_s for one in aqua.attachments})
                continue
            aqua.step()
            intact = all(torch.equal(t.load(), r) for t, r in zip(held, rows, strict=True))
            stats = aqua.stats()
            answer = {"leased_bytes": stats.leased_bytes, "intact": intact}
            say(answer | {"spilled_bytes": stats.spilled_bytes})


if __name__ == "__main__":
    _hold(**json.loads(sys.argv[1]))
