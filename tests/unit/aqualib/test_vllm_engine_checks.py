"""What paging cannot live with is refused when the engine starts, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aqua_protocol import ConfigError
from aqualib.engines.vllm.engine_checks import (
    load_mode,
    require_attention,
    require_blocks,
    require_pageable,
)
from aqualib.engines.vllm.options import LoadMode, options_of, read_options


def engine(**changed: Any) -> SimpleNamespace:  # noqa: ANN401 - as much of vLLM's as is read
    given = {
        "is_hybrid": False,
        "is_attention_free": False,
        "use_v2_model_runner": False,
        "max_concurrent_batches": 1,
        "enable_prefix_caching": False,
        "context_ranks": 1,
        **changed,
    }
    return SimpleNamespace(
        model_config=SimpleNamespace(
            is_hybrid=given["is_hybrid"], is_attention_free=given["is_attention_free"]
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=given["context_ranks"], prefill_context_parallel_size=1
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=given["enable_prefix_caching"]),
        use_v2_model_runner=given["use_v2_model_runner"],
        max_concurrent_batches=given["max_concurrent_batches"],
    )


def cache(groups: int = 1, *, zeroes: bool = False) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=["group"] * groups, needs_kv_cache_zeroing=zeroes)


@pytest.mark.parametrize(
    ("check", "said", "remedy"),
    [
        (lambda: require_attention(engine(is_hybrid=True)), "state", "Drop --kv-transfer-config"),
        (lambda: require_attention(engine(is_attention_free=True)), "state", "additional-config"),
        (lambda: require_pageable(engine(), cache(0)), "no KV cache", "Drop --kv-transfer"),
        (lambda: require_pageable(engine(), cache(2)), "2 groups", "disable-hybrid"),
        (lambda: require_pageable(engine(context_ranks=2), cache()), "2 context", "recompute"),
        (
            lambda: require_pageable(engine(use_v2_model_runner=True), cache(zeroes=True)),
            "zeroed",
            "VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (lambda: require_blocks(cache(0)), "no KV cache", "without --scheduler-cls"),
    ],
)
def test_what_cannot_be_paged_is_refused(check: Callable[[], None], said: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=said) as refusal:
        check()
    assert remedy in str(refusal.value.remedy)


def test_what_can_be_is_not() -> None:
    require_attention(engine())
    require_pageable(engine(), cache(zeroes=True))
    require_pageable(engine(use_v2_model_runner=True), cache())
    require_blocks(cache(3))


INEXACT = [
    {"use_v2_model_runner": True},
    {"max_concurrent_batches": 2},
    {"enable_prefix_caching": True},
]


@pytest.mark.parametrize("given", INEXACT)
def test_loads_go_beside_the_steps_where_one_that_fails_within_is_not_exact(
    given: dict[str, Any],
) -> None:
    assert load_mode(read_options({}), engine(**given)) is LoadMode.ASYNC
    with pytest.raises(ConfigError, match="wrong tokens"):
        load_mode(read_options({"load": "sync"}), engine(**given))
    assert load_mode(read_options({"load": "sync", "mode": "recompute"}), engine(**given))


def test_loads_are_done_within_the_step_where_they_are_exact() -> None:
    assert load_mode(read_options({}), engine()) is LoadMode.SYNC
    assert load_mode(read_options({"load": "async"}), engine()) is LoadMode.ASYNC


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
