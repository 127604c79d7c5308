from __future__ import annotations

from typing import Any

import pytest

from aqua_protocol import GIB, MIB, ConfigError
from aqualib.engines.vllm.paging import store_size as module
from aqualib.engines.vllm.paging.store_size import StoreSize, store_size
from aqualib.settings import load_settings

SLAB = 64 * MIB


@pytest.fixture(autouse=True)
def container(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of 64 GiB."""
    monkeypatch.setattr(module, "host_memory_bytes", lambda: 64 * GIB)


def size(store_bytes: int | None = None, **changed: Any) -> StoreSize:  # noqa: ANN401 - settings
    workers = changed.pop("worker_count", 1)
    count = changed.pop("block_count", 1024)
    return store_size(
        store_bytes,
        block_bytes=2 * MIB,
        block_count=count,
        worker_count=workers,
        settings=load_settings(**{"slab_bytes": SLAB, **changed}),
    )


def test_a_cache_that_the_host_can_spare_is_paged_whole() -> None:
    found = size()
    assert found == StoreSize(1024, 33 * SLAB, None)


def test_a_larger_one_gets_a_share_and_says_so() -> None:
    found = size(block_count=40 << 10)
    assert found.host_bytes == 16 * GIB, "a quarter"
    assert found.capacity_blocks * 2 * MIB == 16 * GIB - SLAB
    assert found.warning is not None
    assert "80 GiB" in found.warning
    assert "store_bytes" in found.warning


def test_workers_share_what_there_is() -> None:
    found = size(block_count=40 << 10, worker_count=8)
    assert found.host_bytes == 2 * GIB
    assert found.warning is not None


def test_what_is_set_is_obeyed() -> None:
    assert size(host_bytes=4 * GIB, block_count=40 << 10).host_bytes == 4 * GIB
    assert size(wanted_bytes=60 * GIB, block_count=10 << 10).capacity_blocks == 10 << 10
    assert size(store_bytes=20 * GIB, block_count=40 << 10).capacity_blocks == 10 << 10


def test_asking_for_more_than_there_is_is_said() -> None:
    assert size(store_bytes=20 * GIB).warning is None
    warning = size(store_bytes=20 * GIB, worker_count=4).warning
    assert warning is not None
    assert "64 GiB" in warning


@pytest.mark.parametrize("given", [{"store_bytes": MIB}, {"host_bytes": SLAB}])
def test_room_for_no_block_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="do not hold one KV block") as refusal:
        size(**given)
    assert "recompute" in str(refusal.value.remedy)
