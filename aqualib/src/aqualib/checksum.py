"""Checksums of tensors, wherever their bytes are.

A stored sum is compared with what comes back, so that wrong bytes raise instead of being used. It
finds accidents (a torn copy, a slab that another process wrote to), not adversaries.

Two formulas, because neither side's good one is good on the other: on the CPU XXH3 at memory speed,
on a GPU a sum of mixed 64-bit words in torch integers, computed where the bytes are and exact
whatever the order of summation. The lowest bit of a sum names its formula, and `matches` follows
it: bytes that were summed on a GPU can be checked in host memory and the other way round.

Source: XXH3 by Yann Collet. The word formula is ours: each word is xored with a multiple of its
position and put through the multiply-xorshift steps of MurmurHash3's finaliser, so that exchanged
words and words changed in their highest bit alone change the sum.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import torch
import xxhash

from aqua_protocol import MIB

# Fixed by the formula: words of 64 bits, and the bit of a sum that names its formula.
WORD_BYTES: Final = 8
_MASK: Final = (1 << 64) - 1
_FORMULA_BIT: Final = 1

CHUNK_WORDS: Final = 8 * MIB // WORD_BYTES
"""Words summed at a time, so that temporary memory on a GPU is three times 8 MiB. Doubled, twice
that, for fewer launches."""


def _signed(word: int) -> int:
    """The signed integer with the bits of `word`: torch has no unsigned arithmetic."""
    return word - (1 << 64) if word >> 63 else word


_POSITION_STEP: Final = _signed(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio: multiples of it are spread evenly."""

# Fixed by MurmurHash3's 64-bit finaliser: its shifts, and its multipliers.
_SHIFT: Final = 33
_LOW_BITS: Final = (1 << (64 - _SHIFT)) - 1
_MULTIPLIERS: Final = (_signed(0xFF51AFD7ED558CCD), _signed(0xC4CEB9FE1A85EC53))


class _Formula(IntEnum):
    XXH3 = 0
    WORDS = 1


def checksum(tensor: torch.Tensor) -> int:
    """64 bits that change when a byte of `tensor` does; dtype and shape do not matter.

    Synchronises with the device that holds the tensor.
    """
    return row_checksums(tensor.reshape(1, -1))[0]


def row_checksums(table: torch.Tensor, index: torch.Tensor | None = None) -> list[int]:
    """The checksum of each `table[i]`, or of `table[i]` for each i of `index`.

    On the CPU the rows are read where they are: gathering them first costs ten times as much as
    summing them. On a GPU it is one pass over the device, and gathering is a part of that.

    Args:
        table: Shape (num_rows, ...).
        index: Positions, int64, shape (n,), on the CPU.
    """
    if table.is_cuda:
        return _words(_rows_of_bytes(table if index is None else table[index]))
    return _xxh3(_rows_of_bytes(table), index)


def matches(tensor: torch.Tensor, expected: int) -> bool:
    """Whether `tensor` has the bytes that `expected` was computed from."""
    rows = _rows_of_bytes(tensor.reshape(1, -1))
    formula = _Formula(expected & _FORMULA_BIT)
    found = _words(rows) if formula is _Formula.WORDS else _xxh3(rows.cpu())
    return found[0] == expected


def _rows_of_bytes(table: torch.Tensor) -> torch.Tensor:
    """Shape (rows, bytes of a row); a view where the rows are dense."""
    if not table.numel():
        return torch.empty(len(table), 0, dtype=torch.uint8, device=table.device)
    plain = table.detach().resolve_conj().resolve_neg().reshape(len(table), -1)
    is_dense = plain.stride(1) == 1 if plain.is_cpu else plain.is_contiguous()
    return (plain if is_dense else plain.contiguous()).view(torch.uint8)


def _xxh3(rows: torch.Tensor, index: torch.Tensor | None = None) -> list[int]:
    array = rows.numpy()
    chosen = array if index is None else (array[i] for i in index.tolist())
    return [_marked(xxhash.xxh3_64_intdigest(row), _Formula.XXH3) for row in chosen]


def _words(rows: torch.Tensor) -> list[int]:
    count, nbytes = rows.shape
    words = _whole_words(rows)
    total = torch.zeros(count, dtype=torch.int64, device=rows.device)
    step = max(1, CHUNK_WORDS // max(1, count))
    for start in range(0, words.shape[1], step):
        chunk = words[:, start : start + step]
        position = torch.arange(start, start + chunk.shape[1], device=rows.device)
        mixed = _mix_(chunk ^ position.mul_(_POSITION_STEP))
        total += mixed.sum(dim=1)
    total = _mix_(total + nbytes)  # Padding is zeros, so the length has to count.
    return [_marked(value, _Formula.WORDS) for value in total.tolist()]


def _whole_words(rows: torch.Tensor) -> torch.Tensor:
    """Rows as 64-bit words, the last one padded with zeros; copied unless they are aligned."""
    count, nbytes = rows.shape
    padded = -(-nbytes // WORD_BYTES) * WORD_BYTES
    is_aligned = rows.storage_offset() % WORD_BYTES == 0 and rows.stride(0) % WORD_BYTES == 0
    if padded == nbytes > 0 and is_aligned:
        return rows.view(torch.int64)
    words = torch.zeros(count, padded // WORD_BYTES, dtype=torch.int64, device=rows.device)
    words.view(torch.uint8)[:, :nbytes] = rows
    return words


def _mix_(words: torch.Tensor) -> torch.Tensor:
    """Spread every bit of each word over the word, in place; a bijection."""
    for multiplier in (*_MULTIPLIERS, 1):
        # `>>` on signed integers repeats the sign: mask it off, or two words would become one.
        words ^= (words >> _SHIFT).bitwise_and_(_LOW_BITS)
        words *= multiplier
    return words


def _marked(value: int, formula: _Formula) -> int:
    return value & _MASK & ~_FORMULA_BIT | formula
