"""A real consumer in a process of its own that fills peer memory with bytes it can recognise."""

from __future__ import annotations

import json
import os
import select as io_select
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, Self

WITHIN_S: Final = 120.0


class HolderProcess:
    """Leases `nbytes`, fills them, and says on request whether they are as they were.

    A context manager that kills it; ready when entered, that is, when the memory is leased and
    full.

    Args:
        url: Of the coordinator.
        nbytes: A multiple of `slab_bytes`.
        slab_bytes: Of the producer's slabs.
    """

    def __init__(self, url: str, nbytes: int, slab_bytes: int) -> None:
        options = {"url": url, "nbytes": nbytes, "slab_bytes": slab_bytes}
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("AQUA_")}
        place = {"AQUA_NODE": "node", "AQUA_DOMAIN": "domain", "AQUA_GPU_UUID": "GPU-holder"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**inherited, **place, "AQUA_HEARTBEAT_S": "0.1"},
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

    def look(self) -> dict[str, Any]:
        """Bytes leased now, and whether all that was stored reads as it did."""
        assert self._process.stdin is not None
        self._process.stdin.write("look\n")
        self._process.stdin.flush()
        return self._answer()

    def kill(self) -> None:
        """SIGKILL it, and wait until it is gone."""
        self._process.kill()
        self._process.wait(WITHIN_S)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = io_select.select([self._process.stdout], [], [], WITHIN_S)
        assert ready, f"the holder did not answer within {WITHIN_S} s"
        line = self._process.stdout.readline()
        assert line, "the holder has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer


def _hold(url: str, nbytes: int, slab_bytes: int) -> None:
    import torch

    import aqualib
    from harness.consumers import await_store

    count = nbytes // slab_bytes
    rows = torch.randint(0, 256, (count, slab_bytes), dtype=torch.uint8)
    with aqualib.connect(
        coordinator_url=url,
        transport="memfd",
        slab_bytes=slab_bytes,
        wanted_bytes=nbytes,
        host_bytes=2 * nbytes,
    ) as aqua:
        await_store(
            aqua._store,
            lambda: sum(a.mapped_bytes for a in aqua.attachments) >= nbytes,
            "peer memory is leased",
        )
        held = [aqua.offload(row) for row in rows]
        for _ in _said({"leased_bytes": aqua.stats().leased_bytes}):
            aqua.step()
            intact = all(torch.equal(t.load(), r) for t, r in zip(held, rows, strict=True))
            stats = aqua.stats()
            answer = {"leased_bytes": stats.leased_bytes, "intact": intact}
            _say(answer | {"spilled_bytes": stats.spilled_bytes})


def _said(answer: dict[str, Any]) -> Any:  # noqa: ANN401 - lines
    _say(answer)
    return sys.stdin


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    _hold(**json.loads(sys.argv[1]))
