"""Copies on a real GPU: every route a copier takes, its order, and the sums of what arrives."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from aqua_protocol import KIB, MIB
from aqualib import checksum
from aqualib.transports import Copier, MappedSlab, OwnedSlab, Transport, cuda_buffers

SLAB_BYTES = 64 * MIB


@pytest.fixture(scope="module")
def copier(transport: Transport) -> Copier:
    return transport.copier()


@pytest.fixture
def slab(transport: Transport) -> Iterator[OwnedSlab]:
    slab = transport.create(SLAB_BYTES)
    yield slab
    slab.close()


@pytest.fixture
def host(transport: Transport) -> Iterator[MappedSlab]:
    host = transport.create_host(SLAB_BYTES)
    yield host
    host.close()


def random_table(rows: int, row_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (rows, row_bytes), dtype=torch.uint8, device=device)


@pytest.mark.parametrize(
    "row_bytes",
    [1, 7, 1000, 4 * KIB, 64 * KIB, 255 * KIB + 8, 256 * KIB, MIB + 4],
)
@pytest.mark.parametrize("packed_side", ["slab", "pinned", "pageable"])
@pytest.mark.parametrize("spread", ["scattered", "run", "mixed"])
def test_rows_arrive_whatever_their_size_place_and_spread(
    transport: Transport,
    copier: Copier,
    slab: OwnedSlab,
    host: MappedSlab,
    row_bytes: int,
    packed_side: str,
    spread: str,
) -> None:
    count = min(400, SLAB_BYTES // row_bytes // 2)
    table = random_table(2 * count, row_bytes, transport.device)
    generator = torch.Generator().manual_seed(row_bytes)
    index = {
        "scattered": torch.randperm(2 * count, generator=generator)[:count],
        "run": torch.arange(count // 2, count // 2 + count),
        "mixed": torch.cat(
            [torch.arange(count // 2), count + torch.randperm(count, generator=generator)]
        )[:count],
    }[spread]
    backing = {
        "slab": slab.tensor,
        "pinned": host.tensor,
        "pageable": torch.empty(SLAB_BYTES, dtype=torch.uint8),
    }[packed_side]
    packed = backing[: count * row_bytes].view(count, row_bytes)

    copier.gather(packed, table, index)
    copier.fence()
    assert torch.equal(packed.cpu(), table[index.to(table.device)].cpu())

    target = torch.zeros_like(table)
    copier.scatter(target, packed, index)
    copier.fence()
    expected = torch.zeros_like(table)
    expected[index.to(table.device)] = packed.to(table.device)
    assert torch.equal(target, expected)


def test_rows_larger_than_the_staging_buffer_in_total_go_in_stages(
    transport: Transport, copier: Copier
) -> None:
    row_bytes = 64 * KIB
    count = 3 * cuda_buffers.STAGING_BYTES // row_bytes + 5
    table = random_table(2 * count, row_bytes, transport.device)
    index = torch.randperm(2 * count)[:count]
    packed = torch.empty(count, row_bytes, dtype=torch.uint8, device=transport.device)
    copier.gather(packed, table, index)
    copier.fence()
    assert torch.equal(packed, table[index.to(transport.device)])


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    shape=st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(1, 40)),
    dtype=st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64]),
    stride=st.integers(1, 3),
    swapped=st.booleans(),
    offset=st.integers(0, 3),
    data=st.data(),
)
def test_tables_of_any_layout_are_gathered_and_scattered(
    transport: Transport,
    copier: Copier,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    stride: int,
    swapped: bool,
    offset: int,
    data: st.DataObject,
) -> None:
    rows = shape[0]
    base = torch.randn(rows * stride * shape[1] * shape[2] + offset, device=transport.device)
    table = base.to(dtype)[offset:].view(rows * stride, *shape[1:])[::stride]
    table = table.transpose(1, 2) if swapped else table
    index = torch.tensor(
        data.draw(st.lists(st.integers(0, rows - 1), min_size=1, unique=True)), dtype=torch.int64
    )
    packed = torch.empty(len(index), *table.shape[1:], dtype=dtype, device=transport.device)
    copier.gather(packed, table, index)
    copier.fence()
    assert torch.equal(packed, table[index.to(table.device)])
    target = torch.zeros_like(table)
    copier.scatter(target, packed, index)
    copier.fence()
    assert torch.equal(target[index.to(table.device)], packed)
    rest = torch.ones(rows, dtype=torch.bool)
    rest[index] = False
    assert not target[rest.to(table.device)].any()


def test_a_copy_sees_what_the_caller_launched_before_it(
    transport: Transport, copier: Copier, slab: OwnedSlab
) -> None:
    source = torch.zeros(SLAB_BYTES, dtype=torch.uint8, device=transport.device)
    stream = torch.cuda.Stream(transport.device)  # type: ignore[no-untyped-call] # torch's
    stream.wait_stream(torch.cuda.current_stream(transport.device))
    with torch.cuda.stream(stream):
        for _ in range(50):
            source.add_(1)
        copier.copy(slab.tensor, source)
    copier.fence()
    assert (slab.tensor == 50).all()


def test_tensors_may_be_dropped_before_the_fence(
    transport: Transport, copier: Copier, slab: OwnedSlab
) -> None:
    source = torch.full((SLAB_BYTES,), 7, dtype=torch.uint8, device=transport.device)
    torch.cuda.synchronize()
    copier.copy(slab.tensor, source)
    del source
    # The caching allocator would hand the same memory out again, and it would be overwritten.
    overwritten = torch.full((SLAB_BYTES,), 9, dtype=torch.uint8, device=transport.device)
    copier.fence()
    assert (slab.tensor == 7).all()
    del overwritten


def test_a_slab_returns_through_pinned_memory_bit_for_bit(
    transport: Transport, copier: Copier, slab: OwnedSlab, host: MappedSlab
) -> None:
    original = torch.randint(0, 256, (SLAB_BYTES,), dtype=torch.uint8, device=transport.device)
    expected = checksum.checksum(original)
    copier.copy(slab.tensor, original)
    copier.copy(host.tensor, slab.tensor)
    copier.fence()
    assert checksum.checksum(host.tensor) == expected, "a GPU's sum is checked on the CPU"
    slab.tensor.zero_()
    copier.copy(slab.tensor, host.tensor)
    copier.fence()
    assert checksum.checksum(slab.tensor) == expected
    slab.tensor[12345] ^= 1
    assert checksum.checksum(slab.tensor) != expected


def test_sums_are_the_same_on_both_devices(transport: Transport) -> None:
    table = random_table(33, 1001, transport.device)
    assert checksum.row_checksums(table) == checksum.row_checksums(table.cpu())
    assert checksum.checksum(table) == checksum.checksum(table.cpu())
