"""AquaTensors in host memory: shapes, dtypes, ownership. Moving them is tested elsewhere."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING

import pytest
import torch

from aqua_protocol import CapacityError
from aqualib.consumer import Aqua
from aqualib.memory.frame_store import MAX_LEFTOVERS_PER_SWEEP
from aqualib.tensor import Location
from harness.consumers import consuming
from harness.producers import SLAB

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 16


@pytest.fixture
def aqua() -> Iterator[Aqua]:
    with consuming(LIMIT) as aqua:
        yield aqua


@pytest.mark.parametrize(
    "dtype",
    [
        torch.uint8,
        torch.bool,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.float8_e4m3fn,
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 5), (3, 0, 2), (2, 3, 4, 5)])
def test_values_of_every_dtype_and_shape_come_back(
    aqua: Aqua, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    value = torch.randint(0, 2, shape).to(dtype)
    tensor = aqua.offload(value)
    assert (tensor.shape, tensor.dtype, tensor.nbytes) == (value.shape, dtype, value.nbytes)
    found = tensor.load()
    assert (found.shape, found.dtype) == (value.shape, dtype)
    assert torch.equal(found.view(-1).view(torch.uint8), value.view(-1).view(torch.uint8))
    out = torch.empty_like(value)
    assert tensor.load(out=out) is out
    assert torch.equal(out.view(-1).view(torch.uint8), value.view(-1).view(torch.uint8))


@pytest.mark.parametrize("nbytes", [SLAB - 1, SLAB, SLAB + 1, 3 * SLAB, 3 * SLAB + 257])
def test_tensors_may_be_larger_than_a_slab(aqua: Aqua, nbytes: int) -> None:
    value = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    tensor = aqua.offload(value)
    assert torch.equal(tensor.load(), value)
    with tensor.pinned() as view:
        assert torch.equal(view, value)
        view.add_(1)
    assert torch.equal(tensor.load(), value + 1)
    with tensor.pinned(writes=False) as view:
        assert torch.equal(view, value + 1)


def test_a_source_that_is_not_contiguous_is_stored_by_value(aqua: Aqua) -> None:
    value = torch.arange(60).view(3, 4, 5).permute(2, 0, 1)
    assert torch.equal(aqua.offload(value).load(), value)
    conjugate = torch.randn(4, dtype=torch.complex64).conj()
    assert torch.equal(aqua.offload(conjugate).load(), conjugate)


def test_a_target_that_is_not_contiguous_is_filled_by_value(aqua: Aqua) -> None:
    tensor = aqua.offload(torch.arange(12).view(3, 4))
    out = torch.zeros(4, 3, dtype=torch.int64).t()
    tensor.load(out=out)
    assert out.tolist() == torch.arange(12).view(3, 4).tolist()
    conjugate = torch.zeros(4, dtype=torch.complex64).conj()
    aqua.offload(torch.full((4,), 1 + 2j, dtype=torch.complex64)).load(out=conjugate)
    assert conjugate.tolist() == [1 + 2j] * 4


def test_gradients_are_none_of_its_business(aqua: Aqua) -> None:
    value = torch.randn(5, requires_grad=True)
    tensor = aqua.offload(value)
    assert not tensor.load().requires_grad
    tensor.load(out=value)


def test_an_empty_tensor_has_the_default_dtype_and_takes_values_later(aqua: Aqua) -> None:
    tensor = aqua.empty((2, 3))
    assert tensor.dtype is torch.get_default_dtype()
    assert aqua.empty(7).shape == (7,)
    tensor.store(torch.ones(2, 3))
    assert tensor.load().tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(
    "other", [torch.zeros(3), torch.zeros(2, 2, dtype=torch.float64), torch.zeros(4)]
)
def test_another_shape_or_dtype_is_refused_and_changes_nothing(
    aqua: Aqua, other: torch.Tensor
) -> None:
    tensor = aqua.offload(torch.ones(2, 2))
    for misuse in (tensor.store, tensor.load):
        with pytest.raises(ValueError, match="cannot exchange"):
            misuse(other)
    assert tensor.load().tolist() == [[1.0, 1.0]] * 2


def test_writes_through_a_pinned_view_are_the_tensors_values(aqua: Aqua) -> None:
    tensor = aqua.offload(torch.zeros(4, dtype=torch.bfloat16))
    with tensor.pinned() as view:
        assert (view.dtype, view.shape) == (torch.bfloat16, (4,))
        view[1] = 3
    assert tensor.load().tolist() == [0, 3, 0, 0]


def test_the_view_is_empty_after_its_block_even_if_the_block_raises(aqua: Aqua) -> None:
    tensor = aqua.offload(torch.zeros(4))
    with pytest.raises(ZeroDivisionError), tensor.pinned() as view:
        view[0] = 1 / 0
    assert view.shape == (0,)
    with tensor.pinned() as view:
        view[0] = 1
    assert tensor.load().tolist() == [1, 0, 0, 0]


def test_pins_may_be_nested(aqua: Aqua) -> None:
    tensor = aqua.offload(torch.zeros(4))
    with tensor.pinned() as outer, tensor.pinned() as inner:
        inner[2] = 5
        assert outer[2] == 5


def test_released_twice_is_released_once_and_then_refuses(aqua: Aqua) -> None:
    tensor = aqua.offload(torch.zeros(100))
    assert aqua.stats().used_bytes > 0
    tensor.release()
    tensor.release()
    assert aqua.stats().used_bytes == 0
    for misuse in (tensor.load, lambda: tensor.store(torch.zeros(100))):
        with pytest.raises(ValueError, match="released"):
            misuse()
    with pytest.raises(ValueError, match="released"), tensor.pinned():
        pass
    assert "released" in repr(tensor)


def test_release_inside_pinned_is_refused(aqua: Aqua) -> None:
    tensor = aqua.offload(torch.zeros(4))
    with tensor.pinned() as view:
        with pytest.raises(ValueError, match="inside pinned"):
            tensor.release()
        view[0] = 1
    tensor.release()


@pytest.mark.parametrize("what", ["tensor", "blocks"])
def test_the_room_of_all_collected_tensors_is_there_at_once(aqua: Aqua, what: str) -> None:
    count = LIMIT * SLAB // 256
    assert count > 2 * MAX_LEFTOVERS_PER_SWEEP
    tensors = [aqua.empty(64) for _ in range(count)]
    tensors.clear()
    if what == "tensor":
        assert aqua.empty(LIMIT * SLAB // 4).nbytes == LIMIT * SLAB
    else:
        assert aqua.block_store(SLAB, LIMIT).capacity_blocks == LIMIT


def test_the_room_under_a_surviving_view_is_not_given_to_anyone_else(aqua: Aqua) -> None:
    tensor = aqua.offload(torch.zeros(SLAB // 4))
    with tensor.pinned() as view:
        leaked = view[:]
    tensor.release()
    del tensor
    others = [aqua.offload(torch.full((SLAB // 4,), float(i))) for i in range(LIMIT - 1)]
    leaked.fill_(-1)
    for i, other in enumerate(others):
        assert other.load().eq(i).all()
    with pytest.raises(CapacityError):
        aqua.empty(SLAB // 4)
    del leaked
    assert aqua.offload(torch.ones(SLAB // 4)).load().eq(1).all()


def test_a_forgotten_tensor_gives_its_room_back(aqua: Aqua) -> None:
    for _ in range(3 * LIMIT):
        aqua.offload(torch.zeros(SLAB // 4))
    gc.collect()
    assert aqua.stats().used_bytes == 0


def test_finalizers_in_a_cycle_on_another_thread_free_room_too(aqua: Aqua) -> None:
    def make_cycle() -> None:
        cycle: list[object] = [aqua.offload(torch.zeros(SLAB // 4))]
        cycle.append(cycle)

    thread = threading.Thread(target=make_cycle)
    thread.start()
    thread.join()
    gc.collect()
    assert aqua.stats().used_bytes == 0


def test_a_full_store_says_so_and_takes_nothing(aqua: Aqua) -> None:
    kept = aqua.offload(torch.zeros(SLAB * (LIMIT - 1), dtype=torch.uint8))
    used = aqua.stats().used_bytes
    with pytest.raises(CapacityError) as caught:
        aqua.empty(2 * SLAB, torch.uint8)
    assert "host_bytes" in caught.value.remedy
    assert aqua.stats().used_bytes == used
    assert aqua.offload(torch.zeros(SLAB, dtype=torch.uint8)).location is Location.HOST
    kept.release()


def test_a_tensor_is_a_context_manager_and_says_who_it_is(aqua: Aqua) -> None:
    with aqua.offload(torch.zeros(2, 3)) as tensor:
        assert "float32 2x3, 24 B, host" in repr(tensor)
    assert "released" in repr(tensor)


def test_a_checked_tensor_accepts_what_pinned_wrote() -> None:
    with consuming(LIMIT, is_checking=True) as aqua:
        for nbytes in (100, 3 * SLAB):
            tensor = aqua.offload(torch.zeros(nbytes, dtype=torch.uint8))
            with tensor.pinned() as view:
                view[nbytes - 1] = 1
            assert int(tensor.load().sum()) == 1
