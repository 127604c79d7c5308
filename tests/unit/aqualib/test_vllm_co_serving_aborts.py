"""Co-serving's half without an engine: steps that may be aborted, and those that may not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from aqua_schedulers.conserve import CoServedRequest, CoServingPlan, MeasuredStep, ServiceClass
from aqualib.engines.vllm.co_serving.abort_page import AbortPage
from aqualib.engines.vllm.co_serving.step_aborts import MAX_FRUITLESS_ABORTS
from harness.co_served_engine import chunk, co_serving, offline, profiled, request, view

if TYPE_CHECKING:
    from pathlib import Path

    from aqualib.engines.vllm.co_serving.safepoints import SafepointOrder
    from aqualib.engines.vllm.co_serving.scheduler import CoServing


@pytest.mark.parametrize(
    ("layers", "every", "longest_s"), [(8, None, 0.2), (8, 2, 0.1), (3, 8, 0.042), (80, None, 0.53)]
)
def test_a_calm_step_is_bounded_by_the_layers_at_which_it_may_stop(
    layers: int, every: int | None, longest_s: float, tmp_path: Path
) -> None:
    """Two of its safepoints take a twentieth of a second; 32 tokens it has in any case."""
    serving = profiled(tmp_path, safepoint_layers=every)
    policy = co_serving(abortable_layers=layers, co_serving=serving).policy
    policy.added(CoServedRequest("a", ServiceClass.OFFLINE, 0.0, 900), 0.0)
    assert 0.9 * longest_s < policy.plan(view()).expected_s <= longest_s


def test_a_step_that_can_be_aborted_keeps_to_a_budget_and_says_where_it_may_stop() -> None:
    served = co_serving(abortable_layers=4)
    served.arrived(offline("a", num_tokens=1000), 0.0)
    plan = served.plan(view())
    assert plan.offline_tokens == {"a": 64}, "nothing predicts it"
    order = served.safepoints_of({"a": 64})
    assert order is not None
    output = SimpleNamespace(num_scheduled_tokens={"a": 64})
    served.begun(output, plan, written_blocks=lambda: frozenset({3}))
    assert served.aborts is not None
    assert served.aborts.under_way is not None
    assert served.aborts.under_way.written_blocks == {3}
    served.heard(offline("b", prompt_token_ids=[1]), 0.5)
    served.heard(request("x", prompt_token_ids=[1, 2]), 0.5)
    with AbortPage.open(order.place) as page:
        assert page.is_asked(order.step)
    served.aborts.ended(is_aborted=True)
    served.aborted(output)
    assert served.totals()["step_aborts"] == served.totals()["online_arrivals"] == 1
    assert served.totals()["step_aborts_late"] == 1, "asked for in the first second of the clock"
    assert served.totals()["co_serving_without_aborts"] == 0.0
    assert not served.totals()["offline_tokens"], "nothing of it counts"
    served.aborts.close()


def test_no_step_without_an_online_request_begins_while_one_is_coming() -> None:
    served = co_serving(abortable_layers=4)
    served.arrived(offline("a", num_tokens=1000), 0.0)
    coming = request("x", prompt_token_ids=[1, 2])
    served.heard(coming, 1.0)
    for _ in range(5):
        served.begin()
        plan = served.plan(view())
        assert not plan.offline_tokens
        assert not plan.admit
        assert served.tokens is not None
        assert served.tokens.take("a", 9, is_offline=True, is_inside=True) == 0
        assert served.safepoints_of({}) is None
        served.begun(SimpleNamespace(num_scheduled_tokens={}), plan)
    served.arrived(coming, 1.0)
    served.begin()
    assert served.plan(view()).offline_tokens == {"a": 64}
    assert served.aborts is not None
    served.aborts.close()


def test_a_step_that_online_requests_share_is_not_aborted() -> None:
    served = co_serving(abortable_layers=4)
    served.arrived(offline("a", num_tokens=1000), 0.0)
    served.plan(view())
    assert served.safepoints_of({"a": 512, "x": 1}) is None
    assert served.aborts is not None
    served.aborts.close()


def step_of(served: CoServing, *, aborts: bool) -> tuple[CoServingPlan, SafepointOrder | None]:
    """A step of what is offline, which ends or is aborted."""
    served.begin()
    plan = served.plan(view())
    output = SimpleNamespace(num_scheduled_tokens=dict(plan.offline_tokens))
    order = served.safepoints_of(output.num_scheduled_tokens)
    served.begun(output, plan)
    assert served.aborts is not None
    served.aborts.ended(is_aborted=aborts)
    if aborts:
        served.aborted(output)
    else:
        served.ended(output, MeasuredStep(chunk(output), plan.expected_s), 1.0)
    return plan, order


def test_a_step_whose_requests_were_aborted_twice_is_short_runs_through_and_may_be_aborted_again(
    tmp_path: Path,
) -> None:
    served = co_serving(abortable_layers=80, co_serving=profiled(tmp_path))
    served.arrived(offline("a", num_tokens=1000), 0.0)
    for _ in range(MAX_FRUITLESS_ABORTS):
        plan, order = step_of(served, aborts=True)
        assert plan.expected_s > 0.2
        assert order is not None
    assert served.totals()["step_aborts_late"] == 0, "nobody waited"
    plan, order = step_of(served, aborts=False)
    assert order is None
    assert 0.08 < plan.expected_s <= 0.1, "a tenth of a second"
    plan, order = step_of(served, aborts=False)
    assert plan.expected_s > 0.2
    assert order is not None
    assert served.aborts is not None
    served.aborts.close()


def test_no_step_may_be_aborted_before_all_ranks_have_the_page(tmp_path: Path) -> None:
    served = co_serving(abortable_layers=80, has_page=None, co_serving=profiled(tmp_path))
    assert served.safepoints_of({}) is None, "no rank runs anything"
    order = served.safepoints_of({"person": 1})
    assert order is not None
    assert order.step == 0
    served.arrived(offline("a", num_tokens=1000), 0.0)
    plan, order = step_of(served, aborts=False)
    assert plan.expected_s <= 0.1
    assert order is not None
    assert order.step == 0
    assert served.aborts is not None
    assert served.aborts.under_way is None
    assert served.totals()["co_serving_without_aborts"] == 0.0
    served.aborts.page_opened(by_all=True)
    plan, order = step_of(served, aborts=False)
    assert plan.expected_s > 0.2
    assert order is not None
    assert order.step == 1
    served.aborts.close()


def test_an_engine_with_a_rank_that_has_no_page_serves_by_budgets_alone_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = co_serving(abortable_layers=80, has_page=False, co_serving=profiled(tmp_path))
    assert "budgets alone" in caplog.text
    assert served.totals()["co_serving_without_aborts"] == 1.0
    served.arrived(offline("a", num_tokens=1000), 0.0)
    for _ in range(3):
        plan, order = step_of(served, aborts=False)
        assert plan.expected_s <= 0.1
        assert order is None
    assert served.aborts is not None
    served.aborts.close()


def test_a_step_that_can_be_aborted_and_takes_too_long_is_an_overrun() -> None:
    served = co_serving(abortable_layers=80)
    served.arrived(offline("a", num_tokens=1000), 0.0)
    for seconds, overruns, tokens in ((0.05, 0, 65), (9.0, 1, 32)):
        served.begin()
        plan = served.plan(view())
        output = SimpleNamespace(num_scheduled_tokens=dict(plan.offline_tokens))
        served.begun(output, plan)
        served.ended(output, MeasuredStep(chunk(output), seconds), 1.0)
        assert served.totals()["co_serving_overruns"] == overruns
        assert served.totals()["offline_budget_tokens"] == tokens
    assert served.aborts is not None
    served.aborts.close()
