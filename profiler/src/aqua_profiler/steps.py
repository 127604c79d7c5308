"""`aqua-profile steps`: how long an engine's steps take, by what they compute.

A running vLLM under Aqua records its own steps (`/aqua/steps`); requests of chosen lengths make it
compute the points of `step_points`, one point at a time, and a profile is fitted to what it
recorded. Every fourth row is kept from the fit and tells how far off the profile is on loads that
it has not seen.

Every finished point is in the journal at once, so an interrupted run goes on from there. Other
traffic on the engine does no harm but scatter: its steps are recorded by what they compute, too.

Source: ConServe section 4.5, "Profiler".
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from aqua_profiler.errors import EndpointError, EndpointRefusedError
from aqua_profiler.load.endpoint import Endpoint, ShedError
from aqua_profiler.load.step_recorder import StepRecorder
from aqua_profiler.measure.step_points import (
    DECODE_STEPS,
    REPEATS,
    StepPoint,
    StepRecording,
    points_of,
    rows_of,
)
from aqua_profiler.search.journal import Journal
from aqua_schedulers.conserve import MeasuredStep, StepTimeKey, StepTimeProfile, fitted_profile

if TYPE_CHECKING:
    from aqua_cli import ProgressDisplay

FIRST_TOKEN_ID: Final = 100
"""Of prompts, which go up to half of the vocabulary: special tokens are at either end of it.
Doubled, they are as far away."""


@dataclass(frozen=True, slots=True)
class StepsSpec:
    """What to measure.

    Attributes:
        url: Of the server.
        model: As the server calls it; None for the only one that it serves.
        budget_s: Seconds after which no further point begins.
        token: For requests.
        admin_token: The engine's `AQUA_ADMIN_TOKEN`.
        folder: Of profiles; the journal stands there, unless it is named.
        journal: To resume from.
        seed: Of the rows that are kept from the fit.
    """

    url: str
    model: str | None
    budget_s: float
    folder: Path
    token: str | None = field(default=None, repr=False)
    admin_token: str | None = field(default=None, repr=False)
    journal: Path | None = None
    seed: int = 0


class StepsResult(NamedTuple):
    """What came of it.

    Attributes:
        key: What the engine is.
        journal: To be removed once the profile is kept.
        profile: None where points are missing.
        rows: Measured, in the order of the fit.
        done, total: Points.
        error: Why it ended early, if the endpoint failed.
    """

    key: StepTimeKey
    journal: Journal
    profile: StepTimeProfile | None
    rows: list[MeasuredStep]
    done: int
    total: int
    error: EndpointError | None = None


def profile_steps(spec: StepsSpec, shown: ProgressDisplay) -> StepsResult:
    """Measure an engine's steps.

    Raises:
        AquaError: The engine records no steps, or refuses to.
        JournalMismatchError: The journal is of another engine.
    """
    return asyncio.run(_StepsProfile(spec, shown).measure())


class _StepsProfile:
    def __init__(self, spec: StepsSpec, shown: ProgressDisplay) -> None:
        self._spec = spec
        self._shown = shown
        self._seed = 0

    async def measure(self) -> StepsResult:
        clock = asyncio.get_running_loop().time
        until_s = clock() + self._spec.budget_s
        async with StepRecorder(self._spec.url, self._spec.admin_token) as recorder:
            await recorder.record(recording=True)
            record = StepRecording.parse((await recorder.read())[0])
            subject: dict[str, Any] = {**record.key._asdict(), "limits": list(record.limits)}
            place = self._spec.journal or self._spec.folder / f"{record.key.file_name}.journal"
            place.parent.mkdir(parents=True, exist_ok=True)
            journal = Journal(place, subject)
            points = points_of(record.limits)
            error: EndpointError | None = None
            try:
                async with Endpoint(
                    self._spec.url, self._spec.model or await self._served(), self._spec.token
                ) as endpoint:
                    vocabulary = record.limits.vocabulary // 2
                    endpoint.token_ids = range(min(FIRST_TOKEN_ID, vocabulary), vocabulary + 1)
                    for done, point in enumerate(points):
                        self._shown.update(done=done / len(points), title=str(point))
                        if str(point) in journal.points:
                            continue
                        if clock() > until_s:
                            break
                        await recorder.record(recording=True)
                        await self._make(endpoint, point)
                        told = await recorder.read()
                        steps = [step for one in told for step in StepRecording.parse(one).steps]
                        journal.note_point(str(point), rows_of(steps))
                await recorder.record(recording=False)
            except ShedError:
                error = EndpointRefusedError(
                    "the endpoint turns requests away (429)",
                    remedy="Profile it while nothing else uses it.",
                )
            except EndpointError as failure:
                error = failure
        return self._found(record, journal, len(points), error)

    def _found(
        self, record: StepRecording, journal: Journal, total: int, error: EndpointError | None
    ) -> StepsResult:
        rows = [row for rows in journal.points.values() for row in rows]
        # Checked rows must not be those of one kind of point.
        random.Random(self._spec.seed).shuffle(rows)
        done = len(journal.points)
        profile = None
        if done == total:
            profile = fitted_profile(rows, **record.key._asdict())
        return StepsResult(record.key, journal, profile, rows, done, total, error)

    async def _served(self) -> str:
        """The model that the server serves, where the caller does not say."""
        async with Endpoint(self._spec.url, "", self._spec.token) as endpoint:
            return await endpoint.served_model()

    async def _make(self, endpoint: Endpoint, point: StepPoint) -> None:
        """Have the engine compute a point."""
        if not point.batch:
            for _ in range(REPEATS):
                await self._ask(endpoint, point.prompt, 1)
            return
        batch: list[asyncio.Event] = []

        async def decode() -> None:
            output = DECODE_STEPS * (1 + bool(point.prompt))
            begun = asyncio.Event()
            batch.append(begun)
            try:
                await self._ask(endpoint, point.context, output, begun.set)
            finally:
                batch.remove(begun)
                begun.set()

        async def prompts() -> None:
            for begun in (*batch,):
                await begun.wait()
            while batch and point.prompt:
                await self._ask(endpoint, point.prompt, 1)

        # In this order: `prompts` begins when all decodes have.
        ends = await asyncio.gather(
            *(decode() for _ in range(point.batch)), prompts(), return_exceptions=True
        )
        for end in ends:
            if end is not None:
                raise end

    async def _ask(
        self,
        endpoint: Endpoint,
        prompt: int,
        output: int,
        on_token: Callable[[], None] = lambda: None,
    ) -> None:
        self._seed += 1
        await endpoint.ask(prompt, output, self._seed, lambda: None, on_token)
