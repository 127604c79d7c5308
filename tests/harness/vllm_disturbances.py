"""What may happen to a simulated engine (`harness.vllm_simulation`) at any step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.vllm_simulation import SimulatedEngine


def disturb(engine: SimulatedEngine) -> None:
    """Something happens that the seed says."""
    from vllm.v1.core.sched.interface import PauseState

    scheduler = engine.scheduler
    if scheduler.pause_state is not PauseState.UNPAUSED:
        scheduler.set_pause_state(PauseState.UNPAUSED)
        return
    happens = engine.rng.choice(["abort", "pause", "wait", "reset", "loss"])
    if happens == "abort":
        engine.abort(engine.rng.choice(list(scheduler.requests)))
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
