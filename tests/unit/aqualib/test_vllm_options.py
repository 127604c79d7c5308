from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from aqua_protocol import ConfigError
from aqua_schedulers.cfs import PagingTier
from aqualib.engines.vllm.options import PagingMode, read_options
from aqualib.engines.vllm.paging_plan import WorkerReport
from aqualib.engines.vllm.versions import (
    MINORS,
    require_pageable,
    require_schedulable,
    require_supported,
)


def test_the_defaults_page_and_put_first_tokens_first() -> None:
    options = read_options({})
    assert options.is_paging
    assert options.policy == "first-token"


def test_sizes_may_be_written_with_their_unit() -> None:
    assert read_options({"store_bytes": "2GiB"}).store_bytes == 2 << 30


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"slice_iteration": 4}, "slice_iteration"),
        ({"mode": "swop"}, "mode"),
        ({"store_bytes": "a lot"}, "store_bytes"),
        ({"slice_iterations": 0}, "slice_iterations"),
    ],
)
def test_a_wrong_option_is_refused_by_name(given: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_options(given)


def test_without_paging_nothing_is_opened() -> None:
    assert not read_options({"mode": PagingMode.RECOMPUTE}).is_paging


@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("suffix", ["", ".0", ".1.dev3+cpu"])
def test_every_supported_version_is_taken(minor: str, suffix: str) -> None:
    require_supported(minor + suffix)


@pytest.mark.parametrize("version", ["0.33.0", "0.3.2", "1.0", "0.320", "dev"])
def test_an_unknown_version_is_refused_with_what_would_do(version: str) -> None:
    with pytest.raises(ConfigError, match=r"not supported.*0\.32"):
        require_supported(version)


def test_a_scheduler_without_what_is_used_is_refused_by_the_name_of_it() -> None:
    scheduler = SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=SimpleNamespace()))
    with pytest.raises(ConfigError, match=r"Scheduler\._preempt_request.*BlockPool\."):
        require_schedulable(scheduler)


@pytest.mark.parametrize(
    ("is_second_runner", "zeroes", "is_refused"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_paging_is_refused_where_blocks_are_zeroed_first(
    is_second_runner: bool, zeroes: bool, is_refused: bool
) -> None:
    scheduler = SimpleNamespace(use_v2_model_runner=is_second_runner, needs_kv_cache_zeroing=zeroes)
    outcome = pytest.raises(ConfigError, match="zeroed") if is_refused else nullcontext()
    with outcome:
        require_pageable(scheduler)


def test_workers_together_report_the_worst() -> None:
    ours = WorkerReport({1}, PagingTier.PEER, 5e9)
    theirs = WorkerReport({2}, PagingTier.HOST, 3e9)
    assert ours.aggregate(theirs) == WorkerReport({1, 2}, PagingTier.HOST, 3e9)
    assert ours.aggregate(WorkerReport()).link_bytes_per_s == 5e9
