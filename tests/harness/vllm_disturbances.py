"""What may happen to a simulated engine (`harness.vllm_simulation`) at any step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from harness.vllm_simulation import SimulatedEngine

NO_TIME_S: Final = 1e-9
"""A hold that is over with the step that begins it."""

FOR_EVER_S: Final = 3600.0
"""A hold that a test does not see the end of."""


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
