"""A kernel that stores rows straight to the other side, by the number of processors it may hold.

The product packs short rows in local memory and leaves the link to the copy engines, because others
report that kernels reach less of it (337-359 against 371-380 GB/s on NVLink 4). This sweep is the
other way, so that the decision is held against this machine: rows of 16 KiB out of a table and into
a slab or pinned memory, by programs that each hold a processor and take row after row.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any, Final

import torch

from aqua_protocol import KIB
from harness.gpu.copies import borrowed, runs_at_random
from harness.gpu.outcome import NotRunError, Outcome
from harness.gpu.sampling import rates

if TYPE_CHECKING:
    from harness.gpu.device import GpuAtHand

PROCESSORS: Final = (4, 8, 16, 32, 64)
ROW_BYTES: Final = 16 * KIB
WORDS: Final = ROW_BYTES // 8


def processors(gpu: GpuAtHand) -> Outcome:
    """GB/s of a storing kernel, by its processors."""
    if gpu.is_stand_in:
        raise NotRunError("the stand-in compiles no kernels")
    if importlib.util.find_spec("triton") is None:
        raise NotRunError("Triton is not installed (pip install triton)")
    store_rows = storing_kernel()
    outcome = Outcome()
    transport, nbytes = gpu.transport(), gpu.slab_bytes
    table = outcome.table("Rows of 16 KiB stored by a kernel, GB/s", "processors", "slab", "host")
    rows = torch.randint(0, 256, (4 * nbytes,), dtype=torch.uint8, device=gpu.device)
    words = rows.view(torch.int64).view(-1, WORDS)
    index = runs_at_random(len(words), 1, nbytes // ROW_BYTES).to(gpu.device)
    host = transport.create_host(nbytes)
    with borrowed(gpu, transport, nbytes) as slab:
        # Pinned memory has the same address on the device.
        sides = {"slab": slab.tensor, "host": host.tensor}
        for count in PROCESSORS:
            cells = []
            for name, side in sides.items():
                packed = side.view(torch.int64).view(-1, WORDS)

                def once(packed: torch.Tensor = packed, count: int = count) -> None:
                    store_rows(words, index, packed, count)
                    torch.cuda.synchronize(gpu.device)

                figure = rates(len(index) * ROW_BYTES, once, gpu.rounds)
                arrived = torch.equal(packed[: len(index)].cpu(), words[index].cpu())
                outcome.check(f"{count} processors, {name}: rows arrive", arrived, "all compared")
                cells.append(figure)
                outcome.figures[f"kernel {name} {count} processors GB/s"] = figure.median
                del packed, once
            table.add(count, *cells)
        sides.clear()
        del side
    host.close()
    return outcome


def storing_kernel() -> Any:  # noqa: ANN401 - Triton is untyped
    """The kernel and its launch; Triton is looked for when it is needed."""
    from harness.gpu.storing_kernel import launch

    return launch
