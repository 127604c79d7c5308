"""Fair policies, decision by decision."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from aqua_protocol.errors import ConfigError
from aqua_schedulers.cfs import (
    Decision,
    EngineView,
    FairPolicy,
    FairSettings,
    PagingRates,
    PagingTier,
    PolicyName,
    Preemption,
    PreemptionMode,
    RequestView,
    TenantAccounts,
    TenantSettings,
    policy_named,
)
from aqua_schedulers.cfs.tenants import LEAST_WEIGHT, MOST_WEIGHT
from harness.paged_engine import PagedEngine, Request

SWAP, RECOMPUTE = PreemptionMode.SWAP, PreemptionMode.RECOMPUTE


def fair(name: PolicyName = PolicyName.CFS, **changes: Any) -> FairPolicy:  # noqa: ANN401 - fields of a view or of settings
    return policy_named(name, FairSettings(**{"slice_iterations": 2, **changes}), block_tokens=4)


def seen(
    running: Sequence[RequestView] = (),
    free: int = 0,
    budget: int = 16,
    **changes: Any,  # noqa: ANN401 - fields of a view or of settings
) -> EngineView:
    view = EngineView(
        free_blocks=free,
        token_budget=budget,
        max_running=8,
        running_count=len(running),
        running=lambda: running,
    )
    return view._replace(**changes)


def running_one(policy: FairPolicy, name: str, **state: Any) -> RequestView:  # noqa: ANN401 - fields of a view or of settings
    """A request that was let in, and now looks like this."""
    policy.added(RequestView(name, 0.0, 8, missing_blocks=2))
    policy.admitted(name)
    return RequestView(name, 0.0, 8)._replace(**state)


def decoding(policy: FairPolicy, name: str, output: int, blocks: int = 4) -> RequestView:
    return running_one(
        policy, name, output_tokens=output, computed_tokens=7 + output, held_blocks=blocks
    )


def after_slice(policy: FairPolicy, view: EngineView) -> Decision:
    """Let a whole slice pass, then ask."""
    for _ in range(2):
        asked = policy.begin_step()
    assert asked
    return policy.decide(view)


def test_a_waiting_prompt_takes_the_place_of_the_most_served_decode() -> None:
    policy = fair(PolicyName.LEAST_SERVED)
    running = [decoding(policy, "a", 9), decoding(policy, "b", 3)]
    policy.added(RequestView("c", 1.0, 8, missing_blocks=2))
    decision = after_slice(policy, seen(running))
    assert decision == Decision(preempt=(Preemption("a", SWAP),), admit=("c",))


def test_nobody_is_put_out_within_a_slice_but_free_memory_is_given_away() -> None:
    policy = fair(slice_iterations=5)
    running = [decoding(policy, "a", 9)]
    policy.added(RequestView("c", 1.0, 8, missing_blocks=2))
    after_slice(policy, seen(running))
    policy.added(RequestView("d", 2.0, 8, missing_blocks=2))
    assert policy.begin_step()
    assert policy.decide(seen(running)).preempt == ()
    policy.removed("a")
    assert policy.begin_step()
    decision = policy.decide(seen((), free=20))
    assert decision == Decision(admit=("c", "d"))


def test_nothing_is_asked_while_nobody_is_outside() -> None:
    policy = fair()
    decoding(policy, "a", 9)
    assert not any(policy.begin_step() for _ in range(100))


def test_within_a_slice_the_last_decision_stands() -> None:
    policy = fair(slice_iterations=5)
    running = [decoding(policy, "a", 1)]
    policy.added(RequestView("b", 1.0, 400, missing_blocks=100))
    for _ in range(5):
        asked = policy.begin_step()
    assert asked
    policy.decide(seen(running))
    assert [policy.begin_step() for _ in range(5)] == [False] * 4 + [True]


def test_prompts_share_what_decodes_leave_of_the_budget_and_decodes_take_the_rest_of_memory() -> (
    None
):
    policy = fair()
    # 2 decodes leave 14 of 16 tokens, 28 over a slice of 2: prompts of 20 and 20 reach it.
    running = [decoding(policy, "a", 9, blocks=10), decoding(policy, "b", 30, blocks=10)]
    for name in "cde":
        policy.added(RequestView(name, 1.0, 20, missing_blocks=5))
    policy.preempted(decoding(policy, "f", 5)._replace(missing_blocks=4, held_blocks=0))
    decision = after_slice(policy, seen(running, free=9))
    # Room for 29: two prompts with growth 12, then f (5) and a (11); nothing is left for e or b.
    assert decision == Decision(preempt=(Preemption("b", SWAP),), admit=("f", "c", "d"))


def test_a_request_is_not_put_out_before_it_got_further() -> None:
    policy = fair()
    running = [decoding(policy, "a", 9)]
    policy.added(RequestView("b", 1.0, 8, missing_blocks=2))
    after_slice(policy, seen(running))
    policy.preempted(RequestView("a", 0.0, 8, output_tokens=9, missing_blocks=5))
    policy.admitted("b")
    policy.removed("b")
    policy.admitted("a")
    policy.added(RequestView("c", 2.0, 8, missing_blocks=2))
    computing = RequestView("a", 0.0, 8, output_tokens=9, computed_tokens=12, held_blocks=5)
    assert after_slice(policy, seen([computing])) == Decision()
    further = computing._replace(output_tokens=10, computed_tokens=17)
    assert after_slice(policy, seen([further])).preempt == (Preemption("a", SWAP),)


def test_a_pinned_request_is_not_put_out() -> None:
    policy = fair()
    running = [decoding(policy, "a", 9)._replace(is_pinned=True)]
    policy.added(RequestView("b", 1.0, 8, missing_blocks=2))
    assert after_slice(policy, seen(running)) == Decision()


def test_tensors_in_host_memory_make_it_first_come_first_served() -> None:
    policy = fair(fcfs_on_host=True)
    running = [decoding(policy, "a", 9)]
    policy.added(RequestView("b", 2.0, 8, missing_blocks=2))
    policy.added(RequestView("c", 1.0, 8, missing_blocks=2))
    policy.begin_step()
    on_host = policy.decide(seen(running, free=2, location=PagingTier.HOST))
    assert on_host == Decision(admit=("c", "b"))
    policy.added(RequestView("d", 3.0, 8, missing_blocks=2))
    back = after_slice(policy, seen(running))
    assert back.preempt == (Preemption("a", SWAP),)


@pytest.mark.parametrize(("link", "expected"), [(1e9, SWAP), (1e6, RECOMPUTE)])
def test_a_victim_is_swapped_or_recomputed_by_what_costs_less(
    link: float, expected: PreemptionMode
) -> None:
    policy = fair()
    running = [decoding(policy, "a", 9)]
    policy.added(RequestView("b", 1.0, 8, missing_blocks=2))
    # 16 tokens at 1,000/s are 16 ms; 4 blocks of 100 kB out and in are 0.8 ms or 800 ms.
    rates = PagingRates(link, block_bytes=100_000, prefill_tokens_per_s=1000.0)
    assert after_slice(policy, seen(running, rates=rates)).preempt == (Preemption("a", expected),)


def test_a_checkpointed_victim_costs_only_its_way_back() -> None:
    rates = PagingRates(1e6, block_bytes=10_000, prefill_tokens_per_s=1000.0)
    view = RequestView("a", 0.0, 50, 1, 50, held_blocks=4)
    assert rates.cheaper_mode(view) is RECOMPUTE
    assert rates.cheaper_mode(view, saved_blocks=4) is SWAP


def test_the_longest_contexts_are_swapped_where_the_store_lacks_room() -> None:
    policy = fair()
    running = [decoding(policy, "b", 8), decoding(policy, "a", 9)]
    policy.added(RequestView("c", 1.0, 24, missing_blocks=6))
    decision = after_slice(policy, seen(running, store_room_blocks=5))
    assert decision.preempt == (
        Preemption("a", SWAP),
        Preemption("b", RECOMPUTE),
    )


def test_nothing_is_swapped_to_nowhere() -> None:
    policy = fair()
    running = [decoding(policy, "a", 9)]
    policy.added(RequestView("b", 1.0, 8, missing_blocks=2))
    decision = after_slice(policy, seen(running, location=PagingTier.NOWHERE))
    assert decision.preempt == (Preemption("a", RECOMPUTE),)


def test_twice_the_weight_gets_twice_the_tokens() -> None:
    heavy = [Request(f"h{i}", 0, 4, 10_000, weight=2.0) for i in range(4)]
    light = [Request(f"l{i}", 0, 4, 10_000) for i in range(4)]
    engine = PagedEngine(fair(), [], block_count=400, max_running=3)
    for request in (*heavy, *light):
        engine.outside[request.name] = request
        engine.policy.added(engine.view(request))
    for _ in range(800):
        engine.advance()
        engine.step += 1
    tokens = [sum(each.emitted for each in kind) for kind in (heavy, light)]
    assert tokens[0] / tokens[1] == pytest.approx(2.0, rel=0.1)


def test_a_prompt_counts_as_service() -> None:
    policy = fair()
    running = [decoding(policy, "a", 9), decoding(policy, "b", 3)._replace(prompt_tokens=100)]
    policy.added(RequestView("c", 1.0, 8, missing_blocks=2))
    decision = after_slice(policy, seen(running))
    assert decision == Decision(preempt=(Preemption("b", SWAP),), admit=("c",))


def test_who_was_ahead_does_not_wait_for_everyone_who_comes_later() -> None:
    ends: dict[PolicyName, int] = {}
    for name in (PolicyName.CFS, PolicyName.LEAST_SERVED):
        long = Request("long", 0, 4, 120)
        short = [Request(f"s{index}", 10 + 2 * index, 4, 20) for index in range(100)]
        PagedEngine(fair(name), [long, *short], block_count=64).run()
        assert long.last_step is not None
        ends[name] = long.last_step
    assert ends[PolicyName.CFS] * 1.5 < ends[PolicyName.LEAST_SERVED]


def test_first_token_first_lets_equals_finish_one_after_another() -> None:
    requests = [Request(f"r{i}", 0, 8, 200) for i in range(12)]
    outs = {}
    for name in (PolicyName.LEAST_SERVED, PolicyName.FIRST_TOKEN):
        copies = [Request(each.name, 0, 8, 200) for each in requests]
        engine = PagedEngine(fair(name), copies, block_count=160)
        engine.run()
        outs[name] = sum(each.outs for each in copies)
        assert max(each.first_step for each in copies if each.first_step is not None) < 60
    assert outs[PolicyName.FIRST_TOKEN] * 5 < outs[PolicyName.LEAST_SERVED]


def test_a_request_larger_than_what_growth_leaves_still_comes_in_alone() -> None:
    policy = fair()
    policy.added(RequestView("a", 0.0, 40, missing_blocks=10))
    policy.begin_step()
    assert policy.decide(seen(free=10)).admit == ("a",)


def test_best_is_a_name_of_ours() -> None:
    assert PolicyName.named("best") is PolicyName.FIRST_TOKEN


def test_unknown_names_and_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="no policy named 'lifo'"):
        policy_named("lifo")
    with pytest.raises(ValidationError, match="slice_iterations"):
        FairSettings(slice_iterations=0)


def test_first_token_first_pays_for_recomputation_with_prompts_let_in() -> None:
    policy = fair(PolicyName.FIRST_TOKEN)
    running = [decoding(policy, name, 20) for name in "ab"]
    policy.added(RequestView("p", 1.0, 8, missing_blocks=2))
    nowhere = seen(running, location=PagingTier.NOWHERE)
    # Two prompts of 8 tokens were let in (a and b themselves): one context of 27 may go ...
    assert after_slice(policy, nowhere).preempt == (Preemption("b", RECOMPUTE),)
    policy.preempted(RequestView("b", 0.0, 8, output_tokens=20, missing_blocks=7))
    policy.admitted("p")
    policy.added(RequestView("q", 2.0, 8, missing_blocks=2))
    running = [running[0], RequestView("p", 1.0, 8, 1, 8, held_blocks=3)]
    # ... and then none, except to a store.
    assert after_slice(policy, seen(running, location=PagingTier.NOWHERE)) == Decision()
    slow = PagingRates(1.0, block_bytes=1000, prefill_tokens_per_s=1000.0)
    swapped = after_slice(policy, seen(running, rates=slow)).preempt
    assert [each.mode for each in swapped] == [SWAP]


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), 1e-320, LEAST_WEIGHT / 2, 1e308])
def test_a_weight_that_would_blur_what_others_are_served_is_refused(weight: float) -> None:
    with pytest.raises(ValidationError, match="weights are from"):
        TenantSettings(weights={"a": weight})
    with pytest.raises(ValidationError):
        TenantSettings(default_weight=weight)
    TenantSettings(weights={"a": LEAST_WEIGHT, "b": MOST_WEIGHT})


def test_single_tokens_count_behind_the_lightest_tenant() -> None:
    accounts = TenantAccounts(TenantSettings(weights={"light": LEAST_WEIGHT}))
    requests = [
        RequestView("alone", 0.0, prompt_tokens=10**9, tenant="light"),
        RequestView("a", 1.0, prompt_tokens=1, tenant="a"),
        RequestView("b", 1.0, prompt_tokens=2, tenant="b"),
    ]
    accounts.added(requests[0])
    accounts.admitted("alone")
    accounts.removed("alone", 0, was_waiting=False)
    for request in requests[1:]:
        accounts.added(request)
    accounts.begin_decision([])
    for request in requests[1:]:
        accounts.admitted(request.request_id)
    assert accounts.counters["a"] < accounts.counters["b"]
