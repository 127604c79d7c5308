"""Which steps to have an engine make, and what of the recorded ones counts.

Pure. A *point* is a load under which the engine makes steps of certain shapes: prompts of one
length, a prompt of several chunks, a batch of decodes at some context, prompts beside decodes.
Together they span what a step-time profile is a function of, within what the engine takes at once.

What the engine really computed is in its own record, so it does not matter that prompts come out a
few tokens longer than asked for, or that it admits them in other steps. Steps of nearly the same
load count as one row, their median: a step that the machine interrupted says nothing of the engine.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final, NamedTuple, Self

from aqua_profiler.errors import EndpointGarbledError
from aqua_schedulers.conserve import MeasuredStep, StepLoad, StepTimeKey

REPEATS: Final = 4
"""Times that a prompt of a length is asked: the first may compile something, three make a median.
Doubled, prompts take twice as long."""

LEAST_STEPS: Final = 3
"""Steps of nearly the same load without which they make no row: a median drops one that was
interrupted. Doubled, long prompts make none."""

SAME_CONTEXT: Final = 2.0
"""Ratio of the contexts of decodes, and of the squared pairs of prompts, up to which loads count as
nearly the same: chunks of a long prompt are rows of their own. A row is one of its steps, with its
own load. Doubled, rows are fewer and each is of more steps."""

DECODE_STEPS: Final = 24
"""Tokens of answers that are decoded together at a point. Doubled, medians are of twice as many
steps, and points of long contexts take twice as long."""

FIRST_CHUNK: Final = 16
"""Tokens of the shortest prompt: less is dominated by what a step costs anyway. Doubled, a point
less."""

ROOM_SHARE: Final = 0.8
"""Share of memory and requests that points fill: an engine keeps some back, and a request that is
preempted for want of memory is no decode. It cannot be doubled."""


class StepPoint(NamedTuple):
    """A load.

    Attributes:
        batch: Requests that decode together; 0 for none.
        context: Tokens of each of their prompts.
        prompt: Tokens of prompts sent one after the other, beside the decodes where there are any;
            0 for none.
    """

    batch: int
    context: int
    prompt: int

    def __str__(self) -> str:
        parts = []
        if self.batch:
            parts.append(f"{self.batch} decodes of {self.context} tokens")
        if self.prompt:
            parts.append(f"prompts of {self.prompt} tokens")
        return " beside ".join(reversed(parts))


class EngineLimits(NamedTuple):
    """What an engine takes at once, as it says.

    Attributes:
        step_tokens: Of one step.
        requests: That run together.
        context_tokens: Of one request.
        memory_tokens: Of all.
        vocabulary: Ids that a token of a prompt may have.
    """

    step_tokens: int
    requests: int
    context_tokens: int
    memory_tokens: int
    vocabulary: int


class StepRecording(NamedTuple):
    """What an engine answers when it is asked for its steps."""

    key: StepTimeKey
    limits: EngineLimits
    steps: list[MeasuredStep]

    @classmethod
    def parse(cls, engine: dict[str, Any]) -> Self:
        """One engine's answer.

        Raises:
            EndpointGarbledError: It is of another form.
        """
        try:
            return cls(
                StepTimeKey(engine["model"], engine["engine"], engine["gpu"]),
                EngineLimits(**engine["limits"]),
                [MeasuredStep(StepLoad(*load), seconds) for *load, seconds in engine["steps"]],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise EndpointGarbledError(
                f"the engine's record of steps has another form: {error}",
                remedy="Use an aqua-profile of the engine's version of Aqua.",
            ) from error


def points_of(limits: EngineLimits) -> list[StepPoint]:
    """What to measure of an engine: prompts, then decodes, then both, each the shorter first."""
    memory = int(ROOM_SHARE * limits.memory_tokens)
    longest = max(1, min(limits.context_tokens - 2 * DECODE_STEPS, memory))
    whole = min(limits.step_tokens, longest)
    chunks = [*_doublings(FIRST_CHUNK, whole), whole]
    points = [StepPoint(0, 0, tokens) for tokens in dict.fromkeys(chunks)]
    if longest > whole:
        points.append(StepPoint(0, 0, longest))
    batches = list(_doublings(1, int(ROOM_SHARE * min(limits.requests, limits.step_tokens)), 4))
    contexts = dict.fromkeys((min(FIRST_CHUNK, longest), longest // 4, longest))
    decodes = [
        StepPoint(batch, tokens, 0)
        for batch in batches
        for tokens in contexts
        if tokens > 0 and batch * (tokens + DECODE_STEPS) <= memory
    ]
    points += decodes
    for beside in decodes[len(batches) // 2 :: max(1, len(decodes) // 3)]:
        room = memory - beside.batch * (beside.context + DECODE_STEPS)
        points += [
            beside._replace(prompt=tokens)
            for tokens in (whole // 8, whole // 2)
            if FIRST_CHUNK <= tokens <= room
        ]
    return points


def _doublings(first: int, last: int, factor: int = 2) -> Iterable[int]:
    value = first
    while value <= last:
        yield value
        value *= factor


def rows_of(steps: Iterable[MeasuredStep]) -> list[MeasuredStep]:
    """Medians of steps of nearly the same load, in the order in which these came first."""
    alike: dict[tuple[int, ...], list[MeasuredStep]] = defaultdict(list)
    for step in steps:
        if step.seconds > 0:
            load = step.load
            contexts = map(_class_of, (load.context_tokens, load.pair_tokens**2))
            alike[load.new_tokens, load.request_count, *contexts].append(step)
    rows = []
    for same in alike.values():
        if len(same) >= LEAST_STEPS:
            median = statistics.median_low(step.seconds for step in same)
            rows.append(next(step for step in same if step.seconds == median))
    return rows


def _class_of(tokens: float) -> int:
    return round(math.log1p(tokens) / math.log(SAME_CONTEXT))
