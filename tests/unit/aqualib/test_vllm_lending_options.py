from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from aqua_protocol import MIB, ConfigError
from aqualib.engines.vllm.options import LendingOptions, is_borrowing, options_of, rank_member


def engine(
    *,
    connector: str | None = None,
    extra: dict[str, Any] | None = None,
    **aqua: Any,  # noqa: ANN401 - options
) -> SimpleNamespace:
    """As much of vLLM's configuration as is read."""
    transfer = None
    if connector is not None:
        transfer = SimpleNamespace(kv_connector=connector, kv_connector_extra_config=extra or {})
    return SimpleNamespace(kv_transfer_config=transfer, additional_config={"aqua": aqua})


def test_nothing_is_lent_unless_it_is_asked_for() -> None:
    assert options_of(engine()).lend is None
    assert options_of(engine(lend={})).lend == LendingOptions()


def test_sizes_may_have_units() -> None:
    lend = options_of(engine(lend={"bytes": "5MiB"})).lend
    assert lend is not None
    assert lend.bytes == 5 * MIB


def test_data_parallel_engines_have_ports_of_their_own() -> None:
    assert LendingOptions().metrics_port_of(3) is None
    lend = LendingOptions(metrics_port=65533)
    assert [lend.metrics_port_of(index) for index in range(3)] == [65533, 65534, 65535]
    with pytest.raises(ConfigError, match="no port for the data-parallel engine 3") as refused:
        lend.metrics_port_of(3)
    assert "65532" in str(refused.value.remedy)


def test_a_misspelt_option_refuses_the_start_by_name() -> None:
    with pytest.raises(ConfigError, match=r"lend\.byte:"):
        options_of(engine(lend={"byte": 1}))


@pytest.mark.parametrize(
    ("extra", "borrows"),
    [({}, True), ({"is_offline": True}, False), ({"mode": "recompute"}, False)],
)
def test_an_engine_that_pages_may_lend_and_borrows_unless_it_pages_to_host_memory(
    extra: dict[str, Any], borrows: bool
) -> None:
    config = engine(connector="AquaConnector", extra={"lend": {}, **extra})
    assert options_of(config).lend is not None
    assert is_borrowing(config) is borrows


def test_an_engine_without_a_connector_borrows_nothing() -> None:
    assert not is_borrowing(engine(lend={}))


def test_a_connector_that_may_read_any_block_refuses_the_start() -> None:
    with pytest.raises(ConfigError, match="NixlConnector reads the KV cache"):
        options_of(engine(connector="NixlConnector", lend={}))
    assert options_of(engine(connector="NixlConnector")).lend is None


def test_the_informer_offers_what_the_options_say_and_keeps_the_reserve() -> None:
    options = LendingOptions(bytes=40 * MIB, reserve_bytes=8 * MIB, queue_margin=3)
    profile = options.informed(None, cache_bytes=100 * MIB, most_bytes=90 * MIB, slab_bytes=MIB)
    assert profile.spare_bytes == 48 * MIB
    assert profile.reserve_bytes == 8 * MIB
    assert profile.queue_margin == 3


def test_by_default_half_of_the_cache_is_lent_if_that_much_can_be() -> None:
    profile = LendingOptions().informed(
        None, cache_bytes=100 * MIB, most_bytes=90 * MIB, slab_bytes=MIB
    )
    assert (profile.spare_bytes, profile.reserve_bytes) == (60 * MIB, 10 * MIB)
    profile = LendingOptions().informed(
        None, cache_bytes=100 * MIB, most_bytes=30 * MIB, slab_bytes=MIB
    )
    assert profile.spare_bytes == 40 * MIB


@pytest.mark.parametrize(
    ("member", "world_size", "stage_count", "index", "rank", "name"),
    [
        ("llama", 1, 1, 0, 0, "llama"),
        ("llama", 2, 1, 0, 1, "llama.1"),
        ("llama", 1, 1, 2, 0, "llama.dp2"),
        ("llama", 4, 1, 1, 3, "llama.dp1.3"),
        ("llama", 4, 2, 0, 3, "llama.stage1.1"),
        ("llama", 2, 2, 0, 1, "llama.stage1"),
        ("llama.0.stage1", 4, 2, 0, 2, "llama.0.stage1.0"),
    ],
)
def test_ranks_are_named_as_plans_name_shards(
    monkeypatch: pytest.MonkeyPatch,
    member: str,
    world_size: int,
    stage_count: int,
    index: int,
    rank: int,
    name: str,
) -> None:
    parallel = SimpleNamespace(
        world_size=world_size, pipeline_parallel_size=stage_count, data_parallel_index=index
    )
    monkeypatch.delenv("AQUA_MEMBER", raising=False)
    assert rank_member(parallel, rank) is None
    monkeypatch.setenv("AQUA_MEMBER", member)
    assert rank_member(parallel, rank) == name
