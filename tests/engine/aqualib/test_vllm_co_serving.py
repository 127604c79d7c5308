"""Online and offline requests in one engine: all answers are those of an engine of their own.

By seed, as in `test_vllm_swaps`, over `harness.vllm_simulation`: vLLM's real scheduler and block
managers, a slow store that loses blocks, aborts, pauses and resets. And on a real vLLM, with a
second wave of requests upon the first, against vLLM by itself. Steps are not aborted inside.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any, Final

import pytest

from aqualib.engines.vllm.co_serving.step_tokens import StepTokens
from harness.vllm_disturbances import lives, seeds, wrong
from harness.vllm_program import Scenario, run
from harness.vllm_shapes import Shape, make_config, make_scheduler
from harness.vllm_simulation import SimulatedEngine

pytestmark = [
    pytest.mark.timeout(900),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]

# Objectives that steps of a simulation keep to, however busy the machine.
SERVING: Final = {"ttft_s": 1000.0, "tpot_s": 60.0}
SWAP: Final = Shape(
    {"co_serving": SERVING, "policy": "cfs", "slice_iterations": 3, "granularity_tokens": 0},
    requests=14,
    turns=0.5,
    speed=0.3,
    offline=0.6,
)
# By name: due as soon as it arrives, or not before its last step.
WANTED: Final = {"r1": 1e-3, "r5": 1e-3, "r8": 1e6, "r11": 1e-3}
CHECKPOINT: Final = {**SWAP.aqua, "mode": "checkpoint"}
CONSERVE: Final = {**SWAP.aqua, "co_serving": {**SERVING, "policy": "conserve"}}
SHAPES: Final = [
    SWAP,
    replace(SWAP, depth=2, caches_prefixes=True, finish_in_s=WANTED),
    replace(SWAP, aqua=CHECKPOINT, caches_prefixes=True, loss=0.05),
    replace(SWAP, aqua=CHECKPOINT, depth=2, caches_prefixes=True, store_blocks=(40, 60, 50)),
    replace(SWAP, aqua=CONSERVE, depth=2, is_second_runner=True, loss=0.05),
    replace(SWAP, aqua={**CHECKPOINT, "co_serving": CONSERVE["co_serving"]}, blocks=20),
    # Without a profile the paper's reading alone has both classes in one step.
    replace(SWAP, aqua={**CONSERVE, "mode": "recompute"}, caches_prefixes=True),
    replace(SWAP, aqua={**SWAP.aqua, "policy": "first-token"}, offline=1.0),
    # Offline requests stay in memory, parked, while few online ones decode.
    PARKED := replace(SWAP, blocks=100, requests=40, offline=0.9),
]


class Watched:
    """What is preempted while what holds memory, of an engine's scheduler."""

    def __init__(self, scheduler: Any) -> None:  # noqa: ANN401 - ours, which needs vLLM
        self.offline_victims = self.online_victims = self.wrong_victims = 0
        preempt, schedule = scheduler._preempt_request, scheduler.schedule
        is_scheduling = False

        def note_and_schedule(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - vLLM's
            nonlocal is_scheduling
            is_scheduling = True
            try:
                return schedule(*args, **kwargs)
            finally:
                is_scheduling = False

        def preempt_and_count(request: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - vLLM's
            is_offline = scheduler.co_serving.is_offline
            if is_offline(request.request_id):
                self.offline_victims += 1
            else:
                self.online_victims += 1
                # A reset takes all of them out, in whatever order.
                self.wrong_victims += is_scheduling and any(
                    is_offline(r.request_id) for r in scheduler.running
                )
            preempt(request, *args, **kwargs)

        scheduler._preempt_request = preempt_and_count
        scheduler.schedule = note_and_schedule


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_whatever_happens_every_output_of_both_classes_is_right(model: str, shape: Shape) -> None:
    watched: list[Watched] = []
    engines = lives(
        model,
        shape,
        seeds(len(SHAPES)),
        disturbance=0.05,
        begin=lambda engine: watched.append(Watched(engine.scheduler)),
    )
    assert wrong(engines) == 0
    assert sum(each.offline_victims for each in watched) > 20
    assert sum(each.wrong_victims for each in watched) == 0
    if shape.aqua.get("mode") != "recompute":
        assert sum(engine.runner.loaded_blocks for engine in engines) > 50
    for engine in engines:
        engine.require_rest()
        assert not engine.scheduler.paging.is_saving
        co_serving = engine.scheduler.co_serving
        assert not len(co_serving.policy.waiting)
        assert co_serving.policy.checkpoints.stored_blocks == 0


def test_an_online_load_and_the_offline_prompt_parked_for_it_do_not_wait_for_each_other(
    model: str,
) -> None:
    """VLLM keeps blocks for prompts that are half computed, and does not load into these.

    Half of a prompt is there after loads that lost the rest.
    """
    shape = replace(SWAP, blocks=24, caches_prefixes=True, loss=0.3)
    assert wrong(lives(model, shape, range(1, 3))) == 0


@pytest.mark.parametrize("is_recorded", [False, True])
def test_vllm_asks_no_parked_request_in_a_settled_step(
    model: str, monkeypatch: pytest.MonkeyPatch, *, is_recorded: bool
) -> None:
    asked: list[tuple[bool, bool]] = []
    settled_tokens: Counter[bool] = Counter()
    kept: set[tuple[int, bool]] = set()
    is_settled, granted_steps = False, 0
    take = StepTokens.take

    def note_and_take(tokens: StepTokens, *args: Any, is_offline: bool, **kwargs: Any) -> int:  # noqa: ANN401 - its own
        asked.append((is_settled, is_offline))
        return take(tokens, *args, is_offline=is_offline, **kwargs)

    def watch(engine: Any) -> None:  # noqa: ANN401 - of vLLM's scheduler
        scheduler = engine.scheduler
        co_serving, schedule = scheduler.co_serving, scheduler.schedule
        settled_plan, goes_on = co_serving.settled_plan, co_serving.goes_on
        if is_recorded:
            scheduler.step_log.record(recording=True)

        def note_plan(*args: Any) -> Any:  # noqa: ANN401 - its own
            nonlocal is_settled
            plan = settled_plan(*args)
            is_settled = plan is not None
            return plan

        def note_grant() -> bool:
            nonlocal granted_steps, is_settled
            is_settled = bool(goes_on())
            granted_steps += is_settled
            return is_settled

        def schedule_and_note() -> Any:  # noqa: ANN401 - vLLM's
            nonlocal is_settled
            is_settled = False
            output = schedule()
            kept.add((scheduler.max_num_scheduled_tokens, scheduler.need_mamba_block_aligned_split))
            for name, tokens in output.num_scheduled_tokens.items() if is_settled else ():
                settled_tokens[co_serving.is_offline(name)] += tokens
            return output

        co_serving.settled_plan, co_serving.goes_on = note_plan, note_grant
        scheduler.schedule = schedule_and_note

    monkeypatch.setattr(StepTokens, "take", note_and_take)
    assert wrong(lives(model, PARKED, range(4), begin=watch)) == 0
    assert settled_tokens[False] > 100
    assert not settled_tokens[True]
    assert (True, True) not in asked
    assert asked.count((True, False)) == (settled_tokens[False] if is_recorded else 0), (
        "only where steps are looked at is anyone asked"
    )
    assert (False, True) in asked
    assert (granted_steps > 50) == (not is_recorded)
    assert len(kept) == 1, "they are put back"


def test_a_request_waits_from_when_it_came_to_the_front_end_and_a_session_is_not_judged(
    model: str,
) -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    shape = replace(SWAP, aqua={**SWAP.aqua, "co_serving": {**SERVING, "ttft_s": 50.0}})
    scheduler = make_scheduler(make_config(model, shape), shape)

    def add(name: str, waited_s: float) -> None:
        came_s = time.time() - waited_s
        params = SamplingParams(max_tokens=4)
        scheduler.add_request(
            Request(name, [1, 2, 3], params, None, arrival_time=came_s, resumable=True)
        )

    for name, waited_s in (("late", 1000.0), ("new", 0.0), ("session", 1000.0)):
        add(name, waited_s)
    add("session", 0.0)
    names = {"late", "new", "session"}
    assert scheduler.co_serving.attainment.awaited(dict.fromkeys(names, 1)) == {"late", "new"}
    scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
    totals = scheduler.co_serving.totals()
    assert totals["online_first_tokens"] == 1, "the late one"
    assert totals["online_first_tokens_in_time"] == 0


@pytest.mark.parametrize(
    ("finish_in_s", "first"),
    [
        ({}, "r0"),
        ({"r1": 50.0}, "r1"),
        ({"r0": 5000.0, "r1": 50.0}, "r1"),
        ({"r0": 50.0, "r1": 5000.0}, "r0"),
    ],
)
def test_of_two_offline_requests_the_one_with_the_nearer_deadline_is_served_first(
    model: str, finish_in_s: dict[str, float], first: str
) -> None:
    shape = replace(SWAP, requests=2, offline=1.0, finish_in_s=finish_in_s)
    config = make_config(model, shape)
    config.scheduler_config.max_num_seqs = 1
    engine = SimulatedEngine(shape, 1, config)
    assert list(engine.scheduler.requests) == ["r0", "r1"], "both wait, in order of arrival"
    served: list[str] = []
    while not engine.is_done:
        engine.step()
        served += [name for name, said in engine.outputs.items() if said and name not in served]
    assert served[0] == first
    assert len(served) == 2
    assert wrong([engine]) == 0


def test_zeroed_checkpoints_change_outputs(model: str) -> None:
    assert wrong(lives(model, SHAPES[3], range(10), zeroes_loads=True)) > 2


# --- A real vLLM -----------------------------------------------------------------------------


def co_served(model: str, **facts: Any) -> Scenario:  # noqa: ANN401 - fields of a scenario
    options = {"co_serving": SERVING, "mode": "checkpoint", "is_offline": True}
    return Scenario(
        model,
        aqua={**options, "store_bytes": "16MiB"},
        engine={"enable_prefix_caching": True},
        output_tokens=60,
        wave_at_step=30,
        online_every=3,
        **facts,
    )


@pytest.fixture(scope="module")
def stock(stock: dict[str, list[int]]) -> dict[str, list[int]]:
    """What vLLM answers by itself, by the number of the request."""
    return {name.partition("-")[2]: tokens[:60] for name, tokens in stock.items()}


def same(answer: dict[str, Any], stock: dict[str, list[int]]) -> int:
    assert len(answer["tokens"]) == 2 * len(stock)
    return sum(stock[name.partition("-")[2]] == each for name, each in answer["tokens"].items())


@pytest.mark.parametrize("overlaps_steps", [False, True])
def test_a_real_engine_answers_both_classes_as_if_each_were_alone(
    model: str, stock: dict[str, list[int]], *, overlaps_steps: bool
) -> None:
    answer = run(co_served(model, overlaps_steps=overlaps_steps))
    assert same(answer, stock) == 2 * len(stock)
    assert answer["scheduler"] == ("AsyncAquaScheduler" if overlaps_steps else "AquaScheduler")
    assert answer["metrics"]["aqua:offline_preemptions_total"] > 3, answer
    assert answer["metrics"]["aqua:co_serving_without_aborts"] == 1.0
    assert answer["metrics"]["aqua:co_serving_without_profile"] == 1.0
    online = 2 * len(range(0, len(stock), 3))
    for which in ("first_tokens", "answers"):
        assert answer["metrics"][f"aqua:online_{which}_total"] == online
        assert answer["metrics"][f"aqua:online_{which}_in_time_total"] == online
    assert answer["metrics"]["aqua:offline_requests_ended_total"] == 2 * len(stock) - online
    assert answer["metrics"]["aqua:checkpoint_lag_blocks"] == 0.0
    assert answer["paging"]["restored_tokens"] > 200, answer
    assert answer["held_places"] == 0, answer


def test_a_real_engine_answers_otherwise_when_checkpoints_are_zeroed(
    model: str, stock: dict[str, list[int]]
) -> None:
    assert same(run(co_served(model, zeroes_loads=True)), stock) < 2 * len(stock)
