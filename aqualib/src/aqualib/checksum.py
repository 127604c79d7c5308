"""Checksums of tensors: XXH3 over their bytes, wherever they are.

A stored sum is compared with what comes back, so that wrong bytes raise instead of being used. It
finds accidents (a torn copy, a slab that another process wrote to), not adversaries.

Rows of host memory are read where they are. Those of a GPU are copied to the host for it, a chunk
at a time, so that one formula serves on both sides: who switches checking on pays for that copy.

Source: XXH3 by Yann Collet.
"""

from __future__ import annotations

from typing import Final

import torch
import xxhash

from aqua_protocol import MIB

CHUNK_BYTES: Final = 8 * MIB
"""Bytes of a GPU's rows that are in host memory at once. Doubled, twice that for half as many
copies."""


def checksum(tensor: torch.Tensor) -> int:
    """64 bits that change when a byte of `tensor` does; dtype and shape do not matter.

    Synchronises with the device that holds the tensor.
    """
    return row_checksums(tensor.reshape(1, -1))[0]


def row_checksums(table: torch.Tensor, index: torch.Tensor | None = None) -> list[int]:
    """The checksum of each `table[i]`, or of `table[i]` for each i of `index`.

    Args:
        table: Shape (num_rows, ...).
        index: Positions, int64, shape (n,), on the CPU.
    """
    if not table.is_cpu:
        chosen = table if index is None else table[index]
        step = max(1, CHUNK_BYTES * len(table) // max(1, table.nbytes))
        return [found for part in torch.split(chosen, step) for found in row_checksums(part.cpu())]
    rows = _rows_of_bytes(table).numpy()
    # Gathering rows first costs ten times as much as summing them.
    chosen_rows = rows if index is None else (rows[i] for i in index.tolist())
    return [xxhash.xxh3_64_intdigest(row) for row in chosen_rows]


def _rows_of_bytes(table: torch.Tensor) -> torch.Tensor:
    """Shape (rows, bytes of a row); a view where the rows are dense."""
    if not table.numel():
        return torch.empty(len(table), 0, dtype=torch.uint8)
    plain = table.detach().resolve_conj().resolve_neg().reshape(len(table), -1)
    return (plain if plain.stride(1) == 1 else plain.contiguous()).view(torch.uint8)
