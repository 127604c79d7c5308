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
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aqua_profiler.errors import EndpointError, EndpointRefusedError, EndpointStalledError
from aqua_profiler.estimate.rate import estimate_rate
from aqua_profiler.load.endpoint import Endpoint, ShedError
from aqua_profiler.load.trial import Trial
from aqua_profiler.measure.kv_cache import KvCachePoller, cache_of
from aqua_profiler.measure.open_loop import OpenLoopTrial
from aqua_profiler.measure.summary import TrialSummary
from aqua_profiler.report.profile import Findings, compose, spare_bytes
from aqua_profiler.search.journal import Journal
from aqua_profiler.search.rate_search import SearchResult, next_trial
from aqua_profiler.spec import ProfileSpec, UnloadedLatency
from aqua_protocol.profile import ModelProfile
from aqua_protocol.supervision import SupervisedTask

if TYPE_CHECKING:
    from aqua_cli import ProgressDisplay

LONE_REQUESTS: Final = 6
"""Requests one at a time: one warms up, five make a median. Doubled, slow engines spend twice as
much of the budget before the search."""

FIRST_PROMPT: Final = 8
"""Tokens of the first prompt at the most, chosen by hand: it fits any context, however many tokens
a word has. Doubled, it still does."""

LONE_SHARE: Final = 0.1
"""Share of the budget after which no more lone requests follow, chosen by hand. Doubled, slow
engines lose a trial."""

# Seconds of silence and share of the budget: the larger bounds `--stall-s`, for busy machines halt
# for seconds, and a stall must be found out while there is budget left to say so. Chosen by hand;
# doubled, a short budget may end before the stall does.
LEAST_STALL_S: Final = 5.0
STALL_SHARE: Final = 0.25

SETTLE_FACTOR: Final = 3.0
"""A probe faster than so many unloaded TTFTs finds the engine idle again. Chosen by hand; doubled,
the next trial may begin beside what is left of the last."""


def profile_llm(
    spec: ProfileSpec, shown: ProgressDisplay
) -> tuple[ModelProfile, EndpointError | None]:
    """Measure an endpoint; the error says why the profile is partial, if an endpoint failed.

    All times are those of the event loop that `asyncio.run` makes.

    Raises:
        JournalMismatchError: The journal is of another profile.
        LengthsInvalidError: No request fits the engine's context.
    """
    return asyncio.run(_LlmProfile(spec, shown).measure())


class _LlmProfile:
    def __init__(self, spec: ProfileSpec, shown: ProgressDisplay) -> None:
        self._spec = spec
        self._shown = shown
        self._journal = Journal(spec.journal, spec.subject())
        self._lengths = spec.lengths
        self._findings = Findings(engine=spec.provenance.engine)
        self._endpoint = Endpoint(spec.url, spec.model, spec.token)
        self._gauge = KvCachePoller(self._endpoint)
        self._stall_s = min(spec.stall_s, max(LEAST_STALL_S, STALL_SHARE * spec.budget_s))

    async def measure(self) -> tuple[ModelProfile, EndpointError | None]:
        self._clock: Callable[[], float] = asyncio.get_running_loop().time
        self._began_s = self._clock()
        error: EndpointError | None = None
        async with self._endpoint:
            try:
                await self._introduce()
                unloaded = await self._lone_requests()
                async with SupervisedTask(self._gauge.follow, "kv-cache-poller"):
                    await self._search(unloaded)
                    await self._burst(unloaded)
            except EndpointError as failure:
                error = failure
        profile = compose(self._spec, self._findings, self._journal, error)
        if not profile.partial:
            self._journal.remove()
        return profile, error

    @property
    def _left_s(self) -> float:
        return self._spec.budget_s - (self._clock() - self._began_s)

    # --- Before the load ------------------------------------------------------------------

    async def _introduce(self) -> None:
        """What the engine says of itself; it need not say anything."""
        self._shown.update(title="introduction")
        findings, folder = self._findings, self._spec.model_folder
        card = _card(await self._page("/v1/models"), self._spec.model)
        if folder is None and card.get("root"):
            # The path that the engine loaded the model from: on this machine, or on another.
            folder = Path(str(card["root"]))
        context = card.get("max_model_len")
        if isinstance(context, int) and context > 0:
            asked = len(self._lengths.pairs)
            self._lengths = self._lengths.fitting(context)
            self._endpoint.most_tokens = context
            if dropped := asked - len(self._lengths.pairs):
                findings.notes.append(
                    f"{dropped} of {asked} requests exceed the engine's context of {context} tokens"
                    " and were left out"
                )
        await self._gauge.look()
        seen = self._gauge.seen
        if seen.usage is None:
            findings.notes.append(
                "the engine does not report the use of its KV cache (/metrics), so what it spares"
                " is not known"
            )
        else:
            findings.cache = cache_of(seen.config, folder, self._spec.kv_bytes)
            if findings.cache.nbytes is None:
                findings.notes.append(
                    "the engine does not say how many bytes its KV cache has; give --kv-bytes or"
                    " --model-folder"
                )
        if not findings.engine and card.get("owned_by"):
            version = (await self._page("/version")).get("version", "")
            findings.engine = f"{card['owned_by']} {version}".strip()

    async def _page(self, path: str) -> dict[str, Any]:
        """A JSON object that the engine may show; a server that has none may even break off."""
        with contextlib.suppress(EndpointError, ValueError):
            content = json.loads(await self._endpoint.get(path) or b"")
            if isinstance(content, dict):
                return content
        return {}

    async def _lone_requests(self) -> UnloadedLatency:
        """One request at a time: the first warms up, the rest are measured."""
        endpoint, draw = self._endpoint, self._lengths.drawn(self._spec.seed)
        if self._journal.unloaded is not None:
            await self._lone_request(*next(draw), seed=0)
            return self._journal.unloaded
        self._shown.update(title="lone requests")
        firsts: list[float] = []
        stays: list[float] = []
        gaps: list[float] = []
        words, tokens = 0.0, 0
        for number in range(LONE_REQUESTS):
            prompt, output = next(draw)
            if number == 0:
                # How many tokens a word has is not known yet: this one fits whatever they are.
                prompt = min(prompt, FIRST_PROMPT)
            times, prompt_tokens = await self._lone_request(prompt, output, seed=number)
            if prompt_tokens:
                words += prompt * endpoint.words_per_token
                tokens += prompt_tokens
                endpoint.words_per_token = min(max(words / tokens, 0.1), 10.0)
            is_late = self._left_s < (1 - LONE_SHARE) * self._spec.budget_s
            if number > 0 or is_late:
                firsts.append(times[1] - times[0])
                stays.append(times[-1] - times[0])
                gaps += [later - earlier for earlier, later in pairwise(times[1:])]
            if is_late:
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

    async def _lone_request(
        self, prompt: int, output: int, *, seed: int
    ) -> tuple[list[float], int | None]:
        """Times of sending and of each piece, and the prompt's tokens as the server counts."""
        times = [self._clock()]
        self._findings.lone_requests += 1
        try:
            async with asyncio.timeout(self._stall_s) as silence:

                def heard() -> None:
                    times.append(self._clock())
                    silence.reschedule(times[-1] + self._stall_s)

                counted = await self._endpoint.ask(prompt, output, seed, lambda: None, heard)
        except TimeoutError as error:
            raise EndpointStalledError(
                f"a lone request had no token for {self._stall_s:.0f} s"
            ) from error
        except ShedError as error:
            raise EndpointRefusedError(
                "the endpoint turns away a lone request (429)",
                remedy="Profile it while nothing else uses it.",
            ) from error
        return times, counted

    # --- Load -----------------------------------------------------------------------------

    async def _search(self, unloaded: UnloadedLatency) -> None:
        spec, trials = self._spec, self._journal.trials
        while True:
            step = next_trial(
                spec.objective,
                unloaded,
                trials,
                left_s=self._left_s,
                budget_s=spec.budget_s,
                seed=spec.seed,
                predicted_per_s=spec.predicted_per_s,
            )
            if isinstance(step, SearchResult):
                self._findings.verdict = step
                return
            waits_s = step.patience * spec.objective.ttft_s
            drain_s = 2.0 + 3 * unloaded.residence_s + 2 * waits_s
            self._journal.note_trial(await self._load(unloaded, step, min(drain_s, self._left_s)))
            known = estimate_rate(spec.objective, unloaded, trials)
            if known.rate_per_s is not None:
                sure = f"{known.confidence:.0%} sure"
                self._shown.update(note=f"about {known.rate_per_s:.2f}/s, {sure}")

    async def _burst(self, unloaded: UnloadedLatency) -> None:
        """Bursts above the stable rate, for models that are no producers."""
        spec, cache, verdict = self._spec, self._findings.cache, self._findings.verdict
        if verdict is None or not verdict.complete or not verdict.estimate.rate_per_s:
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
            trial = Trial(
                rate_per_s=factor * verdict.estimate.rate_per_s,
                seed=spec.seed * 1_000 + 900 + round(10 * factor),
                most_s=spec.burst_s,
                to_the_end=True,
            )
            # What has not been answered at the end of the minute has been counted already.
            drain_s = min(1.0, self._left_s - spec.burst_s)
            self._journal.note_burst(factor, await self._load(unloaded, trial, drain_s))

    async def _load(self, unloaded: UnloadedLatency, trial: Trial, drain_s: float) -> TrialSummary:
        load = OpenLoopTrial(
            self._endpoint,
            self._lengths.drawn(trial.seed),
            trial,
            self._spec.objective,
            unloaded,
            stall_s=self._stall_s,
            drain_s=max(0.5, drain_s),
            listen=self._show_load,
            figures=lambda: self._gauge.seen,
        )
        try:
            summary = await load.go()
        except EndpointError:
            self._findings.failed_sends = load.sent
            raise
        if load.cancelled:
            await self._settle(unloaded)
        return summary

    def _show_load(self, rate_per_s: float, outstanding: int) -> None:
        self._shown.update(
            done=self._spec.budget_s - self._left_s,
            title=f"{rate_per_s:.2f} requests/s, {outstanding} outstanding",
        )

    async def _settle(self, unloaded: UnloadedLatency) -> None:
        """After a trial that had to be cut off: wait until the engine has forgotten it."""
        prompt, output = min(self._lengths.pairs)
        until_s = self._clock() + min(20.0, 0.2 * max(self._left_s, 0.0))
        while self._clock() < until_s:
            times, _ = await self._lone_request(
                prompt, min(output, 2), seed=self._findings.lone_requests
            )
            if times[1] - times[0] <= SETTLE_FACTOR * unloaded.ttft_s:
                return
            await asyncio.sleep(0.5)


def _card(page: dict[str, Any], model: str) -> dict[str, Any]:
    """What `/v1/models` says about the model."""
    listed = page.get("data")
    cards = [card for card in listed if isinstance(card, dict)] if isinstance(listed, list) else []
    return next((card for card in cards if card.get("id") == model), {})
