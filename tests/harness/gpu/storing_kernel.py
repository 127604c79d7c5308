"""The kernel of `kernels`, in a module of its own: Triton reads its source from a file."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore] # installed with torch for CUDA only
import triton.language as tl  # type: ignore[import-not-found, unused-ignore] # as above


@triton.jit  # type: ignore[untyped-decorator, unused-ignore] # as above
def _store_rows(table, index, packed, row_count, words: tl.constexpr) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001 - pointers
    """Program p of P stores rows p, p + P, ...; less than 2^31 words of eight bytes."""
    programs = tl.num_programs(0)
    offsets = tl.arange(0, words)
    for row in tl.range(tl.program_id(0), row_count, programs):
        source = tl.load(index + row)
        values = tl.load(table + source * words + offsets)
        tl.store(packed + row * words + offsets, values)


def launch(table: torch.Tensor, index: torch.Tensor, packed: torch.Tensor, processors: int) -> None:
    """Store rows `index` of a table of int64 into `packed`, which may be pinned host memory."""
    _store_rows[(processors,)](table, index, packed, len(index), words=table.shape[1], num_warps=8)
