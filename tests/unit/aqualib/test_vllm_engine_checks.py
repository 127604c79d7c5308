"""What paging cannot live with is refused when the engine starts, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aqua_protocol import ConfigError
from aqualib.engines.vllm.options import LoadMode, options_of, read_options
from aqualib.engines.vllm.paging.engine_checks import (
    load_mode,
    require_attention,
    require_blocks,
    require_co_servable,
    require_pageable,
)
from aqualib.engines.vllm.paging.kv_groups import KvGroup, KvGroups


def engine(**changed: Any) -> SimpleNamespace:  # noqa: ANN401 - as much of vLLM's as is read
    given = {
        "is_attention_free": False,
        "use_v2_model_runner": False,
        "max_concurrent_batches": 1,
        "enable_prefix_caching": False,
        "context_ranks": 1,
        "scheduler": object,
        "prefix_tier": None,
        "drafts": None,
        **changed,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(is_attention_free=given["is_attention_free"]),
        kv_transfer_config=SimpleNamespace(
            kv_connector="AquaConnector",
            kv_connector_extra_config={"prefix_tier": given["prefix_tier"]},
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=given["context_ranks"], prefill_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=given["enable_prefix_caching"]),
        scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: given["scheduler"]),
        speculative_config=given["drafts"],
        use_v2_model_runner=given["use_v2_model_runner"],
        max_concurrent_batches=given["max_concurrent_batches"],
    )


def cache(*kinds: str, zeroes: bool = False) -> SimpleNamespace:
    groups = []
    for kind in kinds:
        name, _, drafts = kind.partition("+")
        of = {"block_size": 16, "sliding_window": 40, "num_speculative_blocks": int(drafts or 0)}
        groups.append(SimpleNamespace(kv_cache_spec=type(name, (), of)()))
    return SimpleNamespace(kv_cache_groups=groups, needs_kv_cache_zeroing=zeroes)


FULL = "FullAttentionSpec"
WINDOW = "SlidingWindowSpec"
STATE = "MambaSpec"
DRAFTED = "MambaSpec+2"
OURS = type("AquaScheduler", (), {"has_requests_begin_again": True})
ALONE = KvGroups([KvGroup(16)])


@pytest.mark.parametrize(
    ("check", "said", "remedy"),
    [
        (lambda: require_attention(engine(is_attention_free=True)), "without", "additional-config"),
        (lambda: require_pageable(engine(), cache(FULL, DRAFTED)), "drafting", "speculative"),
        (
            lambda: require_pageable(engine(scheduler=OURS, prefix_tier=True), cache(FULL, STATE)),
            "prefix cannot be shared",
            "paged without it",
        ),
        (lambda: require_pageable(engine(), cache()), "no KV cache", "Drop --kv-transfer"),
        (lambda: require_pageable(engine(), cache(FULL, WINDOW)), "windows", "AquaScheduler"),
        (lambda: require_pageable(engine(), cache(WINDOW)), "windows", "AquaScheduler"),
        (
            lambda: require_pageable(engine(scheduler=OURS), cache(FULL, "RSWASpec", "NewSpec")),
            "NewSpec, RSWASpec: layers that keep",
            "recompute",
        ),
        (lambda: require_pageable(engine(context_ranks=2), cache(FULL)), "2 context", "recompute"),
        (
            lambda: require_pageable(engine(use_v2_model_runner=True), cache(FULL, zeroes=True)),
            "zeroed",
            "VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (lambda: require_blocks(cache()), "no KV cache", "without --scheduler-cls"),
    ],
)
def test_what_cannot_be_paged_is_refused(check: Callable[[], None], said: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=said) as refusal:
        check()
    assert remedy in str(refusal.value.remedy)


def test_what_can_be_is_not() -> None:
    require_attention(engine())
    require_pageable(engine(), cache(FULL, zeroes=True))
    require_pageable(engine(use_v2_model_runner=True), cache(FULL))
    require_pageable(engine(scheduler=OURS), cache(FULL, WINDOW, STATE))
    require_blocks(cache(FULL))


@pytest.mark.parametrize(
    ("changed", "kinds", "said", "remedy"),
    [
        ({"drafts": "a model"}, [FULL], "has drafts", "or speculative decoding"),
        ({}, [WINDOW], "one group of KV blocks under full attention", "for this model"),
        ({}, [FULL, WINDOW], "one group of KV blocks under full attention", "for this model"),
        ({}, [FULL, FULL], "one group of KV blocks under full attention", "for this model"),
        ({}, [STATE], "one group of KV blocks under full attention", "for this model"),
        ({}, [], "one group of KV blocks under full attention", "for this model"),
    ],
    ids=["drafts", "windows", "windows beside full attention", "groups", "states", "no blocks"],
)
def test_what_cannot_be_co_served_is_refused(
    changed: dict[str, Any], kinds: list[str], said: str, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refusal:
        require_co_servable(engine(**changed), cache(*kinds))
    assert remedy in str(refusal.value.remedy)
    assert '"co_serving"' in str(refusal.value.remedy)


def test_one_group_under_full_attention_can_be_co_served() -> None:
    require_co_servable(engine(), cache(FULL))


INEXACT = [
    {"use_v2_model_runner": True},
    {"max_concurrent_batches": 2},
    {"enable_prefix_caching": True},
]


@pytest.mark.parametrize("given", INEXACT)
def test_loads_go_beside_the_steps_where_one_that_fails_within_is_not_exact(
    given: dict[str, Any],
) -> None:
    assert load_mode(read_options({}), engine(**given), ALONE) is LoadMode.ASYNC
    with pytest.raises(ConfigError, match="wrong tokens"):
        load_mode(read_options({"load": "sync"}), engine(**given), ALONE)
    assert load_mode(read_options({"load": "sync", "mode": "recompute"}), engine(**given), ALONE)


def test_loads_are_done_within_the_step_where_they_are_exact() -> None:
    assert load_mode(read_options({}), engine(), ALONE) is LoadMode.SYNC
    assert load_mode(read_options({"load": "async"}), engine(), ALONE) is LoadMode.ASYNC


def test_loads_go_beside_the_steps_where_a_block_that_is_lost_loses_all() -> None:
    groups = KvGroups([KvGroup(16), KvGroup(16)])
    assert load_mode(read_options({}), engine(), groups) is LoadMode.ASYNC
    with pytest.raises(ConfigError, match="several groups"):
        load_mode(read_options({"load": "sync"}), engine(), groups)


def several(*children: dict[str, Any]) -> SimpleNamespace:
    transfer = SimpleNamespace(
        kv_connector="MultiConnector", kv_connector_extra_config={"connectors": list(children)}
    )
    return SimpleNamespace(kv_transfer_config=transfer, additional_config={})


def ours(**options: Any) -> dict[str, Any]:  # noqa: ANN401 - options
    return {"kv_connector": "AquaConnector", "kv_connector_extra_config": options}


NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def test_options_are_those_of_our_connector_among_several() -> None:
    assert options_of(several(NIXL, ours(policy="cfs"))).policy == "cfs"
    assert options_of(several({"kv_connector": "AquaConnector"}, NIXL)) == read_options({})


@pytest.mark.parametrize(
    ("children", "said"),
    [
        ([ours(), ours()], "names AquaConnector 2 times"),
        ([NIXL, ours(polisy="cfs")], "polisy"),
        ([NIXL, ours(lend={}, mode="recompute")], "reads the KV cache whenever it likes"),
    ],
)
def test_what_several_connectors_cannot_do_is_refused(
    children: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        options_of(several(*children))
