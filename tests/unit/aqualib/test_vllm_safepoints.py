"""Where a worker stops a step, and what an engine tells it of that."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from aqua_protocol import TransportError
from aqua_schedulers.conserve import CoServedRequest, CoServingPlan, ServiceClass
from aqualib.engines.vllm.co_serving import step_aborts
from aqualib.engines.vllm.co_serving.abort_page import AbortPage
from aqualib.engines.vllm.co_serving.safepoints import SafepointOrder, Safepoints, StepAbortedError
from aqualib.engines.vllm.co_serving.step_aborts import EXPECTED_S, MAX_FRUITLESS_ABORTS, StepAborts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CPU = torch.device("cpu")


@pytest.fixture
def page() -> Iterator[AbortPage]:
    with AbortPage.create() as page:
        yield page


def layers_until_abort(safepoints: Safepoints, most: int = 100) -> int:
    """Layers that are launched before the step stops."""
    for layer in range(most):
        try:
            safepoints.passed()
        except StepAbortedError:
            return layer
    return most


@pytest.mark.parametrize(("every", "found"), [(1, 4), (3, 6), (8, 8)])
def test_a_step_stops_at_the_next_safepoint(page: AbortPage, every: int, found: int) -> None:
    safepoints = Safepoints(0, 1, CPU)
    safepoints.begin(SafepointOrder(7, page.place, every))
    assert layers_until_abort(safepoints, 4) == 4
    page.ask(7)
    assert 4 + layers_until_abort(safepoints) == found
    assert safepoints.is_unwinding
    assert safepoints.take_aborted() == 0, "its output is lost"
    safepoints.is_unwinding = False
    assert [safepoints.take_aborted(), safepoints.take_aborted()] == [7, 0]
    safepoints.close()


def test_a_step_without_an_order_and_one_after_that_which_was_asked_for_run_through(
    page: AbortPage,
) -> None:
    safepoints = Safepoints(0, 1, CPU)
    page.ask(1)
    safepoints.begin(None)
    assert layers_until_abort(safepoints) == 100
    safepoints.begin(SafepointOrder(2, page.place, 1))
    assert layers_until_abort(safepoints) == 100
    safepoints.close()


def test_ranks_stop_before_the_same_layer(page: AbortPage) -> None:
    first, second = Safepoints(0, 2, CPU), Safepoints(1, 2, CPU)
    for each in (first, second):
        each.begin(SafepointOrder(1, page.place, 2))
    assert layers_until_abort(first, 4) == 4
    page.ask(1)
    assert layers_until_abort(first) == 0
    assert layers_until_abort(second) == 4, "not before: the first rank went on there"
    for each in (first, second):
        each.close()


def test_a_worker_that_cannot_open_the_page_says_so_once_and_runs_steps_through(
    caplog: pytest.LogCaptureFixture,
) -> None:
    safepoints = Safepoints(0, 1, CPU)
    with caplog.at_level(logging.WARNING, "aqualib"):
        for step in (1, 2):
            safepoints.begin(SafepointOrder(step, "/proc/0/fd/0", 1))
            assert layers_until_abort(safepoints) == 100
    assert len(caplog.records) == 1


@pytest.mark.parametrize("rank_count", [1, 2])
def test_a_worker_that_is_to_open_the_page_says_whether_it_has_it_and_stops_nowhere(
    page: AbortPage, rank_count: int
) -> None:
    for place, has_page in ((page.place, True), ("/proc/0/fd/0", False)):
        safepoints = Safepoints(rank_count - 1, rank_count, CPU)
        assert safepoints.take_page() is None
        safepoints.begin(SafepointOrder(0, place, 1))
        assert not safepoints.has_order
        assert layers_until_abort(safepoints) == 100
        assert [safepoints.take_page(), safepoints.take_page()] == [has_page, None]
        safepoints.close()


def test_one_of_several_ranks_that_cannot_open_the_page_ends_instead_of_waiting_for_ever() -> None:
    safepoints = Safepoints(1, 2, CPU)
    with pytest.raises(TransportError, match="/proc/0/fd/0"):
        safepoints.begin(SafepointOrder(1, "/proc/0/fd/0", 1))


# --- The engine's side -----------------------------------------------------------------------


def plan(expected_s: float = float("inf")) -> CoServingPlan:
    return CoServingPlan(offline_tokens={"a": 5}, is_preemptible=True, expected_s=expected_s)


def arrival(name: str, now_s: float = 0.0) -> CoServedRequest:
    return CoServedRequest(name, ServiceClass.ONLINE, now_s, 10)


class Policy:
    """Aborts whatever is not being aborted; remembers who waited."""

    def __init__(self) -> None:
        self.waiting: list[list[str]] = []

    def __call__(self, step: Any, waiting: Sequence[CoServedRequest], now_s: float) -> bool:  # noqa: ANN401 - a step
        self.waiting.append([each.request_id for each in waiting])
        assert now_s >= 0.0
        return not step.is_aborting


@pytest.fixture
def aborts() -> Iterator[StepAborts]:
    made = StepAborts(Policy(), layer_count=32, every_layers=None)
    made.page_opened(by_all=True)
    yield made
    made.close()


def begin(aborts: StepAborts, *names: str) -> SafepointOrder | None:
    tokens = dict.fromkeys(names, 5)
    order = aborts.order(names, plan())
    if order is not None:
        aborts.begun(order, tokens, frozenset({1}), plan())
    return order


def is_asked(order: SafepointOrder) -> bool:
    with AbortPage.open(order.place) as page:
        return page.is_asked(order.step)


def test_an_arrival_aborts_the_step_under_way_and_no_later_one(aborts: StepAborts) -> None:
    first = begin(aborts, "a")
    assert first is not None
    assert not is_asked(first)
    aborts.heard(arrival("x"), 0.0)
    assert is_asked(first)
    assert aborts.is_expecting(0.1), "no step without it begins now"
    step = aborts.ended(is_aborted=True)
    assert step is not None
    assert step.written_blocks == {1}
    aborts.arrived("x")
    assert not aborts.is_expecting(0.1)
    second = begin(aborts, "a")
    assert second is not None
    assert not is_asked(second)
    counts = aborts.counts
    assert (counts.aborts, counts.tokens, counts.arrivals) == (1, 5, 1)
    assert counts.most_per_arrival == 1


def test_two_arrivals_abort_a_step_once(aborts: StepAborts) -> None:
    order = begin(aborts, "a")
    assert order is not None
    aborts.heard(arrival("x"), 0.0)
    aborts.heard(arrival("y"), 0.0)
    aborts.ended(is_aborted=True)
    assert aborts.counts.aborts == 1


def test_who_arrives_while_a_step_is_being_scheduled_aborts_it(aborts: StepAborts) -> None:
    order = aborts.order(["a"], plan())
    assert order is not None
    aborts.heard(arrival("x"), 0.0)
    aborts.begun(order, {"a": 5}, frozenset(), plan())
    assert is_asked(order)


def test_aborts_are_counted_for_the_arrival_that_has_most_of_them(aborts: StepAborts) -> None:
    """None has two, as the scheduler begins no step while one is expected; here it does."""
    begin(aborts, "a")
    aborts.heard(arrival("x"), 0.0)
    aborts.ended(is_aborted=True)
    begin(aborts, "b")
    aborts.ended(is_aborted=True)
    for name in ("x", "y"):
        aborts.arrived(name)
    begin(aborts, "c")
    aborts.heard(arrival("y"), 0.0)
    assert aborts.counts.most_per_arrival == 2


def test_who_arrives_at_an_engine_that_ends_aborts_nothing(aborts: StepAborts) -> None:
    begin(aborts, "a")
    aborts.close()
    aborts.heard(arrival("x"), 0.0)
    assert aborts.counts.most_per_arrival == 0


def test_what_never_comes_is_not_waited_for_for_ever(aborts: StepAborts) -> None:
    aborts.heard(arrival("x", 5.0), 5.0)
    assert aborts.is_expecting(5.0 + EXPECTED_S)
    assert not aborts.is_expecting(5.1 + EXPECTED_S)


def test_requests_that_were_aborted_again_and_again_run_through_once(aborts: StepAborts) -> None:
    for _ in range(MAX_FRUITLESS_ABORTS):
        assert begin(aborts, "a", "b") is not None
        aborts.ended(is_aborted=True)
    assert begin(aborts, "b", "c") is None
    assert aborts.ended(is_aborted=False) is None, "nothing that could be aborted was under way"
    assert begin(aborts, "c") is not None
    aborts.ended(is_aborted=False)
    aborts.got_somewhere(["b"])
    assert begin(aborts, "b") is not None


@pytest.mark.parametrize(
    ("expected_s", "given", "layers"),
    [(float("inf"), None, 1), (0.032, None, 5), (10.0, None, 1), (0.001, None, 32), (10.0, 7, 7)],
)
def test_safepoints_are_as_far_apart_as_their_time_says(
    expected_s: float, given: int | None, layers: int
) -> None:
    aborts = StepAborts(Policy(), layer_count=32, every_layers=given)
    aborts.page_opened(by_all=True)
    order = aborts.order(["a"], plan(expected_s))
    assert order is not None
    assert order.every_layers == layers
    aborts.close()


def test_an_abort_is_counted_beside_the_interval_of_its_safepoints(aborts: StepAborts) -> None:
    for expected_s, layers in ((0.032, 5), (0.064, 2)):
        order = aborts.order(["a"], plan(expected_s))
        assert order is not None
        assert order.every_layers == layers
        aborts.begun(order, {"a": 5}, frozenset({1}), plan(expected_s))
        aborts.ended(is_aborted=layers == 2)
    assert aborts.counts.safepoint_s == pytest.approx(0.004), "two of 32 layers, of one step"


def test_a_step_of_more_tokens_than_the_last_has_its_safepoints_closer(
    aborts: StepAborts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing predicts it; the last took 10 ms for 5 tokens."""
    now_s = 0.0
    monkeypatch.setattr(step_aborts, "time", SimpleNamespace(monotonic=lambda: now_s))
    begin(aborts, "a")
    now_s = 0.01
    aborts.ended(is_aborted=False)
    for tokens, layers in ((5, 16), (4, 16), (20, 4), (5000, 1)):
        order = aborts.order(["a"], plan()._replace(offline_tokens={"a": tokens}))
        assert order is not None
        assert order.every_layers == layers, tokens
