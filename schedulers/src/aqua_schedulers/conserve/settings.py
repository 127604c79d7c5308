"""The settings of co-serving that may be tuned; `registry` makes policies of them."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ConserveSettings(BaseModel):
    """What the policies need beside the objectives and the step-time profile.

    Attributes:
        objective_share: For `guarded`: part of the objective between tokens that a step may be
            predicted to take; the rest is for what a prediction does not know. It cannot be
            doubled.
        wait_share: For `guarded`: part of the objective for the first token by which offline work
            may lengthen a step. Doubled, an arrival waits up to twice as long for a step to end,
            and busy steps take more offline work.
        stretch: For `guarded`: part of an online step's own time by which offline work may lengthen
            it. Doubled, answers come more slowly beside offline work, and more of it is done.
        offline_step_tokens: Most tokens of a step without online requests. Doubled, steps are
            longer and an abort throws more away.
        least_step_tokens: What aborts cut such a step down to. Doubled, more is thrown away where
            every step is aborted.
        aborts: Whether the engine can abort a step without online requests at a safepoint. If not,
            such a step keeps to a limit; also if it can, where the step cannot be predicted or is
            to run to its end.
        unaborted_share: Part of the objective for the first token that this limit is: what an
            arrival waits at most. Doubled, it waits twice as long, and calm steps take more.
        safepoints: Of a step that can be aborted: its layers, or groups of them. Doubled, it may be
            twice as long under `guarded`.
        abort_share: For `guarded`: part of the objective for the first token that an abort may
            take. Doubled, arrivals wait up to twice as long where layers are slow, and more is
            thrown away.
        safepoint_s: What an abort takes, as the engine's safepoints are; for judging whether a step
            ends as soon by itself.
        checkpoints: Copy full blocks of offline requests out before they are needed.
        checkpoint_start, checkpoint_full: Memory usage from which some, and from which all offline
            requests are checkpointed. The first is the paper's. Doubled, it would never begin.
        swaps: Copy what a victim has not saved when it leaves, while all wait for it; the paper's
            engine without its checkpoints.
        loads_in_background: Load checkpoints beside other work; else the engine waits for them.
        link_share: Part of the link for either direction. Doubled, it is all of it.
        spare_share: Part of memory that admissions of offline requests leave free for the growth of
            those inside, vLLM's watermark. Doubled, fewer come in and fewer are put out again.
        starvation_s: Seconds without a token after which the eldest offline request is starved.
            Doubled, it waits up to twice as long.
        starved_tokens: Tokens of a step with online prompts that go to the starved request, and
            that a step without online requests has whatever its limit. Doubled, prompts give way
            twice as much and it ends in half the time; where not even a short step is within the
            limit, an arrival waits for twice as many.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    objective_share: float = Field(default=0.9, gt=0.0, le=1.0)
    wait_share: float = Field(default=0.003, ge=0.0, le=1.0)
    stretch: float = Field(default=0.02, ge=0.0, le=100.0)
    offline_step_tokens: int = Field(default=2048, ge=1, le=1 << 20)
    least_step_tokens: int = Field(default=256, ge=1, le=1 << 20)
    aborts: bool = True
    unaborted_share: float = Field(default=0.1, gt=0.0, le=1.0)
    safepoints: int = Field(default=32, ge=1, le=1 << 20)
    abort_share: float = Field(default=0.05, gt=0.0, le=1.0)
    safepoint_s: float = Field(default=0.005, ge=0.0, le=60.0)
    checkpoints: bool = True
    checkpoint_start: float = Field(default=0.5, ge=0.0, lt=1.0)
    checkpoint_full: float = Field(default=1.0, gt=0.0, le=1.0)
    swaps: bool = False
    loads_in_background: bool = True
    link_share: float = Field(default=0.5, gt=0.0, le=1.0)
    spare_share: float = Field(default=0.01, ge=0.0, lt=1.0)
    starvation_s: float = Field(default=300.0, ge=0.0, le=1e9)
    starved_tokens: int = Field(default=32, ge=1, le=1 << 20)
