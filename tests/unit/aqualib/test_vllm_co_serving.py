"""Co-serving's half without an engine: classes, tokens of a step, books of checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import pytest

from aqua_protocol import ConfigError
from aqua_protocol.errors import RequestInvalidError
from aqua_schedulers.conserve import (
    CoServedRequest,
    CoServingView,
    MeasuredStep,
    StepLoad,
    StepTimeKey,
    StepTimeProfile,
)
from aqualib.engines.vllm.co_serving.plan_cache import SETTLED_STEPS
from aqualib.engines.vllm.co_serving.scheduler import CoServing
from aqualib.engines.vllm.co_serving.step_tokens import StepTokens
from aqualib.engines.vllm.options import read_options
from aqualib.engines.vllm.requests.body import with_xargs
from aqualib.engines.vllm.requests.priority import UrgentPriority
from aqualib.engines.vllm.requests.service_class import (
    XARG,
    class_choice,
    service_class_of,
)
from harness.co_served_engine import (
    SERVING,
    chunk,
    co_serving,
    offline,
    profiled,
    request,
    told,
    view,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Store:
    """Blocks that are saved, and whether more are coming."""

    def __init__(self, tokens: int = 0, *, copied: int = 0, is_coming: bool = True) -> None:
        self.tokens, self.copied, self.is_coming = tokens, copied, is_coming

    def saved_tokens(self, request_id: str) -> int:
        return self.tokens if request_id else 0

    def copied_blocks(self, request: Any, blocks: range) -> tuple[int, bool]:  # noqa: ANN401
        assert request.request_id
        return min(self.copied, len(blocks)), self.is_coming


@pytest.mark.parametrize(
    ("facts", "urgent", "found"),
    [
        ({}, "lower", "online"),
        ({"priority": 1}, "lower", "offline"),
        ({"priority": 1}, "higher", "online"),
        ({"priority": -10}, "higher", "offline"),
        ({"priority": -10}, "lower", "online"),
        ({"sampling_params": told(aqua_class="offline")}, "lower", "offline"),
        ({"sampling_params": told(aqua_class="online"), "priority": 9}, "lower", "online"),
        ({"sampling_params": told(aqua_class="batch"), "priority": 9}, "lower", "offline"),
        ({"sampling_params": told(aqua_class=[1])}, "lower", "online"),
        ({"sampling_params": None}, "lower", "online"),
    ],
)
def test_a_request_says_its_class_or_its_priority_does(
    facts: dict[str, Any], urgent: str, found: str
) -> None:
    assert service_class_of(request(**facts), UrgentPriority(urgent)) == found


@pytest.mark.parametrize(
    ("body", "header", "sent"),
    [
        (b'{"service_tier": "flex"}', "", b'"vllm_xargs": {"aqua_class": "offline"}'),
        (b'{"service_tier": "priority"}', "", b'"vllm_xargs": {"aqua_class": "online"}'),
        (b'{"vllm_xargs": {"aqua_class": "online", "a": 1}}', "offline", b'"a": 1, "aqua_class": '),
        (
            b'{"service_tier": "flex", "vllm_xargs": {"aqua_class": "online"}}',
            "",
            b'{"aqua_class": "online"}',
        ),
    ],
)
def test_the_header_counts_before_the_body_and_that_before_its_tier(
    body: bytes, header: str, sent: bytes
) -> None:
    assert sent in with_xargs(body, {XARG: class_choice(header)})


def test_a_body_that_says_nothing_stays_so_and_a_wrong_header_is_refused() -> None:
    said = b'{"service_tier": "auto"}'
    assert with_xargs(said, {XARG: class_choice("")}) == said
    assert with_xargs(b"no JSON", {XARG: class_choice("offline")}) == b"no JSON"
    with pytest.raises(RequestInvalidError, match="no class"):
        class_choice("batch")


def test_objectives_are_needed() -> None:
    with pytest.raises(ConfigError, match=r"co_serving\.ttft_s"):
        read_options({"co_serving": {"tpot_s": 0.1}})


def test_a_step_hands_out_what_was_planned() -> None:
    tokens = StepTokens({"a": 8, "b": 1}, online=10)
    assert tokens.take("a", 30, is_offline=True, is_inside=True) == 8
    assert tokens.take("parked", 30, is_offline=True, is_inside=True) == 0
    assert tokens.take("loaded", 30, is_offline=True, is_inside=False) == 1
    assert tokens.take("x", 7, is_offline=False, is_inside=True) == 7
    assert tokens.take("y", 7, is_offline=False, is_inside=False) == 3
    assert tokens.take("z", 7, is_offline=False, is_inside=False) == 0


def test_without_a_profile_a_start_says_so_and_figures_do(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    totals = co_serving().totals()
    assert "fixed budget" in caplog.text
    assert totals["co_serving_without_aborts"] == totals["co_serving_without_profile"] == 1.0
    assert totals["offline_budget_tokens"] == 64
    place = tmp_path / "steps.json"
    place.write_text(
        StepTimeProfile(
            model="m", engine="e", gpu="g", floor_s=0.01, token_s=1e-4, max_tokens=512
        ).model_dump_json()
    )
    profiled = co_serving(co_serving={**SERVING, "step_profile": str(place)}).totals()
    assert profiled["co_serving_without_profile"] == profiled["offline_budget_tokens"] == 0.0
    for other in ("of another engine", "nowhere"):
        place.write_text(place.read_text().replace('"engine":"e"', '"engine":"f"'))
        caplog.clear()
        given = place if other == "of another engine" else tmp_path / "nowhere"
        left = co_serving(co_serving={**SERVING, "step_profile": str(given)}).totals()
        assert left["co_serving_without_profile"] == 1.0
        assert "aqua-profile steps" in caplog.text


def test_an_offline_step_without_aborts_keeps_to_a_budget() -> None:
    served = co_serving()
    assert served.arrived(offline("a", num_tokens=1000), 0.0)
    plan = served.plan(view())
    assert plan.offline_tokens == {"a": 64}
    assert not plan.is_preemptible
    assert plan.limit_s == pytest.approx(0.1)


def test_offline_work_goes_on_though_no_step_is_short_enough() -> None:
    served = co_serving()
    served.arrived(offline("a", num_tokens=1000), 0.0)
    for at in range(10):
        plan = served.plan(view())
        served.begin()
        taken = SimpleNamespace(num_scheduled_tokens=dict(plan.offline_tokens))
        served.begun(taken, plan)
        served.ended(taken, MeasuredStep(chunk(taken), 9.0), 10.0 * at + 9.0)
    assert served.policy.times.fixed_tokens <= 1
    assert served.plan(view()).offline_tokens["a"] > 0
    assert served.totals()["co_serving_overruns"] > 5


def test_a_profile_that_steps_contradict_is_left_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = StepTimeKey("m", "e", "g")
    profile = StepTimeProfile(**key._asdict(), floor_s=0.01, token_s=1e-4, max_tokens=512)
    (tmp_path / key.file_name).write_text(profile.model_dump_json())
    served = co_serving(co_serving={**SERVING, "step_profile": str(tmp_path)})
    assert served.totals()["co_serving_without_profile"] == 0.0
    served.arrived(offline("a", num_tokens=1000), 0.0)
    caplog.clear()
    for at in range(100):
        served.begin()
        taken = SimpleNamespace(num_scheduled_tokens={"a": 100})
        served.begun(taken, served.plan(view()))
        seconds = 9.0 if at % 2 else 0.01
        served.ended(taken, MeasuredStep(chunk(taken), seconds), 10.0 * at + seconds)
        if served.totals()["co_serving_without_profile"]:
            break
    assert "contradict the step-time profile" in caplog.text
    assert sum(served.plan(view()).offline_tokens.values()) <= 64


def test_an_arrival_parks_offline_requests_and_takes_the_saved_ones_memory_first() -> None:
    served = co_serving()
    saved, unsaved = offline("saved"), offline("unsaved")
    for each in (saved, unsaved):
        served.arrived(each, 0.0)
        served.admitted(each.request_id)
    served.copy_begun("saved", 6)
    served.settle_copies(Store(copied=6), {"saved": saved})
    prompt = request("online")
    assert not served.arrived(prompt, 0.5)
    running = [served.view(each, computed_tokens=96, held_blocks=7) for each in (saved, unsaved)]
    plan = served.plan(view(*running, free_blocks=5)._replace(arriving=[served.view(prompt)]))
    assert [each.request_id for each in plan.preempt] == ["saved"]
    assert plan.offline_tokens == {}
    assert served.tokens is not None
    assert served.tokens.take("unsaved", 4, is_offline=True, is_inside=True) == 0
    assert served.tokens.take("online", 100, is_offline=False, is_inside=False) == 100


HAPPENINGS: dict[str, Callable[[CoServing], object]] = {
    "online arrives": lambda served: served.arrived(request("new"), 1.0),
    "offline arrives": lambda served: served.arrived(offline("new"), 1.0),
    "offline comes in": lambda served: served.admitted("document"),
    "online ends": lambda served: served.removed("person", 1.0),
    "offline ends": lambda served: served.removed("document", 1.0),
    "offline leaves": lambda served: served.preempted(offline("document"), None, 1.0),
    "online leaves": lambda served: served.online_preempted([]),
    "a copy begins": lambda served: served.copy_begun("document", 1),
    "the store is emptied": lambda served: served.forget_saved(),
    "vLLM refuses": lambda served: served.begun(
        SimpleNamespace(num_scheduled_tokens={}), served.plan(decoding(served))
    ),
}


AT_BLOCK_END: Final = 11
"""The step in which the online request of `decoding` needs another block: it has 7 of 16 tokens,
and computes its 102nd token in the first."""


def decoding(served: CoServing) -> CoServingView:
    """An online request that decodes, and an offline one that is parked."""
    facts = {"num_tokens": 101, "num_output_tokens": 1}
    both = request("person", **facts), offline("document", **facts)
    return view(*(served.view(each, computed_tokens=100, held_blocks=7) for each in both))


def decode(served: CoServing, name: str) -> CoServedRequest:
    """An online request that decodes."""
    one = request(name, num_tokens=101, num_output_tokens=1)
    return served.view(one, computed_tokens=100, held_blocks=7)


def settled() -> CoServing:
    served = co_serving()
    for each in (request("person"), offline("document")):
        served.arrived(each, 0.0)
    served.admitted("document")
    return served


def test_a_plan_serves_some_steps_in_which_nothing_happens() -> None:
    served = settled()
    for _ in range(2):
        plan = served.plan(decoding(served))
        for step in range(SETTLED_STEPS):
            served.begin()
            free_blocks = int(step == AT_BLOCK_END)
            if free_blocks:
                assert served.settled_plan(0, 2, 0.0) is None, "no block for the next token"
            assert served.settled_plan(1, 1, 0.0) is None, "an operator has evicted one"
            assert served.settled_plan(free_blocks, 2, 0.0) is plan, step
            assert served.tokens is not None
            assert served.tokens.take("person", 1, is_offline=False, is_inside=True) == 1
            assert served.tokens.take("document", 1, is_offline=True, is_inside=True) == 0
        assert served.settled_plan(1, 2, 0.0) is None


@pytest.mark.parametrize("happens", HAPPENINGS)
def test_a_plan_serves_no_step_after_something_has_happened(happens: str) -> None:
    served = settled()
    served.plan(decoding(served))
    HAPPENINGS[happens](served)
    assert served.settled_plan(100, 2, 0.0) is None


@pytest.mark.parametrize(
    ("free_blocks", "granted"), [(1, SETTLED_STEPS - 1), (0, AT_BLOCK_END - 1)]
)
def test_steps_are_granted_a_plan_as_far_as_blocks_are_enough(
    free_blocks: int, granted: int
) -> None:
    served = settled()
    plan = served.plan(decoding(served))
    assert not served.goes_on(), "nothing was granted"
    assert served.settled_plan(free_blocks, 2, 0.0) is plan
    served.grant(free_blocks)
    assert [served.goes_on() for _ in range(granted + 1)] == [True] * granted + [False]
    assert (served.settled_plan(1, 2, 0.0) is plan) == (not free_blocks)


@pytest.mark.parametrize("happens", sorted(HAPPENINGS.keys() - {"a copy begins"}))
def test_no_step_is_granted_a_plan_after_something_has_happened(happens: str) -> None:
    served = settled()
    served.plan(decoding(served))
    assert served.settled_plan(100, 2, 0.0) is not None
    served.grant(100)
    assert served.goes_on()
    HAPPENINGS[happens](served)
    assert not served.goes_on()


@pytest.mark.parametrize("policy", ["guarded", "conserve"])
def test_a_plan_goes_on_for_the_online_requests_that_there_are(policy: str, tmp_path: Path) -> None:
    """A second one comes, then a third, and two end; its steps are counted on."""
    served = co_serving(co_serving=profiled(tmp_path, policy=policy, tpot_s=0.011))
    for each in (request("person 1"), offline("document")):
        served.arrived(each, 0.0)
    served.admitted("document")
    assert served.plan(decoding(served)).offline_tokens == {}
    is_outdated = served.wants_online
    assert not is_outdated
    steps = 0
    for count in (2, 3, 1):
        if count > 1:
            served.arrived(request(f"person {count}"), 1.0)
        else:
            served.removed("person 2", 1.0)
            served.removed("person 3", 1.0)
        assert served.wants_online
        assert served.settled_plan(100, 1 + count, 0.0) is None
        served.regroup([decode(served, f"person {at + 1}") for at in range(count)], 1 + count)
        for _ in range(3):
            plan = served.settled_plan(100, 1 + count, 0.0)
            steps += 1
            assert plan is not None
            assert plan.online_tokens == plan.online_load.new_tokens == count
            tokens = served.tokens
            assert tokens is not None
            taken = [tokens.take("", 1, is_offline=False, is_inside=True) for _ in range(count + 1)]
            assert sum(taken) == count + (policy == "guarded"), "the paper's are held to theirs"
    while served.settled_plan(100, 2, 0.0) is not None:
        steps += 1
    assert steps == SETTLED_STEPS, "what it says of offline requests gets no older"


def test_a_plan_goes_on_after_a_prompt_and_not_while_one_is_computed() -> None:
    served = settled()
    served.plan(decoding(served))
    assert served.settled_plan(100, 2, 0.0) is not None
    served.arrived(request("new"), 1.0)
    both = decoding(served)
    assert served.plan(both._replace(arriving=[served.view(request("new"))])).online_tokens == 101
    half = served.view(request("new"), computed_tokens=50, held_blocks=4)
    served.regroup([both.running[0], half], 3)
    assert served.settled_plan(100, 3, 1.0) is None
    served.plan(both._replace(running=[*both.running, half]))
    served.regroup([both.running[0], decode(served, "new")], 3)
    left = 0
    while served.settled_plan(100, 3, 1.0) is not None:
        left += 1
    assert left == SETTLED_STEPS - 3


def test_steps_that_follow_each_other_say_what_offline_tokens_cost_beside_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not seconds in which an engine waits for a request, or pauses."""
    noted: list[tuple[int, float, int]] = []
    served = co_serving(co_serving=profiled(tmp_path, policy="conserve"))

    def note(alone: StepLoad, load: StepLoad, seconds: float, *, steps: int) -> None:
        noted.append((load.new_tokens - alone.new_tokens, round(seconds, 6), steps))

    monkeypatch.setattr(served.policy.times, "paced", note)
    for each in (request("person"), offline("document")):
        served.arrived(each, 0.0)
    served.admitted("document")
    beside = decoding(served)
    assert served.plan(beside._replace(now_s=2.0)).offline_tokens == {"document": 1}
    parked = beside._replace(running=beside.running[:1])
    served.plan(parked._replace(now_s=2.03))
    for now_s in (2.1, 2.12, 2.14, 2.16):
        assert served.settled_plan(100, 1, now_s) is not None
    served.removed("person", 2.18)
    served.plan(beside._replace(now_s=3.18))
    served.begin()
    served.paused()
    served.plan(beside._replace(now_s=9.0))
    assert noted == [(1, 0.03, 1), (0, 0.02, 4)], "neither idle seconds nor a pause are a step's"


def test_a_plan_that_leaves_an_arrival_out_serves_its_own_step_alone() -> None:
    """After a step of which vLLM made nothing."""
    served = settled()
    HAPPENINGS["vLLM refuses"](served)
    plan = served.plan(decoding(served)._replace(arriving=[served.view(request("new"))]))
    assert plan.online_tokens == 1
    assert served.settled_plan(100, 2, 0.0) is None


def test_a_plan_of_anything_but_decodes_serves_its_own_step_alone() -> None:
    served = settled()
    decodes = decoding(served)
    prompt = served.view(request("prompt"), computed_tokens=50, held_blocks=4)
    new = served.view(request("new"))
    for shown in (
        decodes._replace(arriving=[new]),
        decodes._replace(running=[*decodes.running, prompt]),
        decodes._replace(running=decodes.running[1:]),
        decodes._replace(free_blocks=-1),
    ):
        served.plan(shown)
        assert served.settled_plan(100, len(shown.running), 0.0) is None, shown


def test_a_copy_counts_once_it_is_there_and_one_that_is_lost_begins_again() -> None:
    served = co_serving()
    running = offline("a")
    served.arrived(running, 0.0)
    served.admitted("a")
    served.copy_begun("a", 4)
    served.settle_copies(Store(copied=1), {"a": running})
    checkpoint = served.policy.checkpoints.of("a")
    assert (checkpoint.saved, checkpoint.copying) == (1, 3)
    served.settle_copies(Store(copied=1, is_coming=False), {"a": running})
    checkpoint = served.policy.checkpoints.of("a")
    assert (checkpoint.saved, checkpoint.copying) == (0, 0)


def test_what_a_preempted_request_saved_is_what_the_store_says() -> None:
    served = co_serving()
    running = offline("a")
    served.arrived(running, 0.0)
    served.admitted("a")
    served.copy_begun("a", 4)
    served.preempted(running, Store(tokens=40), 1.0)
    checkpoint = served.policy.checkpoints.of("a")
    assert (checkpoint.saved, checkpoint.copying, checkpoint.pinned) == (2, 0, 0)
    assert served.totals()["offline_requests_waiting"] == 1
    served.forget_saved()
    assert served.policy.checkpoints.of("a").saved == 0
    served.removed("a", 1.0)
    assert not served.is_offline("a")
    assert served.policy.checkpoints.stored_blocks == 0
    assert served.totals()["offline_requests_waiting"] == 0


def test_an_online_request_that_leaves_memory_before_an_offline_one_is_counted() -> None:
    served = co_serving()
    person, document = request("online"), offline("a")
    served.arrived(document, 0.0)
    served.online_preempted([person])
    assert served.totals()["online_preempted_before_offline"] == 0
    served.online_preempted([person, document])
    assert served.totals()["online_preempted_before_offline"] == 1


def test_steps_count_by_how_long_they_took_each() -> None:
    served = co_serving()
    served.arrived(offline("a"), 0.0)
    outputs = [SimpleNamespace(num_scheduled_tokens={"a": 1}) for _ in range(3)]
    for output in outputs:
        served.begin()
        served.begun(output, served.plan(view()))
    # One was dropped: its output never came.
    served.ended(outputs[0], MeasuredStep(chunk(outputs[0]), 1.04), 1.04)
    served.ended(outputs[2], MeasuredStep(chunk(outputs[2]), 0.04), 1.08)
    assert served.totals()["offline_tokens"] == 2
    assert served.totals()["co_serving_overruns"] == 1, "the first took a second"


def test_a_plan_in_which_nothing_computes_leaves_the_step_to_vllm() -> None:
    served = co_serving()
    one = offline("a", num_tokens=97, num_output_tokens=1)
    served.arrived(one, 0.0)
    served.admitted("a")
    stuck = served.view(one, computed_tokens=96, held_blocks=6)
    plan = served.plan(view(stuck, free_blocks=0))
    assert not plan.offline_tokens
    assert served.tokens is None


def test_steps_that_vllm_makes_nothing_of_are_planned_otherwise() -> None:
    served = co_serving()
    half_computed, prompt = offline("a"), request("online")
    served.arrived(half_computed, 0.0)
    served.admitted("a")
    served.arrived(prompt, 0.5)
    facts = view(served.view(half_computed, computed_tokens=65, held_blocks=5))
    facts = facts._replace(arriving=[served.view(prompt)])
    nothing = SimpleNamespace(num_scheduled_tokens={})

    def step(output: Any = nothing, *, is_memory_coming: bool = False) -> Any:  # noqa: ANN401 - vLLM's
        served.begin()
        plan = served.plan(facts)
        served.begun(output, plan, is_memory_coming=is_memory_coming)
        return plan, served.tokens

    assert step(is_memory_coming=True)[0].offline_tokens == {}, "it is parked"
    assert step()[0].offline_tokens == {}, "what still comes free is waited for"
    assert step()[0].offline_tokens == {"a": 35}, "it computes the rest, to be out of the way"
    assert step()[1] is None, "vLLM decides"
    assert step()[0].offline_tokens == {}
    assert step(SimpleNamespace(num_scheduled_tokens={"online": 100}))[0].offline_tokens
    assert step()[0].offline_tokens == {}
