"""What an engine's own steps computed and how long they took, recorded while somebody asks.

`aqua-profile steps` fits a step-time profile to them; so they are told as co-serving sees steps:
what was computed is a `StepLoad`, and a step lasts from the call of the scheduler, or from the end
of the step before where steps overlap, until its output is taken in. One `StepTimer` of an engine
measures for both, and for `PrefillRate`: how fast prompts are computed says which victims are
cheaper to compute again than to page.

A recording ends by itself when it is full, so one that is forgotten costs nothing for long. While
nothing is recorded, and classes do not share the engine, a step costs a look at the clock and some
comparisons, and no look at what it computed.
"""

from __future__ import annotations

import os
import platform
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from aqua_schedulers.conserve import MeasuredStep, StepLoad, StepTimeKey
from aqualib.engines.vllm.options import model_name

MAX_STEPS: Final = 2048
"""Steps of a recording, some 100 KB as JSON. Doubled, an answer holds up the engine for twice as
long, some milliseconds."""

MIN_PREFILL_TOKENS: Final = 128
"""A step of so many tokens is long enough for its time to say how fast prompts are computed.
Doubled, engines with a small token budget never measure it."""

DECODE_SHARE: Final = 1 / 2
"""Of such a step's tokens, the most that may be one for each request, and drafts: the others are of
prompts. Doubled, a step of decodes passes for one of prompts."""

RATE_MEMORY: Final = 0.8
"""Weight of the past in the measured rate, by judgement: five steps decide. Nearer to 1, a change
of the load is believed later; doubled, the rate would diverge."""

# What of an engine's configuration changes how long its steps take, beside model and version, and
# the value that need not be said.
_SHAPING: Final = (
    ("model_config", "quantization", None, "quantized by"),
    ("cache_config", "cache_dtype", "auto", "KV in"),
    ("parallel_config", "tensor_parallel_size", 1, "TP"),
    ("parallel_config", "pipeline_parallel_size", 1, "PP"),
    ("model_config", "enforce_eager", False, "eager"),
)

_UNSEEN: Final = StepLoad()


class RecordingState(BaseModel):
    """What an operator may say about the recording: begin anew, or end."""

    model_config = ConfigDict(extra="forbid")

    recording: bool


class StepTimer:
    """How long the steps of one engine take, on its scheduler's thread; times are monotonic."""

    def __init__(self) -> None:
        self._called_s: float | None = None
        self._under_way: deque[tuple[Any, StepLoad, float]] = deque()
        self._last_end_s = 0.0

    def called(self, now_s: float) -> None:
        """The scheduler is called; of several calls for one step, the first counts."""
        if self._called_s is None:
            self._called_s = now_s

    def skipped(self) -> None:
        """That call gave a step that is not timed."""
        self._called_s = None

    @property
    def is_timing(self) -> bool:
        """Whether a timed step is under way; then the end of any other matters, too."""
        return bool(self._under_way)

    def scheduled(self, output: Any, load: StepLoad = _UNSEEN) -> None:
        """That call gave a step, which may compute nothing.

        Args:
            output: The scheduler's, by which the step's end is known.
            load: What it computes, which takes a look at each of its requests; left out where only
                its time is asked for.
        """
        assert self._called_s is not None, "a step was scheduled by no call"
        self._under_way.append((output, load, self._called_s))
        self._called_s = None

    def ended(self, output: Any, now_s: float) -> MeasuredStep | None:
        """A step's output is there; steps end in the order in which they were scheduled.

        Returns:
            What it was; None of one that was not timed.
        """
        last_end_s, self._last_end_s = self._last_end_s, now_s
        if all(known is not output for known, _, _ in self._under_way):
            return None
        known = None
        while known is not output:
            known, load, begun_s = self._under_way.popleft()
        return MeasuredStep(load, now_s - max(begun_s, last_end_s))


class PrefillRate:
    """How fast an engine computes prompts, by its own steps that are mostly prompts.

    Attributes:
        tokens_per_s: A moving mean; 0 until there was such a step.
    """

    def __init__(self) -> None:
        self.tokens_per_s = 0.0

    def is_told_by(self, output: Any) -> bool:
        """Whether the time of a step, by the scheduler's output, says something of it."""
        tokens: int = output.total_num_scheduled_tokens
        if tokens < MIN_PREFILL_TOKENS:
            return False
        drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        return len(output.num_scheduled_tokens) + drafts <= tokens * DECODE_SHARE

    def note(self, output: Any, seconds: float) -> None:
        """A step took so long; one that says nothing of prompts changes nothing."""
        if self.is_told_by(output):
            rate = output.total_num_scheduled_tokens / max(seconds, 1e-9)
            past = self.tokens_per_s or rate
            self.tokens_per_s = RATE_MEMORY * past + (1 - RATE_MEMORY) * rate


class StepLog:
    """Steps of one engine, on its scheduler's thread.

    Attributes:
        is_recording: Whether steps are noted.
    """

    def __init__(self) -> None:
        self.is_recording = False
        self._steps: list[MeasuredStep] = []

    @property
    def steps(self) -> list[MeasuredStep]:
        """Those of this recording, or of the last, as they ended."""
        return list(self._steps)

    def record(self, *, recording: bool) -> None:
        """Begin a recording anew, or end it."""
        self.is_recording = recording
        if recording:
            self._steps.clear()

    def note(self, step: MeasuredStep) -> None:
        """A step has ended; one that computed nothing is none."""
        if self.is_recording and step.load != StepLoad():
            self._steps.append(step)
            self.is_recording = len(self._steps) < MAX_STEPS


def load_of(output: Any, requests: Mapping[str, Any]) -> StepLoad:
    """What a step computes.

    Args:
        output: The scheduler's.
        requests: All of the engine's, by id, as they are once it is scheduled.
    """
    load = StepLoad()
    for name, tokens in output.num_scheduled_tokens.items():
        request = requests[name]
        before = request.num_computed_tokens - tokens
        if tokens == 1 and before >= request.num_prompt_tokens:
            load = load.and_decode(before + 1)
        else:
            load = load.and_chunk(tokens, before)
    return load


def engine_key(vllm_config: Any) -> StepTimeKey:
    """Name what a step-time profile of this engine is found by."""
    import vllm
    from vllm.platforms import current_platform

    dtype = str(vllm_config.model_config.dtype).removeprefix("torch.")
    facts = [f"vLLM {vllm.__version__}", dtype]
    for part, name, usual, said in _SHAPING:
        value = getattr(getattr(vllm_config, part), name, usual)
        if value != usual:
            facts.append(said if value is True else f"{said} {value}")
    if current_platform.is_cpu():
        gpu = f"none: {platform.machine()}, {os.cpu_count()} cores"
    else:
        gpu = str(current_platform.get_device_name())
    model = model_name(vllm_config) or str(vllm_config.model_config.model)
    return StepTimeKey(model, ", ".join(facts), gpu)


def engine_limits(scheduler: Any) -> dict[str, int]:
    """What an engine takes: tokens of a step, requests, what memory holds, its vocabulary."""
    config = scheduler.vllm_config
    blocks = len(scheduler.kv_cache_manager.block_pool.blocks) - 1
    return {
        "step_tokens": int(scheduler.max_num_scheduled_tokens),
        "requests": int(config.scheduler_config.max_num_seqs),
        "context_tokens": int(config.model_config.max_model_len),
        "memory_tokens": blocks * int(config.cache_config.block_size),
        "vocabulary": int(config.model_config.get_vocab_size()),
    }
