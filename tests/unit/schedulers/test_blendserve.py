from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np
import pytest

from aqua_protocol.decoders import DECODERS
from aqua_protocol.errors import ConfigError
from aqua_protocol.hardware import GPUS
from aqua_schedulers import baselines
from aqua_schedulers.admission import BatchView
from aqua_schedulers.blendserve import (
    UNKNOWN,
    BlendMode,
    LengthEstimate,
    PrefixCacheModel,
    PrefixTree,
    RequestPool,
    ResourceCost,
    choose_sample,
    prepare,
    split_among,
)
from aqua_schedulers.blendserve.dual_scanner import (
    LEFT,
    NONE,
    RIGHT,
    next_request,
    open_scanner,
    settle,
    take,
)
from aqua_schedulers.blendserve.foresight_state import add, empty_timeline, peak_with
from aqua_schedulers.blendserve.length_learner import FIRST_LOOK, LengthLearner
from aqua_schedulers.blendserve.order import charged, weigh
from aqua_schedulers.blendserve.paper import DENSE_TOKENS, dense_tokens

pytestmark = pytest.mark.slow

A100 = ResourceCost.of(DECODERS["Llama-3.1-8B"], GPUS["A100-80GB"])
NOTHING = np.empty(0, np.int32)


def tree_of(*prompts: list[int]) -> PrefixTree:
    offsets = np.cumsum([0, *map(len, prompts)])
    return PrefixTree.from_tokens(
        np.array(functools.reduce(operator.iadd, prompts, []), np.int32), offsets
    )


def pool_of(tree: PrefixTree, known: list[int], sampled: list[int] | None = None) -> RequestPool:
    none = [UNKNOWN] * tree.request_count
    return RequestPool(tree, np.array(known, np.int32), np.array(sampled or none, np.int32))


def view(capacity_tokens: int = 100_000, **changes: Any) -> BatchView:  # noqa: ANN401 - any field
    return BatchView(capacity_tokens, **changes)


def test_densities_of_figure_5_come_out() -> None:
    # Its left node has 3.73, its right one 0.094 (printed 0.096 in the text).
    assert float(A100.density(512, 256)) == pytest.approx(3.73, rel=0.03)
    assert float(A100.density(256, 16384)) == pytest.approx(0.094, rel=0.03)


def test_the_tree_finds_shared_prefixes_duplicates_and_prompts_inside_prompts() -> None:
    tree = tree_of([1, 2, 3, 4], [1, 2, 3, 5], [1, 2], [7], [1, 2, 3, 4])
    assert tree.prompt_tokens.tolist() == [4, 4, 2, 1, 4]
    # 1 2 | 3 | 4 (twice), 5 | 7
    assert tree.distinct_tokens == 6
    assert tree.request_count == 5
    assert sorted(tree.depth_first().tolist()) == [0, 1, 2, 3, 4]


def test_a_tree_of_segments_equals_the_tree_of_its_tokens() -> None:
    by_tokens = tree_of([1, 2, 3], [1, 2, 4, 5], [9])
    by_segments = PrefixTree.from_segments(
        np.array([-1, 0, 0, -1]), np.array([2, 1, 2, 1]), np.array([1, 2, 3])
    )
    assert by_segments.prompt_tokens.tolist() == by_tokens.prompt_tokens.tolist()
    assert by_segments.distinct_tokens == by_tokens.distinct_tokens
    assert by_segments.inner_count == by_tokens.inner_count


def test_segments_of_no_prompt_are_not_in_the_tree() -> None:
    # 0 is shared; 1 and 2, one under the other, belong to nobody.
    tree = PrefixTree.from_segments(
        np.array([-1, 0, 1, 0, 0]), np.array([5, 70, 70, 2, 3]), np.array([3, 4])
    )
    assert tree.prompt_tokens.tolist() == [7, 8]
    assert tree.distinct_tokens == 5 + 2 + 3


def test_segments_that_are_no_tree_are_refused() -> None:
    with pytest.raises(ConfigError, match="lower index"):
        PrefixTree.from_segments(np.array([-1, 1]), np.array([1, 1]), np.array([1]))


def test_an_empty_pool_has_no_tree() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        PrefixTree.from_tokens(np.empty(0, np.int32), np.array([0]))


def test_unsampled_requests_take_the_mean_of_the_nearest_sampled_subtree() -> None:
    # Two groups under one prefix; only the first group is sampled.
    tree = tree_of([1, 2, 10], [1, 2, 11], [1, 3, 12], [1, 3, 13], [5, 6], [5, 7])
    unknown = np.full(6, UNKNOWN, np.int32)
    sampled = np.array([100, UNKNOWN, UNKNOWN, UNKNOWN, 8, UNKNOWN], np.int32)
    estimate = RequestPool(tree, unknown, sampled).estimate()
    # The second group falls back on its sibling, the other root child on its own sample.
    assert estimate.mean.tolist() == [100, 100, 100, 100, 8, 8]
    assert estimate.exact.tolist() == [True, False, False, False, True, False]


def test_known_lengths_are_used_as_they_are_and_do_not_teach_their_siblings() -> None:
    tree = tree_of([1, 2], [1, 3], [1, 4])
    known = np.array([5000, UNKNOWN, UNKNOWN], np.int32)
    sampled = np.array([UNKNOWN, 10, UNKNOWN], np.int32)
    estimate = RequestPool(tree, known, sampled).estimate()
    assert estimate.mean.tolist() == [5000, 10, 10]


def test_limits_cap_estimates() -> None:
    tree = tree_of([1, 2], [1, 3])
    unknown = np.full(2, UNKNOWN, np.int32)
    sampled = np.array([100, UNKNOWN], np.int32)
    limits = np.array([100, 20], np.int32)
    estimate = RequestPool(tree, unknown, sampled, limits).estimate()
    assert estimate.mean.tolist() == [100, 20]


def test_a_sample_covers_every_large_subtree_and_spares_known_requests() -> None:
    prompts = [[group, index] for group in (1, 2, 3, 4) for index in range(100)]
    tree = tree_of(*prompts)
    known = np.full(400, UNKNOWN, np.int32)
    known[300:] = 7
    chosen = choose_sample(tree, known, probability=0.05, seed=3)
    assert len(chosen) == 15
    assert set((chosen // 100).tolist()) == {0, 1, 2}
    with pytest.raises(ConfigError, match="probability"):
        choose_sample(tree, known, probability=0.0, seed=0)


def test_shared_prefixes_are_charged_to_the_first_request_in_order() -> None:
    tree = tree_of([1, 2, 3], [1, 2, 4], [9, 9])
    order = np.array([1, 2, 0], np.int32)
    fresh = charged(tree, tree.edge_tokens.astype(float), order)[order]
    assert fresh.tolist() == [3, 2, 1]


def test_the_root_density_counts_shared_prefixes_once() -> None:
    tree = tree_of([1] * 100 + [2], [1] * 100 + [3])
    lengths = pool_of(tree, [1, 1]).estimate()
    resources = weigh(tree, lengths, A100)
    alone = float(A100.compute_s(101, 1.0)) * 2
    assert resources.compute_s == pytest.approx(alone * (102 + 2) / (202 + 2), rel=0.01)


def test_the_blended_order_runs_from_compute_bound_to_memory_bound() -> None:
    tree = tree_of(*[[1, 1, index] for index in range(20)], *[[2, index] for index in range(20)])
    prepared = prepare(pool_of(tree, [4000] * 20 + [2] * 20), A100)
    order = prepared.order
    assert set(order.requests[:20].tolist()) == set(range(20, 40))
    assert np.all(np.diff(order.unit_density) <= 0)


def test_an_outlier_leaves_its_subtree_only_when_sharing_is_cheap() -> None:
    shared = [1] * 50
    prompts = [[*shared, index] for index in range(20)] + [[2, index] for index in range(20)]
    # One of the first twenty generates a long video: within its subtree or at the far right?
    known = [2] * 19 + [8000] + [100] * 20
    pool = pool_of(tree_of(*prompts), known)
    together = prepare(pool, A100, split_share=0.0).order.requests.tolist()
    apart = prepare(pool, A100, split_share=1.0).order.requests.tolist()
    assert apart[-1] == 19
    positions = [together.index(request) for request in range(20)]
    assert max(positions) - min(positions) == 19


def test_forecast_ramps_fit_where_sums_of_final_lengths_do_not() -> None:
    timeline = empty_timeline(1000.0)
    add(timeline, 900.0, 100.0)  # ends after 100 steps with 1000 tokens
    peak = peak_with(timeline, 0.0, 1000.0)  # starts at 0, ends with 1000
    assert 1000 <= peak < 1150


def test_an_order_with_memory_for_one_admits_one() -> None:
    policy = baselines.OrderedAdmission(
        np.array([2, 0, 1], np.int32),
        np.array([60, 60, 60]),
        tree_of(*[[index] * 10 for index in range(3)]),
        token_budget=100,
    )
    assert list(policy.plan(view(capacity_tokens=100)).admit) == [2]
    running = view(capacity_tokens=100, decoding_count=1)
    assert list(policy.plan(running).admit) == []
    ended = view(capacity_tokens=100, finished=np.array([2], np.int32))
    assert list(policy.plan(ended).admit) == [0]


def test_a_refused_request_is_offered_again_before_all_others() -> None:
    policy = baselines.OrderedAdmission(
        np.arange(3, dtype=np.int32),
        np.zeros(3, int),
        tree_of(*[[index] * 50 for index in range(3)]),
        token_budget=60,
    )
    assert list(policy.plan(view()).admit) == [0, 1]
    assert list(policy.plan(view(refused=np.array([1], np.int32))).admit) == [1]
    assert list(policy.plan(view()).admit) == [2]


@pytest.mark.parametrize("mode", BlendMode)
def test_a_retracted_request_is_offered_again(mode: BlendMode) -> None:
    tree = tree_of(*[[index] * 20 for index in range(6)])
    prepared = prepare(pool_of(tree, [2, 2, 2, 5000, 5000, 5000]), A100)
    policy = prepared.policy(capacity_tokens=100_000, mode=mode)
    first = list(policy.plan(view()).admit)
    assert first
    back = np.array(first[:1], np.int32)
    again = list(policy.plan(view(step_index=1, retracted=back)).admit)
    assert first[0] in again


def test_what_was_taken_out_of_turn_and_handed_back_is_offered_once() -> None:
    tree = tree_of(*[[index] * 4 for index in range(5)])
    order = prepare(pool_of(tree, [3000, 2900, 2800, 2700, 2]), A100).order
    scanner = open_scanner(order, np.full(5, 10))
    middle = int(order.requests[2])
    take(scanner, middle, RIGHT)
    settle(scanner, NOTHING, np.array([middle], np.int32))
    # Both the stack of the right end and the untouched part of the order hold it now.
    offered = []
    while (request := next_request(scanner, LEFT)) != NONE:
        take(scanner, request, LEFT)
        offered.append(request)
    assert sorted(offered) == list(range(5))
    assert next_request(scanner, RIGHT) == NONE


def test_kinds_tell_lengths_where_prefixes_do_not() -> None:
    tree = tree_of(*[[index] * 20 for index in range(20)])
    observed = np.full(20, UNKNOWN, np.int32)
    observed[:8] = [10, 1000] * 4
    by_turns = np.arange(20, dtype=np.int32) % 2
    rare = np.zeros(20, np.int32)
    rare[[0, 1, 19]] = 1  # Of two observed ones no mean is believed.
    unknown = np.full(20, UNKNOWN, np.int32)
    pool = RequestPool(tree, unknown, observed, kinds=(rare, by_turns))
    estimate = pool.estimate()
    assert estimate.mean[8:].tolist() == [10.0, 1000.0] * 6
    assert len(set(estimate.group[8:].tolist())) == 2
    assert RequestPool(tree, unknown, observed).estimate().mean[8:].tolist() == [505.0] * 12


def test_a_prefix_of_few_tells_more_than_a_kind_of_many() -> None:
    tree = tree_of(*[[7] * 10 + [index] for index in range(4)], *[[index] for index in range(16)])
    observed = np.full(20, UNKNOWN, np.int32)
    observed[0] = 50
    observed[4:8] = 500
    unknown = np.full(20, UNKNOWN, np.int32)
    pool = RequestPool(tree, unknown, observed, kinds=(np.zeros(20, np.int32),))
    assert pool.estimate().mean[1:4].tolist() == [50.0] * 3


def test_the_paper_paces_steps_at_the_density_of_the_pool() -> None:
    tree = tree_of(*[[index] * 300 for index in range(200)])
    prepared = prepare(pool_of(tree, [20] * 199 + [4000]), A100)
    policy = prepared.policy(capacity_tokens=400_000, mode=BlendMode.PAPER, max_step_tokens=10**6)
    kv = 300_000
    budgets = [
        policy.plan(view(logical_kv_tokens=kv, decoding_count=0, step_index=step)).token_budget
        for step in range(64)
    ]
    assert all(budget % 128 == 0 for budget in budgets)
    memory_s = A100.decode_s_per_kv_token * kv
    compute_s = A100.linear_s_per_token * float(np.mean(budgets))
    assert compute_s / memory_s == pytest.approx(prepared.order.root_density, rel=0.02)


def test_dense_steps_are_whole_tiles_at_the_wanted_efficiency() -> None:
    linear = {"floor_s": 9.09e-3, "s_per_token": 67.7e-6, "exponent": 1.28}
    assert dense_tokens(**linear) == DENSE_TOKENS == 384
    assert [dense_tokens(**linear, efficiency=share) for share in (0.7, 0.76, 0.83, 0.9)] == [
        256,
        384,
        384,
        640,
    ]


@pytest.mark.parametrize("read", [0, 100])
def test_the_paper_paces_no_step_below_a_dense_batch(read: int) -> None:
    tree = tree_of(*[[index] * 300 for index in range(200)])
    prepared = prepare(pool_of(tree, [20] * 199 + [4000]), A100)
    for least in (128, DENSE_TOKENS):
        policy = prepared.policy(capacity_tokens=400_000, mode=BlendMode.PAPER, dense_tokens=least)
        budgets = [
            policy.plan(view(logical_kv_tokens=read, step_index=step)).token_budget
            for step in range(64)
        ]
        assert float(np.mean(budgets)) == pytest.approx(least, rel=0.02)


def test_foresight_hides_the_smaller_resource_without_spending_the_larger() -> None:
    tree = tree_of(*[[index] * 300 for index in range(400)])
    for lengths, low, high in (([4] * 380 + [8000] * 20, 0.9, 1.0), ([4] * 398 + [4000] * 2, 1, 9)):
        prepared = prepare(pool_of(tree, lengths), A100)
        policy = prepared.policy(capacity_tokens=400_000, max_step_tokens=10**6)
        kv = 300_000
        policy.plan(view(capacity_tokens=400_000))
        busy = view(capacity_tokens=400_000, logical_kv_tokens=kv, decoding_count=9, step_index=1)
        budget = policy.plan(busy).token_budget
        pace = budget * A100.linear_s_per_token / (A100.decode_s_per_kv_token * kv)
        assert low <= pace <= high


def test_the_runtime_tree_remembers_what_fits_and_forgets_the_oldest() -> None:
    tree = tree_of([1, 1, 2], [1, 1, 3], [5] * 4, [6] * 4)
    cache = PrefixCacheModel(tree, capacity_tokens=8)
    assert cache.hold(0) == 3
    cache.release(0)
    assert cache.hold(1) == 1
    cache.release(1)
    cache.hold(2)
    cache.release(2)
    assert cache.used_tokens == 0
    assert cache.hold(3) == 4
    assert cache.present_tokens <= 8
    assert cache.used_tokens == 4
    assert cache.hold(0) > 0


def test_a_data_parallel_split_divides_both_resources_evenly() -> None:
    rng = np.random.default_rng(5)
    prompts = [[7, 7, *rng.integers(0, 1000, 30).tolist()] for _ in range(2000)]
    known = [2] * 1900 + [4000] * 100
    prepared = prepare(pool_of(tree_of(*prompts), known), A100)
    parts = split_among(prepared, 4)
    assert sorted(np.concatenate(parts).tolist()) == list(range(2000))
    for values in (prepared.compute_s, prepared.resources.leaf_memory_s):
        shares = [values[part].sum() / values.sum() for part in parts]
        assert shares == pytest.approx([0.25] * 4, abs=0.03)
    with pytest.raises(ConfigError):
        split_among(prepared, 0)


def test_learning_changes_what_is_wrong_and_leaves_what_is_right() -> None:
    mean = np.array([100.0] * 200 + [50.0] * 200)
    group = np.array([1] * 200 + [2] * 200, np.int32)
    learner = LengthLearner(LengthEstimate(mean, mean**2, np.zeros(400, bool), group))
    rng = np.random.default_rng(0)
    none = np.empty(0, np.int32)
    wrong = learner.observe(np.arange(40, dtype=np.int32), rng.integers(900, 1100, 40))
    right = learner.observe(np.arange(200, 240, dtype=np.int32), rng.integers(45, 56, 40))
    assert not wrong
    assert right, f"a look is due after {FIRST_LOOK} requests"
    corrected = learner.corrected(mean, mean**2, none, np.empty(0, np.int64))
    assert corrected is not None
    assert corrected[0][100] == pytest.approx(1000, rel=0.05)
    assert corrected[0][300] == 50
    again = learner.corrected(corrected[0], corrected[1], none, np.empty(0, np.int64))
    assert again is None


def test_costs_must_be_positive() -> None:
    with pytest.raises(ConfigError):
        ResourceCost(0.0, 0.0, 1.0)
