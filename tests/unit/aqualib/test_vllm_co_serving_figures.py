"""What co-serving says of itself: objectives met, the last plan's budget, the checkpoint lag."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from aqua_schedulers.conserve import (
    CoServedRequest,
    CoServingView,
    Objectives,
    StepLoad,
    StepTimeKey,
    StepTimeProfile,
)
from aqualib.engines.vllm.co_serving.attainment import OnlineAttainment
from aqualib.engines.vllm.co_serving.figures import LAG_READINGS
from aqualib.engines.vllm.co_serving.plan_cache import SETTLED_STEPS
from aqualib.engines.vllm.co_serving.scheduler import CoServing
from aqualib.engines.vllm.options import read_options

if TYPE_CHECKING:
    from pathlib import Path

SERVING: dict[str, Any] = {"ttft_s": 1.0, "tpot_s": 0.1}
KEY = StepTimeKey("m", "e", "g")
SIZE = 16


def request(name: str, *, aqua_class: str = "online", **facts: Any) -> Any:  # noqa: ANN401 - a request of vLLM's
    values = {
        "request_id": name,
        "sampling_params": SimpleNamespace(extra_args={"aqua_class": aqua_class}),
        "priority": 0,
        "arrival_time": 0.0,
        "num_tokens": 100,
        "num_output_tokens": 0,
        "num_output_placeholders": 0,
        "max_tokens": 20,
    }
    return SimpleNamespace(**{**values, **facts})


def co_serving(*, abortable_layers: int | None = None, **options: Any) -> CoServing:  # noqa: ANN401 - options
    return CoServing(
        read_options({"co_serving": {**SERVING, **options}}),
        KEY,
        block_tokens=SIZE,
        is_load_async=True,
        abortable_layers=abortable_layers,
    )


def write_profile(folder: Path) -> None:
    """Of an engine in which a token takes a tenth of a millisecond."""
    profile = StepTimeProfile(**KEY._asdict(), floor_s=0.01, token_s=1e-4, max_tokens=512)
    (folder / KEY.file_name).write_text(profile.model_dump_json())


def view(*running: CoServedRequest) -> CoServingView:
    return CoServingView(
        now_s=1.0,
        free_blocks=100,
        block_count=100,
        max_tokens=512,
        max_running=16,
        running=running,
    )


def step(*names: str) -> Any:  # noqa: ANN401 - the scheduler's output
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1))


def objectives_met(served: CoServing) -> tuple[float, ...]:
    """First tokens, those in time, answers, those in time."""
    totals = served.totals()
    kinds = ("first_tokens", "answers")
    return tuple(totals[f"online_{kind}{which}"] for kind in kinds for which in ("", "_in_time"))


# --- Objectives ------------------------------------------------------------------------------


def test_online_requests_that_meet_an_objective_are_told_from_those_that_miss_it() -> None:
    served = co_serving()
    requests = {name: request(name) for name in ("swift", "late")}
    served.arrived(requests["swift"], 10.0, waited_s=0.4)
    served.arrived(requests["late"], 10.0, waited_s=0.6)
    served.got_tokens(step("swift", "late"), requests, 10.2)
    assert objectives_met(served) == (0, 0, 0, 0), "a part of their prompts"
    for each in requests.values():
        each.num_output_tokens = 1
    served.got_tokens(step("swift", "late"), requests, 10.5)
    assert objectives_met(served) == (2, 1, 0, 0)
    served.got_tokens(step("swift", "late"), requests, 99.0)
    assert objectives_met(served) == (2, 1, 0, 0), "no later token is a first one"
    served.attainment.ended("swift", 11, 11.6, is_left=False)
    assert objectives_met(served) == (2, 1, 1, 0), "ten gaps of 110 ms"
    served.attainment.ended("late", 11, 11.4, is_left=False)
    assert objectives_met(served) == (2, 1, 2, 1), "ten gaps of 90 ms"


def test_an_offline_request_is_judged_by_neither_objective_and_counted_at_its_end() -> None:
    served = co_serving()
    one = request("document", aqua_class="offline", num_output_tokens=1)
    assert served.arrived(one, 0.0, waited_s=50.0)
    served.got_tokens(step("document"), {"document": one}, 900.0)
    assert served.totals()["offline_requests_ended"] == 0
    served.attainment.ended("document", 20, 990.0, is_left=False)
    served.removed("document", 1.0)
    assert served.totals()["offline_requests_ended"] == 1
    assert objectives_met(served) == (0, 0, 0, 0)
    served.arrived(request("person"), 0.0)
    served.removed("person", 1.0)
    assert served.totals()["offline_requests_ended"] == 1


@pytest.mark.parametrize(
    ("first_s", "tokens", "ended_s", "is_left", "met"),
    [
        (None, 1, 0.9, False, (1, 1, 0, 0)),
        (None, 1, 1.1, False, (1, 0, 0, 0)),
        (None, 5, 0.9, False, (1, 1, 1, 1)),
        (None, 0, 0.9, True, (0, 0, 0, 0)),
        (None, 0, 1.1, True, (1, 0, 0, 0)),
        (0.5, 1, 9.0, True, (1, 1, 0, 0)),
        (0.5, 2, 0.65, False, (1, 1, 1, 0)),
        (0.5, 2, 0.65, True, (1, 1, 1, 1)),
        (0.5, 2, 0.75, True, (1, 1, 1, 0)),
    ],
    ids=[
        "all in one step",
        "all in one step that came late",
        "several tokens in one step",
        "left before it was late",
        "left without a token when it was late",
        "left after a token",
        "a slow gap",
        "left within the second gap",
        "left when two gaps were late",
    ],
)
def test_a_request_is_judged_as_far_as_it_got(
    first_s: float | None, tokens: int, ended_s: float, *, is_left: bool, met: tuple[int, ...]
) -> None:
    judged = OnlineAttainment(Objectives(**SERVING))
    judged.arrived("x", 0.0)
    assert judged.awaited({"x": 1, "y": 1}) == {"x"}
    if first_s is not None:
        judged.first_token("x", first_s)
        assert not judged.awaited({"x": 1})
    judged.ended("x", tokens, ended_s, is_left=is_left)
    found = (judged.first_tokens, judged.first_tokens_in_time)
    assert (*found, judged.answers, judged.answers_in_time) == met
    assert not judged.awaited({"x": 1})


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_session_that_waits_for_its_client_misses_nothing(*, has_begun: bool) -> None:
    judged = OnlineAttainment(Objectives(**SERVING))
    judged.arrived("x", 0.0)
    if has_begun:
        judged.first_token("x", 0.5)
    judged.forget("x")
    judged.ended("x", 5, 900.0, is_left=False)
    assert (judged.first_tokens, judged.answers) == (has_begun, 0)


def test_a_request_for_embeddings_has_no_first_token_to_wait_for() -> None:
    served = co_serving()
    assert not served.arrived(request("embed", sampling_params=None), 0.0)
    served.attainment.ended("embed", 0, 900.0, is_left=True)
    assert objectives_met(served) == (0, 0, 0, 0)


# --- Levels ----------------------------------------------------------------------------------


def test_what_the_last_plan_granted_is_shown_with_and_without_a_profile(tmp_path: Path) -> None:
    write_profile(tmp_path)
    for served in (co_serving(), co_serving(step_profile=str(tmp_path))):
        assert served.totals()["offline_granted_tokens"] == 0
        served.arrived(request("document", aqua_class="offline", num_tokens=1000), 0.0)
        plan = served.plan(view())
        served.begun(step("document"), plan)
        totals = served.totals()
        assert totals["offline_granted_tokens"] == plan.offline_tokens["document"] > 1
        assert totals["offline_limit_seconds"] == plan.limit_s == pytest.approx(0.1)


def test_what_offline_tokens_cost_answers_is_shown(tmp_path: Path) -> None:
    write_profile(tmp_path)
    served = co_serving(step_profile=str(tmp_path))
    assert served.totals()["offline_step_excess"] == 0.0
    answer = StepLoad().and_decode(100)
    for load, seconds in ((answer, 0.02), (answer.and_decode(100), 0.03)):
        served.policy.times.paced(answer, load, seconds)
    assert served.totals()["offline_step_excess"] > 0.0


def test_a_step_without_a_limit_shows_none(tmp_path: Path) -> None:
    write_profile(tmp_path)
    served = co_serving(abortable_layers=4, policy="conserve", step_profile=str(tmp_path))
    assert served.aborts is not None
    served.aborts.page_opened(by_all=True)
    served.arrived(request("document", aqua_class="offline", num_tokens=1000), 0.0)
    served.begun(step("document"), served.plan(view()))
    assert served.totals()["offline_granted_tokens"] == 512
    assert served.totals()["offline_limit_seconds"] == 0.0
    served.aborts.close()


class Store:
    """A store that has acknowledged so many blocks."""

    def __init__(self, copied: int) -> None:
        self.copied = copied

    def saved_tokens(self, request_id: str) -> int:
        assert request_id
        return self.copied * SIZE

    def copied_blocks(self, request: Any, blocks: range) -> tuple[int, bool]:  # noqa: ANN401 - vLLM's
        assert request.request_id
        return min(self.copied, len(blocks)), True


def lag(served: CoServing) -> float:
    return served.totals()["checkpoint_lag_blocks"]


def test_blocks_lag_behind_until_their_copy_is_acknowledged_and_while_their_request_runs() -> None:
    served = co_serving()
    both = [request(name, aqua_class="offline") for name in ("a", "b")]
    person = request("person")
    for each in (*both, person):
        served.arrived(each, 0.0)
    assert lag(served) == 0
    for each in both:
        served.admitted(each.request_id)
    seen = [
        served.view(each, computed_tokens=computed, held_blocks=7)
        for each, computed in zip((*both, person), (96, 47, 96), strict=True)
    ]
    served.plan(view(*seen))
    assert lag(served) == 6 + 2, "the full ones of both"
    served.copy_begun("a", 5)
    served.settle_copies(Store(0), {"a": both[0]})
    assert {lag(served) for _ in range(LAG_READINGS + 1)} == {8}, "only begun"
    served.settle_copies(Store(4), {"a": both[0]})
    assert [lag(served) for _ in range(LAG_READINGS)][-1] == 2 + 2
    served.preempted(both[0], Store(4), 1.0)
    assert lag(served) == 2, "one that waits lags at nothing"
    served.removed("b", 1.0)
    assert lag(served) == 0


# --- When they are read ----------------------------------------------------------------------


def decoding() -> tuple[CoServing, Any, Any]:
    """An online request that decodes, and an offline one that holds memory beside it."""
    person, document = (
        request(name, aqua_class=aqua_class, num_tokens=101, num_output_tokens=1)
        for name, aqua_class in (("person", "online"), ("document", "offline"))
    )
    served = co_serving()
    for each in (person, document):
        served.arrived(each, 0.0)
    served.admitted("document")
    return served, person, document


def is_told(served: CoServing) -> bool:
    return served.is_told


def test_figures_are_read_once_while_one_plan_serves_on_and_when_something_happens() -> None:
    served, person, document = decoding()
    seen = view(
        *(served.view(each, computed_tokens=100, held_blocks=7) for each in (person, document))
    )
    served.begun(step("person"), served.plan(seen))
    assert not is_told(served), "this plan's levels"
    served.totals()
    for _ in range(2):
        assert is_told(served)
        for _ in range(SETTLED_STEPS):
            assert served.settled_plan(100, 2, 0.0) is not None
            assert is_told(served)
        assert served.settled_plan(100, 2, 0.0) is None
        served.plan(seen)
    served.got_tokens(step("person"), {"person": person}, 0.5)
    assert not is_told(served), "its first token was on its way"
    served.totals()
    assert is_told(served)
    served.removed("document", 1.0)
    assert not is_told(served)
    served.totals()
    served.plan(view(seen.running[0]))
    assert not is_told(served), "the next plan's levels"


def test_a_lag_is_counted_anew_when_figures_may_be_read_no_more_for_long() -> None:
    served, person, document = decoding()
    views = [served.view(each, computed_tokens=90, held_blocks=7) for each in (person, document)]
    served.plan(view(*views))
    assert lag(served) == 5
    views = [served.view(each, computed_tokens=100, held_blocks=7) for each in (person, document)]
    served.plan(view(*views))
    assert lag(served) == 6
