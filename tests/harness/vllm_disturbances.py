"""Lives of simulated engines (`harness.vllm_simulation`), and what may happen at any step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from harness.vllm_shapes import Shape, make_config
from harness.vllm_simulation import SimulatedEngine

HISTORIES: Final = 200
"""Of each mechanism, over all its shapes."""

MOST_STEPS: Final = 8000
"""Of a life, however it is disturbed."""

NO_TIME_S: Final = 1e-9
"""A hold that is over with the step that begins it."""

FOR_EVER_S: Final = 3600.0
"""A hold that a test does not see the end of."""


def lives(
    model: str,
    shape: Shape,
    drawn: range,
    disturbance: float = 0.0,
    *,
    zeroes_loads: bool = False,
    begin: Callable[[SimulatedEngine], object] = id,
) -> list[SimulatedEngine]:
    """Engines that have served all their requests.

    Args:
        drawn: Seeds, of a life each.
        disturbance: How likely something happens at a step.
        zeroes_loads: Bytes that are loaded come as zeros: for negative controls.
        begin: Told of each engine before its first step.
    """
    from vllm.v1.core.sched.interface import PauseState

    config = make_config(model, shape)
    engines = []
    for seed in drawn:
        engine = SimulatedEngine(shape, seed, config)
        engine.runner.zeroes_loads = zeroes_loads
        begin(engine)
        for _ in range(MOST_STEPS):
            if not (engine.is_done and engine.scheduler.pause_state is PauseState.UNPAUSED):
                if engine.scheduler.requests and engine.rng.random() < disturbance:
                    disturb(engine)
                engine.step()
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        assert engine.is_done, f"no end with seed {seed}"
        engines.append(engine)
    return engines


def seeds(shape_count: int) -> range:
    """Seeds of each of so many shapes, for `HISTORIES` over all of them."""
    return range(-(-HISTORIES // shape_count))


def wrong(engines: Sequence[SimulatedEngine]) -> int:
    """How many of them said something else than they should."""
    return sum(engine.outputs != engine.expected for engine in engines)


def disturb(engine: SimulatedEngine) -> None:
    """Something happens that the seed says."""
    from vllm.v1.core.sched.interface import PauseState

    scheduler = engine.scheduler
    if scheduler.pause_state is not PauseState.UNPAUSED:
        scheduler.set_pause_state(PauseState.UNPAUSED)
        return
    happens = engine.rng.choice(["abort", "pause", "wait", "reset", "loss", "evict", "resume"])
    if happens == "abort":
        engine.abort(engine.rng.choice(list(scheduler.requests)))
    elif happens == "evict":
        hold_s = engine.rng.choice([NO_TIME_S, FOR_EVER_S])
        scheduler("evict", {"count": engine.rng.randrange(1, 4), "hold_s": hold_s})
    elif happens == "resume":
        for each in scheduler.evictions():
            scheduler("resume", {"id": each["request_id"]})
    elif happens == "loss":
        engine.runner.lose_all()
    elif happens == "reset":
        engine.drain()
        # vLLM itself gives up over loads under way, be it of requests that were aborted.
        aborted = any(request.is_finished() for request in scheduler.requests.values())
        if not scheduler.paging.loading_ids() and not aborted:
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
            engine.change_weights()
    else:
        state = PauseState.PAUSED_NEW if happens == "wait" else PauseState.PAUSED_ALL
        scheduler.set_pause_state(state)
