from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from aqua_protocol import ConfigError
from aqua_schedulers.cfs import PagingTier
from aqualib.engines.vllm.contract.versions import (
    MINORS,
    WARNED_MINORS,
    require_schedulable,
    require_supported,
)
from aqualib.engines.vllm.options import PagingMode, read_options
from aqualib.engines.vllm.paging.kv_groups import KvGroup, KvGroups
from aqualib.engines.vllm.paging.plan import WorkerReport, WorkerStore
from aqualib.engines.vllm.paging.scheduler import KvPagingScheduler


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
        ({"store_bytes": 10**30}, "store_bytes"),
        ({"slice_iterations": 0}, "slice_iterations"),
    ],
)
def test_a_wrong_option_is_refused_by_name(given: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        read_options(given)


def test_without_paging_nothing_is_opened() -> None:
    assert not read_options({"mode": PagingMode.RECOMPUTE}).is_paging


@pytest.mark.parametrize("minor", [*MINORS, *WARNED_MINORS])
@pytest.mark.parametrize("suffix", ["", ".0", ".1.dev3+cpu"])
def test_every_supported_version_is_taken(minor: str, suffix: str) -> None:
    require_supported(minor + suffix)


@pytest.mark.parametrize("version", ["0.27.1", "0.34.0", "0.3.2", "1.0", "0.320", "dev"])
def test_an_unknown_version_is_refused_with_what_would_do(version: str) -> None:
    with pytest.raises(ConfigError, match="not supported") as refused:
        require_supported(version)
    assert [minor for minor in (*MINORS, *WARNED_MINORS) if minor not in str(refused.value)] == []


def test_a_scheduler_without_what_is_used_is_refused_by_the_name_of_it() -> None:
    scheduler = SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=SimpleNamespace()))
    with pytest.raises(ConfigError, match=r"Scheduler\._preempt_request.*BlockPool\."):
        require_schedulable(scheduler)


def test_workers_together_report_the_worst() -> None:
    ours = WorkerReport({1}, PagingTier.PEER, 5e9)
    theirs = WorkerReport({2}, PagingTier.HOST, 3e9)
    assert ours.aggregate(theirs) == WorkerReport({1, 2}, PagingTier.HOST, 3e9)
    assert ours.aggregate(WorkerReport()).link_bytes_per_s == 5e9


def test_workers_together_have_the_page_if_each_that_was_asked_has() -> None:
    has, lacks, unasked = (WorkerReport(has_page=each) for each in (True, False, None))
    assert has.aggregate(has).aggregate(unasked).has_page is True
    assert has.aggregate(lacks).has_page is lacks.aggregate(has).has_page is False
    assert unasked.aggregate(unasked).has_page is None


def test_a_report_of_something_else_leaves_where_blocks_are_and_how_fast_they_come() -> None:
    paging = KvPagingScheduler(
        read_options({}), groups=KvGroups([KvGroup(16)]), hash_tokens=16, is_sharing=False
    )
    paging.note(WorkerReport(location=PagingTier.PEER, link_bytes_per_s=5e9))
    paging.note(WorkerReport(aborted=Counter([3])))
    assert (paging.location, paging.link_bytes_per_s) == (PagingTier.PEER, 5e9)


def test_stores_together_hold_what_the_smallest_does() -> None:
    stores = [WorkerStore(9, 100), WorkerStore(4, 300), WorkerStore(7, 200)]
    reports = [WorkerReport(store=each, saved=Counter([at])) for at, each in enumerate(stores, 3)]
    together = reports[0].aggregate(reports[1]).aggregate(reports[2])
    assert together.store == WorkerStore(4, 300, worker_count=3)
    assert together.saved == {3: 1, 4: 1, 5: 1}
    assert WorkerReport().aggregate(reports[0]).store == stores[0]
    assert reports[0].aggregate(WorkerReport()).store == stores[0]
