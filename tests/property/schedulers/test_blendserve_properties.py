"""What holds of every pool: orders are complete, sharing has a bound, memory is kept."""

from __future__ import annotations

import functools
import operator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aqua_protocol.decoders import DECODERS
from aqua_protocol.hardware import GPUS
from aqua_schedulers.admission import BatchView
from aqua_schedulers.baselines import Baseline
from aqua_schedulers.blendserve import (
    UNKNOWN,
    BlendMode,
    PrefixCacheModel,
    PrefixTree,
    RequestPool,
    ResourceCost,
    prepare,
    split_among,
)
from aqua_schedulers.blendserve.order import charged
from aqua_schedulers.blendserve.paper import PaperBlend, left_share

# Kernels compile in the first example, and how long examples take depends on the machine.
settings.register_profile("compiled", deadline=None)
settings.load_profile("compiled")

COST = ResourceCost.of(DECODERS["Llama-3.1-8B"], GPUS["A100-80GB"])
CAPACITY = 5000
Order = np.ndarray[tuple[int], np.dtype[np.int32]]
NOTHING = np.empty(0, np.int32)

prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), min_size=1, max_size=40)


@st.composite
def pools(draw: st.DrawFn) -> RequestPool:
    texts = draw(prompts)
    count = len(texts)
    lengths = st.lists(st.sampled_from([UNKNOWN, 1, 2, 40, 2000]), min_size=count, max_size=count)
    tree = tree_of(texts)
    known = np.array(draw(lengths), np.int32)
    sampled = np.array(draw(lengths), np.int32)
    return RequestPool(tree, known, sampled)


def tree_of(texts: list[list[int]]) -> PrefixTree:
    return PrefixTree.from_tokens(
        np.array(functools.reduce(operator.iadd, texts, []), np.int32),
        np.cumsum([0, *map(len, texts)]),
    )


def distinct_prefixes(texts: list[list[int]]) -> int:
    return len({tuple(text[:end]) for text in texts for end in range(1, len(text) + 1)})


@given(prompts)
def test_the_tree_holds_every_distinct_prefix_once(texts: list[list[int]]) -> None:
    tree = tree_of(texts)
    assert tree.prompt_tokens.tolist() == [len(text) for text in texts]
    assert tree.distinct_tokens == distinct_prefixes(texts)
    assert np.all(tree.parent[1:] < np.arange(1, len(tree.parent)))


@given(pools())
def test_every_order_names_every_request_once(pool: RequestPool) -> None:
    prepared = prepare(pool, COST)
    density = COST.density(pool.tree.prompt_tokens, prepared.lengths.mean)
    baselines = [baseline.order(pool.tree, density, seed=1) for baseline in Baseline]
    for order in (prepared.order.requests, *baselines):
        assert sorted(order.tolist()) == list(range(pool.request_count))


@given(pools(), st.integers(1, 5))
def test_a_split_names_every_request_once(pool: RequestPool, ways: int) -> None:
    parts = split_among(prepare(pool, COST), ways)
    assert len(parts) == ways
    assert sorted(np.concatenate(parts).tolist()) == list(range(pool.request_count))


@given(pools(), st.integers(0, 2**32 - 1), st.integers(8, 400))
def test_no_order_shares_more_than_depth_first(pool: RequestPool, seed: int, capacity: int) -> None:
    """With a cache of any size, requests one after another."""

    def computed(order: Order) -> int:
        cache = PrefixCacheModel(pool.tree, capacity)
        total = 0
        for request in order.tolist():
            total += cache.hold(request)
            cache.release(request)
        return total

    best = computed(pool.tree.depth_first())
    assert best == pool.tree.distinct_tokens
    other = np.random.default_rng(seed).permutation(pool.request_count).astype(np.int32)
    assert computed(other) >= best
    assert computed(prepare(pool, COST, split_share=0.0).order.requests) >= best


@given(pools())
def test_charges_add_up_to_what_is_distinct(pool: RequestPool) -> None:
    order = np.random.default_rng(0).permutation(pool.request_count).astype(np.int32)
    fresh = charged(pool.tree, pool.tree.edge_tokens.astype(float), order)[order]
    assert fresh.sum() == pool.tree.distinct_tokens


@given(st.floats(0.01, 100.0), st.floats(0.01, 100.0), st.floats(0.01, 100.0), st.floats(1.0, 1e12))
def test_the_partition_solves_its_two_equations(
    one: float, other: float, target: float, memory: float
) -> None:
    left, right = max(one, other) * 1.01, min(one, other)
    share = left_share(left, right, target)
    left_memory, right_memory = share * memory, (1.0 - share) * memory
    assert left_memory + right_memory == pytest.approx(memory)
    reachable = min(max(target, right), left)
    blended = (left_memory * left + right_memory * right) / memory
    assert blended == pytest.approx(reachable, rel=1e-9)


class Runtime:
    """An engine in miniature: a token per step for each request, exact memory, true lengths."""

    def __init__(self, pool: RequestPool, seed: int) -> None:
        rng = np.random.default_rng(seed)
        fixed = np.where(pool.known_tokens != UNKNOWN, pool.known_tokens, pool.sampled_tokens)
        guess = rng.integers(1, 200, pool.request_count)
        self.output = np.where(fixed != UNKNOWN, fixed, guess)
        self.cache = PrefixCacheModel(pool.tree, CAPACITY)
        self.prompt = pool.tree.prompt_tokens
        self.left: dict[int, int] = {}
        self.done: list[int] = []
        self.view = BatchView(CAPACITY)

    def used(self) -> int:
        return self.cache.used_tokens + sum(
            int(self.output[request]) - left for request, left in self.left.items()
        )

    def step(self, admitted: list[int]) -> None:
        for request in admitted:
            assert request not in self.left, "offered twice"
            assert request not in self.done, "offered after it ended"
            self.cache.hold(request)
            self.left[request] = int(self.output[request])
        retracted = []
        while self.used() + len(self.left) > CAPACITY and len(self.left) > 1:
            request, _ = self.left.popitem()
            self.cache.release(request)
            retracted.append(request)
        finished = []
        for request in list(self.left):
            self.left[request] -= 1
            if self.left[request] == 0:
                del self.left[request]
                self.cache.release(request)
                finished.append(request)
        self.done += finished
        view = self.view
        view.step_index += 1
        view.decoding_count = len(self.left)
        view.physical_kv_tokens = self.used()
        view.logical_kv_tokens = sum(
            int(self.prompt[request] + self.output[request]) - left
            for request, left in self.left.items()
        )
        view.finished = np.array(finished, np.int32)
        view.finished_tokens = self.output[finished].astype(np.int64)
        view.retracted = np.array(retracted, np.int32)


@settings(max_examples=25)
@given(pools(), st.sampled_from(BlendMode), st.integers(0, 1000))
def test_every_request_runs_to_its_end_exactly_once(
    pool: RequestPool, mode: BlendMode, seed: int
) -> None:
    policy = prepare(pool, COST).policy(capacity_tokens=CAPACITY, mode=mode)
    runtime = Runtime(pool, seed)
    for _ in range(200_000):
        if len(runtime.done) == pool.request_count:
            break
        plan = policy.plan(runtime.view)
        runtime.step(np.asarray(plan.admit).tolist())
        assert runtime.left or len(plan.admit) or runtime.done, "stalled"
    assert sorted(runtime.done) == list(range(pool.request_count))


@settings(max_examples=25)
@given(pools(), st.integers(0, 1000))
def test_the_scanner_never_reserves_more_than_the_memory(pool: RequestPool, seed: int) -> None:
    policy = prepare(pool, COST).policy(capacity_tokens=CAPACITY, mode=BlendMode.PAPER)
    assert isinstance(policy, PaperBlend)
    runtime = Runtime(pool, seed)
    for _ in range(200_000):
        if len(runtime.done) == pool.request_count:
            break
        plan = policy.plan(runtime.view)
        running = len(runtime.left) + len(plan.admit)
        reserved = policy.reserved_tokens
        assert reserved <= CAPACITY or running == 1, (reserved, running)
        runtime.step(np.asarray(plan.admit).tolist())


@settings(max_examples=25)
@given(pools())
def test_foresight_never_overfills_memory_when_lengths_are_known(pool: RequestPool) -> None:
    known = np.where(pool.known_tokens == UNKNOWN, 30, pool.known_tokens).astype(np.int32)
    exact = RequestPool(pool.tree, known, np.full(len(known), UNKNOWN, np.int32))
    policy = prepare(exact, COST).policy(capacity_tokens=CAPACITY)
    runtime = Runtime(exact, 0)
    for _ in range(200_000):
        if len(runtime.done) == pool.request_count:
            break
        plan = policy.plan(runtime.view)
        runtime.step(np.asarray(plan.admit).tolist())
        assert len(runtime.view.retracted) == 0
