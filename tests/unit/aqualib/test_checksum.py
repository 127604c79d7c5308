from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from aqualib.checksum import checksum, row_checksums

CONTENTS = st.binary(min_size=1, max_size=200)


@given(content=CONTENTS, position=st.integers(0), flip=st.integers(1, 255))
def test_any_changed_byte_changes_the_sum(content: bytes, position: int, flip: int) -> None:
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    expected = checksum(tensor)
    assert 0 <= expected < 1 << 64
    tensor[position % len(content)] ^= flip
    assert checksum(tensor) != expected


@given(content=CONTENTS)
def test_length_counts(content: bytes) -> None:
    longer = torch.frombuffer(bytearray(content + b"\0"), dtype=torch.uint8)
    assert checksum(longer) != checksum(longer[:-1])


@given(words=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=20, unique=True))
def test_exchanged_words_change_the_sum(words: list[int]) -> None:
    tensor = torch.tensor(words)
    assert checksum(tensor) != checksum(tensor.flip(0))


def test_two_highest_bits_do_not_cancel() -> None:
    tensor = torch.zeros(8, dtype=torch.int64)
    changed = tensor.clone()
    changed[2] = changed[5] = -(2**63)
    assert checksum(tensor) != checksum(changed)


@given(rows=st.integers(1, 6), row_bytes=st.integers(1, 40))
def test_rows_sum_as_they_do_alone(rows: int, row_bytes: int) -> None:
    table = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8)
    assert row_checksums(table) == [checksum(row) for row in table]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(7, 5).t(),
        torch.randn(4, 9)[:, ::2],
        torch.randn(5).to(torch.bfloat16),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.tensor(True),
        torch.randn(6).requires_grad_(),
        torch.arange(64, dtype=torch.uint8)[3:],
        torch.empty(0),
    ],
    ids=["transposed", "strided", "bf16", "conjugate", "scalar", "parameter", "offset", "empty"],
)
def test_the_sum_is_of_the_values_in_order(tensor: torch.Tensor) -> None:
    copy = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
    assert checksum(tensor) == checksum(copy)


def test_no_rows_have_no_sums() -> None:
    assert row_checksums(torch.empty(0, 8)) == []


@given(
    index=st.lists(st.integers(0, 7), max_size=10),
    stride=st.integers(1, 3),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float64]),
)
def test_chosen_rows_sum_as_they_do_when_gathered(
    index: list[int], stride: int, dtype: torch.dtype
) -> None:
    table = torch.randn(8 * stride, 5).to(dtype)[::stride]
    chosen = torch.tensor(index, dtype=torch.int64)
    assert row_checksums(table, chosen) == row_checksums(table[chosen].clone())
