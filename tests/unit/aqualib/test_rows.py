from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from aqualib.transports.rows import RowRuns, as_words, checked_rows, has_dense_rows, widest_word


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.booleans())
def test_runs_say_the_same_as_the_rows_and_are_maximal(rows: list[int], contiguous: bool) -> None:
    table = torch.zeros(42, 4)[:: 1 if contiguous else 2]
    runs = RowRuns.of(np.array(rows), table)
    spelt_out = [
        (at + step, of + step)
        for at, of, count in zip(runs.table_rows, runs.packed_rows, runs.counts, strict=True)
        for step in range(count)
    ]
    assert spelt_out == list(zip(rows, range(len(rows)), strict=True))
    if contiguous:
        ends = runs.table_rows + runs.counts
        assert not (ends[:-1] == runs.table_rows[1:]).any(), "neighbouring runs are one run"
    else:
        assert len(runs) == len(rows), "rows that lie apart are not one copy"


@pytest.mark.parametrize(
    ("table", "word"),
    [
        (torch.zeros(4, 16, dtype=torch.uint8), torch.int64),
        (torch.zeros(4, 12, dtype=torch.uint8), torch.int32),
        (torch.zeros(4, 7, dtype=torch.uint8), torch.uint8),
        (torch.zeros(4, 9, dtype=torch.bfloat16), torch.int16),
        (torch.zeros(4, 8, dtype=torch.complex128), torch.int64),
        (torch.zeros(66, dtype=torch.uint8)[2:].view(4, 16), torch.int16),
        (torch.zeros(4, 20, dtype=torch.uint8)[:, :16], torch.int32),
    ],
)
def test_words_are_as_wide_as_size_alignment_and_stride_allow(
    table: torch.Tensor, word: torch.dtype
) -> None:
    assert widest_word(table) == word
    words = as_words(table, word)
    assert words.shape[0] == len(table)
    words.fill_(1)
    assert table.any(), "it is a view"


def test_rows_are_dense_even_when_they_lie_apart() -> None:
    table = torch.zeros(4, 8, 8)
    assert has_dense_rows(table)
    assert has_dense_rows(table[::2])
    assert has_dense_rows(table[:, :4])
    assert not has_dense_rows(table[:, :, :4])
    assert not has_dense_rows(table.transpose(1, 2))
    assert not has_dense_rows(torch.zeros(4, 8, dtype=torch.complex64).conj())


@given(st.integers(-3, 12), st.integers(1, 8))
def test_only_rows_of_the_table_pass(row: int, count: int) -> None:
    table, packed = torch.zeros(count, 2), torch.zeros(1, 2)
    index = torch.tensor([row])
    if 0 <= row < count:
        assert checked_rows(index, packed=packed, table=table).tolist() == [row]
    else:
        with pytest.raises(IndexError, match=str(row)):
            checked_rows(index, packed=packed, table=table)


@pytest.mark.parametrize(
    ("packed", "index"),
    [
        (torch.zeros(2, 3), torch.tensor([0, 1])),
        (torch.zeros(3, 4), torch.tensor([0, 1])),
        (torch.zeros(2, 4, dtype=torch.float64), torch.tensor([0, 1])),
        (torch.zeros(4, 2).t(), torch.tensor([0, 1])),
        (torch.zeros(2, 4), torch.tensor([0, 1], dtype=torch.int32)),
    ],
    ids=["row shape", "row count", "dtype", "layout", "index dtype"],
)
def test_sides_that_do_not_fit_are_a_caller_bug(packed: torch.Tensor, index: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        checked_rows(index, packed=packed, table=torch.zeros(8, 4))
