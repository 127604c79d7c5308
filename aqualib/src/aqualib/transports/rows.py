"""Rows of a table: indexes that are known to be good, and runs of neighbours among them.

Gather and scatter take an index from an engine's block table. Both copiers check it once, here:
an index out of range would read or write another owner's memory, and on a GPU it would do so
without an exception. Neighbouring rows that lie next to each other in memory are one copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from jaxtyping import Int64

from aqualib.ranges import lie_within, run_starts


@dataclass(frozen=True, slots=True)
class RowRuns:
    """Maximal stretches of rows that follow each other in the table; arrays of shape (runs,).

    Attributes:
        table_rows: First row of each run in the table.
        packed_rows: First row of each run on the packed side.
        counts: Rows of each run.
    """

    table_rows: Int64[np.ndarray, " runs"]
    packed_rows: Int64[np.ndarray, " runs"]
    counts: Int64[np.ndarray, " runs"]

    @classmethod
    def of(cls, rows: Int64[np.ndarray, " n"], table: torch.Tensor) -> Self:
        """Group `rows`, shape (n,), n > 0; rows that are strided apart stay alone."""
        firsts = run_starts(rows) if table.is_contiguous() else np.arange(len(rows))
        return cls(rows[firsts], firsts, np.diff(firsts, append=len(rows)))

    def __len__(self) -> int:
        """Number of runs."""
        return len(self.counts)


def checked_rows(
    index: torch.Tensor, *, packed: torch.Tensor, table: torch.Tensor
) -> Int64[np.ndarray, " n"]:
    """The rows of `table` that go to or come from `packed`, known to lie inside it; shape (n,).

    Raises:
        IndexError: A row is out of range.
    """
    assert index.dtype == torch.int64, f"index of {index.dtype}"
    assert packed.is_contiguous(), f"rows of strides {packed.stride()} are not packed"
    assert packed.dtype == table.dtype, f"copy between {packed.dtype} and {table.dtype}"
    assert packed.shape == (*index.shape, *table.shape[1:]), (
        f"{tuple(index.shape)} rows of {tuple(table.shape)} do not fit {tuple(packed.shape)}"
    )
    assert not packed.is_conj(), "packed rows are bytes; a conjugate view is a computation"
    rows: Int64[np.ndarray, " n"] = index.numpy()
    if not lie_within(rows, table.shape[0]):
        raise IndexError(f"rows {rows.min()} to {rows.max()} do not lie within {len(table)} rows")
    return rows


def require_bytes(tensor: torch.Tensor, at: int, nbytes: int) -> None:
    """`tensor` is contiguous, and has `nbytes` bytes from byte `at` on."""
    assert 0 <= at <= tensor.nbytes - nbytes, f"bytes {at} + {nbytes} of {tensor.nbytes}"
    assert tensor.is_contiguous(), f"bytes of strides {tensor.stride()} are not one range"


def bytes_of(tensor: torch.Tensor, at: int, nbytes: int) -> torch.Tensor:
    """A view of some bytes of a contiguous tensor, shape (nbytes,), uint8."""
    require_bytes(tensor, at, nbytes)
    return tensor.detach().view(-1).view(torch.uint8)[at : at + nbytes]


def require_alike(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Copies convert nothing: both sides have one shape and one dtype."""
    assert dst.shape == src.shape, f"copy of {tuple(src.shape)} into {tuple(dst.shape)}"
    assert dst.dtype == src.dtype, f"copy of {src.dtype} into {dst.dtype}"


def has_dense_rows(table: torch.Tensor) -> bool:
    """Whether each row is one stretch of bytes that is its value; rows may lie apart."""
    is_dense = table.is_contiguous() or table[0].is_contiguous()
    return is_dense and not table.is_conj() and not table.is_neg()


def as_words(table: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """A view of a table with dense rows as (rows, words of a row)."""
    shape = (len(table), table[0].numel())
    return table.detach().as_strided(shape, (table.stride(0), 1)).view(word)


def widest_word(*tables: torch.Tensor) -> torch.dtype:
    """The largest integer type that tiles and aligns the rows of all tables, which are dense.

    Index kernels move one element per thread, so bytes would be eight times slower than words.
    """
    distances = [
        int(number)
        for table in tables
        for number in (
            table.data_ptr(),
            table[0].nbytes,
            table.stride(0) * table.element_size(),
            table.storage_offset() * table.element_size(),
        )
    ]
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return words[int(np.gcd.reduce([8, *distances]))]
