"""What operators command, over vLLM's real scheduler and a simulated model: evictions and pins.

As in `test_vllm_interleavings`: whatever is in a slot that does not belong there changes an output.
`test_vllm_swaps` draws evictions among all that may happen to an engine.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, Final

import pytest
from vllm.v1.core.sched.interface import PauseState

from harness.vllm_disturbances import FOR_EVER_S, NO_TIME_S, seeds
from harness.vllm_shapes import Shape, make_config
from harness.vllm_simulation import SimulatedEngine

pytestmark = [
    pytest.mark.timeout(300),
    # vLLM and torch warn about themselves and each other; not ours to mend.
    pytest.mark.filterwarnings("default"),
]

# So many blocks that none is preempted for another: what comes back was evicted.
ROOMY: Final = Shape({"policy": "fcfs"}, blocks=200)
SHAPES: Final = [
    ROOMY,
    replace(ROOMY, aqua={"policy": "fcfs", "mode": "checkpoint"}),
    replace(ROOMY, depth=2, is_second_runner=True),
    replace(ROOMY, depth=3, drafts=3, caches_prefixes=True),
    replace(ROOMY, depth=2, groups=("full", "window")),
    replace(ROOMY, groups=("full", "state")),
]


def asked(engine: SimulatedEngine, command: str, **arguments: Any) -> Any:  # noqa: ANN401 - as they are
    """What the admin API gets for an answer: a result, or an error's code."""
    answer = engine.scheduler(command, arguments)
    return answer["error"]["code"] if "error" in answer else answer["result"]


def count_tokens(engine: SimulatedEngine) -> Counter[str]:
    """Tokens that steps compute from now on, by request."""
    computed: Counter[str] = Counter()
    schedule = engine.scheduler.schedule

    def counted() -> Any:  # noqa: ANN401 - vLLM's
        output = schedule()
        computed.update(output.num_scheduled_tokens)
        return output

    engine.scheduler.schedule = counted
    return computed


def lives(model: str, shape: Shape, *, zeroes_loads: bool = False) -> list[tuple[Any, Any]]:
    """Engines in which one request or another is evicted all the time, and what they computed."""
    config = make_config(model, shape)
    engines = []
    for seed in seeds(len(SHAPES)):
        engine = SimulatedEngine(shape, seed, config)
        engine.runner.zeroes_loads = zeroes_loads
        computed = count_tokens(engine)
        while not engine.is_done:
            if engine.rng.random() < 0.2:
                hold_s = engine.rng.choice([NO_TIME_S, FOR_EVER_S])
                asked(engine, "evict", count=1, hold_s=hold_s)
            if engine.rng.random() < 0.2:
                for each in engine.scheduler.evictions():
                    asked(engine, "resume", id=each["request_id"])
            engine.step()
        engines.append((engine, computed))
    return engines


@pytest.mark.parametrize("shape", SHAPES, ids=repr)
def test_evicted_requests_go_on_where_they_were_and_nothing_is_computed_again(
    model: str, shape: Shape
) -> None:
    evicted = 0
    for engine, computed in lives(model, shape):
        assert engine.outputs == engine.expected
        counts = engine.scheduler.paging.counts
        evicted += counts.evicted_requests
        assert counts.unsaved_blocks == 0
        assert engine.scheduler.forced_preemptions == 0
        if shape.depth == 1:
            # The last token of an answer is sampled, and its KV not computed.
            assert computed == {
                name: request.num_tokens - 1 for name, request in engine.runner.requests.items()
            }
            assert counts.restored_tokens == counts.evicted_tokens
        engine.require_rest()
    assert evicted > 5 * len(seeds(len(SHAPES)))


def test_zeroed_loads_of_evicted_requests_change_outputs(model: str) -> None:
    engines = lives(model, ROOMY, zeroes_loads=True)
    assert sum(engine.outputs != engine.expected for engine, _ in engines) > len(engines) // 2


def running(model: str, shape: Shape, **engine: Any) -> SimulatedEngine:  # noqa: ANN401 - vLLM's
    """An engine in which some requests have begun to answer."""
    made = SimulatedEngine(shape, 0, make_config(model, shape, **engine))
    for _ in range(8):
        made.step()
    return made


def test_an_evicted_request_waits_for_its_resumption_and_others_run(model: str) -> None:
    engine = running(model, ROOMY)
    first = engine.scheduler.running[0].request_id
    free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks
    (eviction,) = asked(engine, "evict", request_ids=[first], hold_s=FOR_EVER_S)["evictions"]
    assert eviction["request_id"] == first
    assert eviction["kept_tokens"] == engine.scheduler.requests[first].num_tokens - 1
    assert asked(engine, "evict", request_ids=[first]) == "invalid_transition"
    had = len(engine.outputs[first])
    engine.add(engine.shape.requests)
    while len(engine.scheduler.requests) > 1:
        engine.step()
    assert len(engine.outputs[first]) == had
    for _ in range(20):
        engine.step()
    assert free() == 199, "an idle engine does not take it back by itself"
    assert asked(engine, "resume", id=first) == {
        "evictions": [{"request_id": first, "kept_tokens": eviction["kept_tokens"], "hold_s": 0.0}]
    }
    while not engine.is_done:
        engine.step()
    assert engine.outputs == engine.expected


def test_a_pause_that_waits_resumes_what_is_evicted(model: str) -> None:
    engine = running(model, ROOMY)
    asked(engine, "evict", count=2, hold_s=FOR_EVER_S)
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    while engine.scheduler.has_unfinished_requests():
        engine.step()
    assert asked(engine, "list-evictions") == {"evictions": []}


def test_the_least_urgent_and_newest_are_evicted_first(model: str) -> None:
    engine = running(model, ROOMY)
    by_arrival = sorted(engine.scheduler.running, key=lambda each: each.arrival_time)
    by_arrival[0].priority = 5
    found = asked(engine, "evict", count=2, hold_s=FOR_EVER_S)["evictions"]
    assert [each["request_id"] for each in found] == [
        by_arrival[0].request_id,
        by_arrival[-1].request_id,
    ]


def test_what_cannot_be_evicted_without_loss_is_refused(model: str) -> None:
    engine = running(model, replace(ROOMY, store_blocks=(1,)))
    names = [each.request_id for each in engine.scheduler.running]
    assert asked(engine, "evict", request_ids=names) == "capacity_exhausted"
    assert asked(engine, "evict", count=1) == "capacity_exhausted"
    assert asked(engine, "evict", request_ids=["nobody"]) == "unknown_resource"
    assert asked(engine, "resume", id=names[0]) == "unknown_resource"
    assert asked(engine, "evict", count=1, request_ids=names) == "request_invalid"
    assert asked(engine, "list-evictions") == {"evictions": []}
    engine.scheduler("change-switches", {"paging": False})
    assert asked(engine, "evict", count=1) == "config_invalid"
    while not engine.is_done:
        engine.step()
    assert engine.outputs == engine.expected


def test_a_pinned_prefix_is_there_for_those_who_come_after_many_others(model: str) -> None:
    tier = {"policy": "fcfs", "prefix_tier": True, "pinned_share": 0.5}
    shape = Shape(tier, blocks=200, store_blocks=(16,), requests=16, turns=0.5)
    hits = Counter[bool]()
    for seed in range(5):
        for is_pinned in (True, False):
            engine = SimulatedEngine(shape, seed, make_config(model, shape))
            said = list(engine.runner.requests["r0"].prompt_token_ids) + engine.expected["r0"]
            prefix = said[: min(30, len(said) - 1)]  # The last token's KV is not computed.
            engine.step()
            if is_pinned:
                pin = asked(engine, "pin", id="a", prompt_token_ids=prefix, ttl_s=FOR_EVER_S)
                assert pin["tokens"] == len(prefix) // 4 * 4
            while not engine.is_done:
                engine.step()
            engine.settle()
            assert engine.outputs == engine.expected
            keys = engine.runner.requests["r0"].block_hashes[: len(prefix) // 4]
            hits[is_pinned] += len(engine.scheduler.paging.table.present(keys)) == len(keys)
            engine.scheduler.paging.table.audit()
            if is_pinned:
                (listed,) = asked(engine, "list-pins")["pins"]
                assert listed["present_blocks"] == len(keys)
                assert asked(engine, "unpin", id="a")["pinned_blocks"] == 0
    assert hits[True] == 5
    assert hits[False] < 3, "without a pin others take its room"
