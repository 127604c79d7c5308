from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from aqualib import checksum as module
from aqualib.checksum import checksum, matches, row_checksums

FORMULAS = [module._xxh3, module._words]


def by(formula: object, tensor: torch.Tensor) -> int:
    rows = module._rows_of_bytes(tensor.reshape(1, -1))
    return int(formula(rows)[0])  # type: ignore[operator] # one of FORMULAS


CONTENTS = st.binary(min_size=1, max_size=200)


@pytest.mark.parametrize("formula", FORMULAS)
@given(content=CONTENTS, position=st.integers(0), flip=st.integers(1, 255))
def test_any_changed_byte_changes_the_sum(
    formula: object, content: bytes, position: int, flip: int
) -> None:
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    expected = by(formula, tensor)
    assert 0 <= expected < 1 << 64
    assert matches(tensor, expected)
    tensor[position % len(content)] ^= flip
    assert by(formula, tensor) != expected
    assert not matches(tensor, expected)


@pytest.mark.parametrize("formula", FORMULAS)
@given(content=CONTENTS)
def test_length_counts(formula: object, content: bytes) -> None:
    longer = torch.frombuffer(bytearray(content + b"\0"), dtype=torch.uint8)
    assert by(formula, longer) != by(formula, longer[:-1])


@pytest.mark.parametrize("formula", FORMULAS)
@given(words=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=2, max_size=20, unique=True))
def test_exchanged_words_change_the_sum(formula: object, words: list[int]) -> None:
    tensor = torch.tensor(words)
    assert by(formula, tensor) != by(formula, tensor.flip(0))


@pytest.mark.parametrize("formula", FORMULAS)
def test_two_highest_bits_do_not_cancel(formula: object) -> None:
    tensor = torch.zeros(8, dtype=torch.int64)
    changed = tensor.clone()
    changed[2] = changed[5] = -(2**63)
    assert by(formula, tensor) != by(formula, changed)


@given(rows=st.integers(1, 6), row_bytes=st.integers(1, 40), chunk=st.integers(1, 5))
def test_rows_sum_as_they_do_alone_whatever_the_chunks(
    rows: int, row_bytes: int, chunk: int
) -> None:
    table = torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8)
    assert row_checksums(table) == [checksum(row) for row in table]
    whole = module._words(table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_WORDS", chunk)
        assert module._words(table) == whole
    assert whole == [by(module._words, row) for row in table]


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
@pytest.mark.parametrize("formula", FORMULAS)
def test_the_sum_is_of_the_values_in_order(formula: object, tensor: torch.Tensor) -> None:
    copy = tensor.detach().resolve_conj().clone(memory_format=torch.contiguous_format)
    assert by(formula, tensor) == by(formula, copy)
    assert checksum(tensor) == checksum(copy)


def test_a_sum_names_its_formula() -> None:
    tensor = torch.arange(100)
    ours, theirs = (by(formula, tensor) for formula in FORMULAS)
    assert ours & 1 == 0
    assert theirs & 1 == 1
    assert matches(tensor, ours)
    assert matches(tensor, theirs)


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
