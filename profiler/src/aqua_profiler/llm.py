"""A profile of an LLM endpoint in the making: warm up, search, read the cache, burst.

The order in which the budget is spent: lone requests (at most a tenth), the search, and where the
model turns out not to be a producer, bursts above the stable rate. When the budget ends first, or
the endpoint fails, what is known is written down as a partial profile: with the rate as far as it
is known, and without a label.

Source: Aqua sections 4.1 and 9.4.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

from aqua_profiler.errors import EndpointError, EndpointRefusedError, EndpointStalledError
from aqua_profiler.estimate.rate import Estimate, estimate_rate
from aqua_profiler.load.endpoint import Completion, Endpoint, ShedError
from aqua_profiler.load.trial import Trial
from aqua_profiler.measure.kv_cache import KvCachePoller, cache_of
from aqua_profiler.measure.open_loop import OpenLoopTrial, TrialProgress
from aqua_profiler.measure.summary import TrialSummary
from aqua_profiler.objective import UnloadedLatency
from aqua_profiler.report.profile import Findings, compose, spare_bytes
from aqua_profiler.search.journal import Journal
from aqua_profiler.search.rate_search import SearchResult, next_trial
from aqua_profiler.spec import ProfileSpec
from aqua_protocol.profile import ModelProfile

LONE_REQUESTS: Final = 6
"""Requests one at a time: one warms up, five make a median. Twelve cost slow engines a minute."""

FIRST_PROMPT: Final = 8
"""Tokens of the first prompt at the most: it fits any context, however many tokens a word has."""

LONE_SHARE: Final = 0.1
"""Of the budget, after which no more lone requests follow. Doubled, slow engines lose a trial."""

LEAST_STALL_S: Final = 5.0
"""Busy machines halt for seconds."""

STALL_SHARE: Final = 0.25
"""Of the budget: a stall must be found out while there is budget left to say so."""

SETTLE_FACTOR: Final = 3.0
"""Of the unloaded TTFT: a probe faster than that finds the engine idle again. Doubled, the next
trial may begin beside what is left of the last."""


class ProfileListener(Protocol):
    """Watches a profile being made."""

    def stage(self, name: str) -> None:
        """A new part has begun."""

    def progress(self, progress: TrialProgress, left_s: float) -> None:
        """A trial goes on."""

    def found(self, known: Estimate) -> None:
        """A trial has ended, and this is known now."""


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """A profile, and why it is partial if an endpoint failed."""

    profile: ModelProfile
    error: EndpointError | None = None


def profile_llm(spec: ProfileSpec, listener: ProfileListener) -> ProfileResult:
    """Measure an endpoint; all times are those of the event loop that `asyncio.run` makes.

    Raises:
        JournalMismatchError: The journal is of another profile.
        LengthsInvalidError: No request fits the engine's context.
        EndpointError: It failed before anything could be measured.
    """
    return asyncio.run(_LlmProfile(spec, listener).measure())


class _LlmProfile:
    def __init__(self, spec: ProfileSpec, listener: ProfileListener) -> None:
        self._spec = spec
        self._listener = listener
        self._began_s = 0.0
        self._journal = Journal(spec.journal, spec.subject())
        self._lengths = spec.lengths
        self._findings = Findings(engine=spec.provenance.engine)

    @staticmethod
    def _clock() -> float:
        return asyncio.get_running_loop().time()

    @property
    def _left_s(self) -> float:
        return self._spec.budget_s - (self._clock() - self._began_s)

    @property
    def _stall_s(self) -> float:
        return min(self._spec.stall_s, max(LEAST_STALL_S, STALL_SHARE * self._spec.budget_s))

    async def measure(self) -> ProfileResult:
        """Everything."""
        spec = self._spec
        self._began_s = self._clock()
        async with Endpoint(spec.url, spec.model, api=spec.api, token=spec.token) as endpoint:
            gauge = KvCachePoller(endpoint)
            error: EndpointError | None = None
            try:
                await self._introduce(endpoint, gauge)
                unloaded = await self._lone_requests(endpoint)
                following = asyncio.create_task(gauge.follow())
                try:
                    await self._search(endpoint, gauge, unloaded)
                    await self._burst(endpoint, gauge, unloaded)
                finally:
                    following.cancel()
                    await asyncio.gather(following, return_exceptions=True)
            except EndpointError as failure:
                error = failure
        profile = compose(spec, self._findings, self._journal, error)
        if not profile.partial:
            self._journal.remove()
        return ProfileResult(profile, error)

    # --- Before the load ------------------------------------------------------------------

    async def _introduce(self, endpoint: Endpoint, gauge: KvCachePoller) -> None:
        """What the engine says of itself; it need not say anything."""
        self._listener.stage("introduction")
        folder = self._spec.model_folder
        page = None
        # A server that knows nothing but its operation may break such connections off.
        with contextlib.suppress(EndpointError):
            page = await endpoint.get("/v1/models")
        card = _card(page, self._spec.model)
        if folder is None and card.get("root"):
            # The path that the engine loaded the model from: on this machine, or on another.
            folder = Path(str(card["root"]))
        context = card.get("max_model_len")
        if isinstance(context, int) and context > 0:
            kept = self._lengths.fitting(context)
            dropped = len(self._lengths.pairs) - len(kept.pairs)
            if dropped:
                self._findings.notes.append(
                    f"{dropped} of {len(self._lengths.pairs)} requests exceed the engine's context"
                    f" of {context} tokens and were left out"
                )
            self._lengths = kept
            endpoint.most_tokens = context
        readings = await gauge.look()
        if readings is None or readings.usage is None:
            self._findings.notes.append(
                "the engine does not report the use of its KV cache (/metrics), so what it spares"
                " is not known"
            )
        else:
            self._findings.cache = cache_of(readings.config, folder, self._spec.kv_bytes)
            if self._findings.cache.nbytes is None:
                self._findings.notes.append(
                    "the engine does not say how many bytes its KV cache has; give --kv-bytes or"
                    " --model-folder"
                )
        if not self._findings.engine and card.get("owned_by"):
            version = None
            with contextlib.suppress(EndpointError):
                version = await endpoint.get("/version")
            number = _json(version).get("version", "") if version else ""
            self._findings.engine = f"{card['owned_by']} {number}".strip()

    async def _lone_requests(self, endpoint: Endpoint) -> UnloadedLatency:
        """One request at a time: the first warms up, the rest are measured."""
        if self._journal.unloaded is not None:
            await self._lone_request(endpoint, *next(self._lengths.drawn(self._spec.seed)), seed=0)
            return self._journal.unloaded
        self._listener.stage("lone requests")
        draw = self._lengths.drawn(self._spec.seed)
        firsts: list[float] = []
        stays: list[float] = []
        gaps: list[float] = []
        words, tokens = 0.0, 0
        for number in range(LONE_REQUESTS):
            prompt, output = next(draw)
            if number == 0:
                # How many tokens a word has is not known yet: this one fits whatever they are.
                prompt = min(prompt, FIRST_PROMPT)
            times, answered = await self._lone_request(endpoint, prompt, output, seed=number)
            if answered.prompt_tokens:
                words += prompt * endpoint.words_per_token
                tokens += answered.prompt_tokens
                endpoint.words_per_token = min(max(words / tokens, 0.1), 10.0)
            if number > 0 or self._is_late():
                firsts.append(times[1] - times[0])
                stays.append(times[-1] - times[0])
                gaps += [later - earlier for earlier, later in pairwise(times[1:])]
            if firsts and self._is_late():
                break
        if not tokens:
            self._findings.notes.append(
                "the engine does not count tokens (usage), so a prompt has as many words as its"
                " length asks for tokens"
            )
        unloaded = UnloadedLatency(
            ttft_s=statistics.median(firsts),
            residence_s=statistics.fmean(stays),
            tbt_s=statistics.median(gaps) if gaps else 0.0,
        )
        self._journal.note_unloaded(unloaded)
        return unloaded

    def _is_late(self) -> bool:
        return self._left_s < (1 - LONE_SHARE) * self._spec.budget_s

    async def _lone_request(
        self, endpoint: Endpoint, prompt: int, output: int, *, seed: int
    ) -> tuple[list[float], Completion]:
        """Times of sending and of each piece."""
        times = [self._clock()]
        asking = endpoint.ask(
            prompt, output, seed, lambda: None, lambda: times.append(self._clock())
        )
        self._findings.lone_requests += 1
        task = asyncio.ensure_future(asking)
        seen, quiet_since_s = 1, self._clock()
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=0.05)
                if len(times) > seen:
                    seen, quiet_since_s = len(times), self._clock()
                if self._clock() - quiet_since_s > self._stall_s and not task.done():
                    raise EndpointStalledError(
                        f"a lone request had no token for {self._stall_s:.0f} s"
                    )
            return times, task.result()
        except ShedError as error:
            raise EndpointRefusedError(
                "the endpoint turns away a lone request (429)",
                remedy="Profile it while nothing else uses it.",
            ) from error
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    # --- Load -----------------------------------------------------------------------------

    async def _search(
        self, endpoint: Endpoint, gauge: KvCachePoller, unloaded: UnloadedLatency
    ) -> None:
        spec, trials = self._spec, self._journal.trials
        while True:
            step = next_trial(
                spec.objective,
                unloaded,
                trials,
                left_s=self._left_s,
                budget_s=spec.budget_s,
                seed=spec.seed,
            )
            if isinstance(step, SearchResult):
                self._findings.verdict = step
                return
            self._listener.stage("ramp" if step.doubling_s else f"{step.rate_per_s:.2f} requests/s")
            summary = await self._load(endpoint, gauge, unloaded, step)
            self._journal.note_trial(summary)
            self._listener.found(estimate_rate(spec.objective, unloaded, trials))

    async def _burst(
        self, endpoint: Endpoint, gauge: KvCachePoller, unloaded: UnloadedLatency
    ) -> None:
        """Bursts above the stable rate, for models that are no producers."""
        spec, cache, verdict = self._spec, self._findings.cache, self._findings.verdict
        rate = None if verdict is None else verdict.estimate.rate_per_s
        if not rate or verdict is None or not verdict.complete:
            return
        if cache is None or cache.bytes_per_token is None:
            return
        spare = spare_bytes(spec.objective, self._findings, self._journal)
        if spare is None or spare >= spec.threshold_bytes:
            return
        done = {factor for factor, _ in self._journal.bursts}
        for factor in spec.bursts:
            if factor in done:
                continue
            if self._left_s < spec.burst_s + 2 * unloaded.residence_s:
                self._findings.notes.append(f"no time was left for the burst of {factor:g} x")
                continue
            self._listener.stage(f"burst of {factor:g} x")
            trial = Trial(
                rate_per_s=factor * rate,
                seed=spec.seed * 1_000 + 900 + round(10 * factor),
                most_s=spec.burst_s,
                to_the_end=True,
            )
            # What has not been answered at the end of the minute has been counted already.
            summary = await self._load(endpoint, gauge, unloaded, trial, drain_s=1.0)
            self._journal.note_burst(factor, summary)

    async def _load(
        self,
        endpoint: Endpoint,
        gauge: KvCachePoller,
        unloaded: UnloadedLatency,
        trial: Trial,
        *,
        drain_s: float | None = None,
    ) -> TrialSummary:
        if drain_s is None:
            waits_s = trial.patience * self._spec.objective.ttft_s
            drain_s = 2.0 + 3 * unloaded.residence_s + 2 * waits_s
        load = OpenLoopTrial(
            endpoint,
            self._lengths.drawn(trial.seed),
            trial,
            self._spec.objective,
            unloaded,
            stall_s=self._stall_s,
            drain_s=max(
                0.5, min(drain_s, self._left_s - trial.most_s if trial.to_the_end else self._left_s)
            ),
            listen=lambda progress: self._listener.progress(progress, self._left_s),
            kv_usage=lambda: gauge.usage,
        )
        try:
            summary = await load.go()
        except EndpointError:
            self._findings.failed_sends = load.summary_so_far().sent
            raise
        if load.cancelled:
            await self._settle(endpoint, unloaded)
        return summary

    async def _settle(self, endpoint: Endpoint, unloaded: UnloadedLatency) -> None:
        """After a trial that had to be cut off: wait until the engine has forgotten it."""
        prompt, output = min(self._lengths.pairs)
        until_s = self._clock() + min(20.0, 0.2 * max(self._left_s, 0.0))
        while self._clock() < until_s:
            times, _ = await self._lone_request(
                endpoint, prompt, min(output, 2), seed=self._findings.lone_requests
            )
            if times[1] - times[0] <= SETTLE_FACTOR * unloaded.ttft_s:
                return
            await asyncio.sleep(0.5)


def _card(page: bytes | None, model: str) -> dict[str, Any]:
    """What `/v1/models` says about the model."""
    listed = _json(page).get("data") if page else None
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    return next((card for card in cards if card.get("id") == model), {})


def _json(page: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        content = json.loads(page)
        if isinstance(content, dict):
            return content
    return {}
