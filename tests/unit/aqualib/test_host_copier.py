from __future__ import annotations

import pytest
import torch

from aqualib.transports.host import HostCopier


@pytest.fixture
def copier() -> HostCopier:
    return HostCopier()


@pytest.mark.parametrize(
    "src",
    [
        torch.arange(12.0).view(3, 4),
        torch.arange(12.0).view(4, 3).t(),
        torch.arange(24.0).view(3, 8)[:, ::2],
        torch.arange(12).to(torch.complex64).view(3, 4).conj(),
        torch.arange(12.0).view(3, 4).requires_grad_(),
        torch.empty(0, 4),
    ],
    ids=["dense", "transposed", "strided", "conjugate", "parameter", "empty"],
)
def test_a_copy_is_equal_whatever_the_layout(copier: HostCopier, src: torch.Tensor) -> None:
    dst = torch.full(src.shape, 7, dtype=src.dtype)
    copier.copy(dst, src.detach())
    assert torch.equal(dst, src)


def test_a_copy_into_a_strided_destination_leaves_the_gaps_alone(copier: HostCopier) -> None:
    frame = torch.zeros(4, 8)
    copier.copy(frame[:, :4], torch.ones(4, 4))
    assert frame[:, :4].all()
    assert not frame[:, 4:].any()


def test_copies_convert_nothing(copier: HostCopier) -> None:
    with pytest.raises(AssertionError, match="float64"):
        copier.copy(torch.zeros(4), torch.zeros(4, dtype=torch.float64))
    with pytest.raises(AssertionError):
        copier.copy(torch.zeros(4), torch.zeros(2, 2))


def test_bytes_are_copied_between_tensors_of_any_dtypes(copier: HostCopier) -> None:
    src, dst = torch.arange(8, dtype=torch.int16), torch.zeros(4, dtype=torch.float64)
    copier.copy_bytes(dst, 6, src.requires_grad_(False), 4, 10)
    assert dst.view(torch.uint8)[6:16].tolist() == src.view(torch.uint8)[4:14].tolist()
    assert not dst.view(torch.uint8)[16:].any()
    assert not dst.view(torch.uint8)[:6].any()


@pytest.mark.parametrize(
    ("src", "at", "nbytes"),
    [
        (torch.ones(16, dtype=torch.uint8), 12, 8),
        (torch.ones(16, dtype=torch.uint8), -1, 4),
        (torch.ones(4, 8, dtype=torch.uint8)[:, :4], 0, 4),
    ],
    ids=["past the end", "before the start", "strided"],
)
def test_bytes_outside_a_tensor_are_not_copied(
    copier: HostCopier, src: torch.Tensor, at: int, nbytes: int
) -> None:
    dst = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(AssertionError):
        copier.copy_bytes(dst, 0, src, at, nbytes)
    assert not dst.any()


def test_overlapping_views_copy_as_memmove_does(copier: HostCopier) -> None:
    buffer = torch.arange(16)
    copier.copy(buffer[4:12], buffer[:8])
    assert buffer.tolist() == [*range(4), *range(8), *range(12, 16)]


def test_no_rows_and_empty_rows_move_nothing(copier: HostCopier) -> None:
    table = torch.ones(3, 4)
    copier.gather(torch.empty(0, 4), table, torch.empty(0, dtype=torch.int64))
    copier.scatter(table, torch.empty(0, 4), torch.empty(0, dtype=torch.int64))
    copier.gather(torch.empty(2, 0), torch.empty(3, 0), torch.tensor([2, 0]))
    assert table.all()
