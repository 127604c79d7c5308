"""A profile of an LLM endpoint: warm up, search, read the cache, burst, label.

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
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

from aqua_profiler.cache import Cache, CacheGauge, cache_of
from aqua_profiler.endpoint import Answered, Endpoint, ShedError
from aqua_profiler.errors import EndpointError, EndpointRefusedError, EndpointStalledError
from aqua_profiler.estimating import Estimate, estimate, is_measured, meets
from aqua_profiler.journal import Journal
from aqua_profiler.lengths import Lengths
from aqua_profiler.loading import Load, Progress
from aqua_profiler.objective import Objective, Run, Unloaded
from aqua_profiler.observing import Summary
from aqua_profiler.searching import Verdict, next_step
from aqua_protocol.profile import (
    PRODUCER_THRESHOLD_BYTES,
    Burst,
    ModelProfile,
    ProfileKind,
    ProfileLabel,
    Provenance,
    label_of,
)

LONE_REQUESTS: Final = 6
LONE_SHARE: Final = 0.1
DEFAULT_BURSTS: Final = (2.0, 1.5, 3.0)
"""The planned one first: a budget may end before the others."""

STALL_SHARE: Final = 0.25
"""Of the budget: a stall must be found out while there is budget left to say so."""

LATENESS_LIMIT_S: Final = 0.010
SETTLE_FACTOR: Final = 3.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure.

    Attributes:
        url: Of the endpoint.
        model: As the endpoint calls it.
        lengths: Of its requests.
        objective: What the rate has to meet.
        budget_s: For everything.
        api: `completions`, `chat` or None to find out.
        token: For the endpoint.
        seed: Of arrivals, lengths and words.
        threshold_bytes: From which spare memory makes a producer.
        tensor_parallel: GPUs that share the model.
        hbm_bytes: Of each of them.
        kv_bytes: Size of the KV cache per GPU, where the operator knows it.
        model_folder: With the model's `config.json`.
        bursts: Factors of the stable rate, in the order of importance.
        burst_s: How long each lasts.
        long_prompt_tokens: A prompt that should be possible beside the load.
        prefix_tokens: Prefixes to keep cached.
        stall_s: Silence that counts as a stall.
        journal: Where to keep what is measured.
        provenance: What the caller knows about the where and how.
    """

    url: str
    model: str
    lengths: Lengths
    objective: Objective
    budget_s: float
    api: str | None = None
    token: str | None = None
    seed: int = 0
    threshold_bytes: int = PRODUCER_THRESHOLD_BYTES
    tensor_parallel: int = 1
    hbm_bytes: int | None = None
    kv_bytes: int | None = None
    model_folder: Path | None = None
    bursts: tuple[float, ...] = DEFAULT_BURSTS
    burst_s: float = 60.0
    long_prompt_tokens: int = 0
    prefix_tokens: int = 0
    stall_s: float = 30.0
    journal: Path | None = None
    provenance: Provenance = field(default_factory=Provenance)


class Listener(Protocol):
    """Watches a profile being made."""

    def stage(self, name: str) -> None:
        """A new part has begun."""

    def progress(self, progress: Progress, left_s: float) -> None:
        """A run goes on."""

    def found(self, known: Estimate) -> None:
        """A run has ended, and this is known now."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A profile, and why it is partial if an endpoint failed."""

    profile: ModelProfile
    error: EndpointError | None = None


def profile_llm(
    plan: Plan, listener: Listener, clock: Callable[[], float] = time.monotonic
) -> Outcome:
    """Measure an endpoint.

    Raises:
        JournalMismatchError: The journal is of another profile.
        LengthsInvalidError: No request fits the engine's context.
        EndpointError: It failed before anything could be measured.
    """
    return asyncio.run(_Profiling(plan, listener, clock).go())


class _Profiling:
    def __init__(self, plan: Plan, listener: Listener, clock: Callable[[], float]) -> None:
        self._plan = plan
        self._listener = listener
        self._clock = clock
        self._began_s = clock()
        self._journal = Journal(plan.journal, _subject(plan))
        self._lengths = plan.lengths
        self._notes: list[str] = []
        self._lone = 0
        self._failed_sends = 0
        self._verdict: Verdict | None = None
        self._cache: Cache | None = None
        self._engine = plan.provenance.engine

    @property
    def _left_s(self) -> float:
        return self._plan.budget_s - (self._clock() - self._began_s)

    @property
    def _stall_s(self) -> float:
        return min(self._plan.stall_s, max(2.0, STALL_SHARE * self._plan.budget_s))

    async def go(self) -> Outcome:
        """Everything."""
        plan = self._plan
        async with Endpoint(plan.url, plan.model, api=plan.api, token=plan.token) as endpoint:
            gauge = CacheGauge(endpoint)
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
        profile = self._profile(error)
        if not profile.partial:
            self._journal.remove()
        return Outcome(profile, error)

    # --- Before the load ------------------------------------------------------------------

    async def _introduce(self, endpoint: Endpoint, gauge: CacheGauge) -> None:
        """What the engine says of itself; it need not say anything."""
        self._listener.stage("introduction")
        folder = self._plan.model_folder
        page = None
        # A server that knows nothing but its operation may break such connections off.
        with contextlib.suppress(EndpointError):
            page = await endpoint.get("/v1/models")
        card = _card(page, self._plan.model)
        if folder is None and card.get("root"):
            # The path that the engine loaded the model from: on this machine, or on another.
            folder = Path(str(card["root"]))
        context = card.get("max_model_len")
        if isinstance(context, int) and context > 0:
            kept = self._lengths.fitting(context)
            dropped = len(self._lengths.pairs) - len(kept.pairs)
            if dropped:
                self._notes.append(
                    f"{dropped} of {len(self._lengths.pairs)} requests exceed the engine's context"
                    f" of {context} tokens and were left out"
                )
            self._lengths = kept
        readings = await gauge.look()
        if readings is None or readings.usage is None:
            self._notes.append(
                "the engine does not report the use of its KV cache (/metrics), so what it spares"
                " is not known"
            )
        else:
            self._cache = cache_of(readings.config, folder, self._plan.kv_bytes)
            if self._cache.nbytes is None:
                self._notes.append(
                    "the engine does not say how many bytes its KV cache has; give --kv-bytes or"
                    " --model-folder"
                )
        if not self._engine and card.get("owned_by"):
            version = None
            with contextlib.suppress(EndpointError):
                version = await endpoint.get("/version")
            number = _json(version).get("version", "") if version else ""
            self._engine = f"{card['owned_by']} {number}".strip()

    async def _lone_requests(self, endpoint: Endpoint) -> Unloaded:
        """One request at a time: the first warms up, the rest are measured."""
        if self._journal.unloaded is not None:
            await self._lone_request(endpoint, *next(self._lengths.drawn(self._plan.seed)), seed=0)
            return self._journal.unloaded
        self._listener.stage("lone requests")
        draw = self._lengths.drawn(self._plan.seed)
        firsts: list[float] = []
        stays: list[float] = []
        gaps: list[float] = []
        for number in range(LONE_REQUESTS):
            prompt, output = next(draw)
            times, answered = await self._lone_request(endpoint, prompt, output, seed=number)
            if number == 0 and answered.prompt_tokens:
                ratio = prompt / answered.prompt_tokens
                endpoint.words_per_token = min(max(ratio * endpoint.words_per_token, 0.1), 10.0)
            if number > 0 or self._is_late():
                firsts.append(times[1] - times[0])
                stays.append(times[-1] - times[0])
                gaps += [later - earlier for earlier, later in pairwise(times[1:])]
            if firsts and self._is_late():
                break
        unloaded = Unloaded(
            ttft_s=statistics.median(firsts),
            residence_s=statistics.fmean(stays),
            tbt_s=statistics.median(gaps) if gaps else 0.0,
        )
        self._journal.note_unloaded(unloaded)
        return unloaded

    def _is_late(self) -> bool:
        return self._left_s < (1 - LONE_SHARE) * self._plan.budget_s

    async def _lone_request(
        self, endpoint: Endpoint, prompt: int, output: int, *, seed: int
    ) -> tuple[list[float], Answered]:
        """Times of sending and of each piece."""
        times = [self._clock()]
        asking = endpoint.ask(
            prompt, output, seed, lambda: None, lambda: times.append(self._clock())
        )
        self._lone += 1
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
                remedy="Profile it while nobody else uses it.",
            ) from error
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    # --- Load -----------------------------------------------------------------------------

    async def _search(self, endpoint: Endpoint, gauge: CacheGauge, unloaded: Unloaded) -> None:
        plan, runs = self._plan, self._journal.runs
        while True:
            step = next_step(
                plan.objective,
                unloaded,
                runs,
                left_s=self._left_s,
                budget_s=plan.budget_s,
                seed=plan.seed,
            )
            if isinstance(step, Verdict):
                self._verdict = step
                return
            self._listener.stage("ramp" if step.doubling_s else f"{step.rate_per_s:.2f} requests/s")
            summary = await self._load(endpoint, gauge, unloaded, step)
            self._journal.note_run(summary)
            self._listener.found(estimate(plan.objective, unloaded, runs))

    async def _burst(self, endpoint: Endpoint, gauge: CacheGauge, unloaded: Unloaded) -> None:
        """Bursts above the stable rate, for models that are no producers."""
        plan, cache = self._plan, self._cache
        rate = None if self._verdict is None else self._verdict.estimate.rate_per_s
        if not rate or self._verdict is None or not self._verdict.complete:
            return
        if cache is None or cache.bytes_per_token is None:
            return
        spare = self._spare_bytes()
        if spare is None or spare >= plan.threshold_bytes:
            return
        done = {factor for factor, _ in self._journal.bursts}
        for factor in plan.bursts:
            if factor in done:
                continue
            if self._left_s < plan.burst_s + 2 * unloaded.residence_s:
                self._notes.append(f"no time was left for the burst of {factor:g} x")
                continue
            self._listener.stage(f"burst of {factor:g} x")
            run = Run(
                rate_per_s=factor * rate,
                seed=plan.seed * 1_000 + 900 + round(10 * factor),
                most_s=plan.burst_s,
                to_the_end=True,
            )
            # What has not been answered at the end of the minute has been counted already.
            summary = await self._load(endpoint, gauge, unloaded, run, drain_s=1.0)
            self._journal.note_burst(factor, summary)

    async def _load(
        self,
        endpoint: Endpoint,
        gauge: CacheGauge,
        unloaded: Unloaded,
        run: Run,
        *,
        drain_s: float | None = None,
    ) -> Summary:
        if drain_s is None:
            waits_s = run.patience * self._plan.objective.ttft_s
            drain_s = 2.0 + 3 * unloaded.residence_s + 2 * waits_s
        load = Load(
            endpoint,
            self._lengths.drawn(run.seed),
            run,
            self._plan.objective,
            unloaded,
            stall_s=self._stall_s,
            drain_s=max(
                0.5, min(drain_s, self._left_s - run.most_s if run.to_the_end else self._left_s)
            ),
            listen=lambda progress: self._listener.progress(progress, self._left_s),
            kv_usage=lambda: gauge.usage,
        )
        try:
            summary = await load.go()
        except EndpointError:
            self._failed_sends = load.summary_so_far().sent
            raise
        if load.cancelled:
            await self._settle(endpoint, unloaded)
        return summary

    async def _settle(self, endpoint: Endpoint, unloaded: Unloaded) -> None:
        """After a run that had to be cut off: wait until the engine has forgotten it."""
        prompt, output = min(self._lengths.pairs)
        until_s = self._clock() + min(20.0, 0.2 * max(self._left_s, 0.0))
        while self._clock() < until_s:
            times, _ = await self._lone_request(endpoint, prompt, min(output, 2), seed=self._lone)
            if times[1] - times[0] <= SETTLE_FACTOR * unloaded.ttft_s:
                return
            await asyncio.sleep(0.5)

    # --- After ----------------------------------------------------------------------------

    def _spare_bytes(self) -> int | None:
        """What the cache leaves at the stable rate."""
        cache, verdict = self._cache, self._verdict
        if cache is None or cache.nbytes is None or verdict is None:
            return None
        usage = _usage_at_rate(self._plan.objective, verdict.estimate, self._journal.runs)
        return None if usage is None else max(0, int((1 - min(usage, 1.0)) * cache.nbytes))

    def _bursts(self) -> list[Burst]:
        cache = self._cache
        if cache is None or cache.bytes_per_token is None or cache.nbytes is None:
            return []
        found = []
        for factor, summary in sorted(self._journal.bursts):
            held = int(summary.tokens_peak * cache.bytes_per_token)
            found.append(
                Burst(
                    factor=factor,
                    seconds=summary.seconds,
                    requests=summary.sent,
                    context_bytes=held,
                    needed_bytes=max(0, held - cache.nbytes),
                )
            )
        return found

    def _needs(self, spare: int | None, bursts: Sequence[Burst]) -> dict[str, int]:
        """Swap by purpose."""
        plan, cache = self._plan, self._cache
        needs = {f"burst_{burst.factor:g}x": burst.needed_bytes for burst in bursts}
        per_token = None if cache is None else cache.bytes_per_token
        if per_token is not None and spare is not None:
            if plan.long_prompt_tokens:
                needs["long_prompt"] = max(0, int(plan.long_prompt_tokens * per_token) - spare)
            if plan.prefix_tokens:
                needs["prefix_cache"] = int(plan.prefix_tokens * per_token)
        return needs

    def _needed_bytes(self, needs: dict[str, int]) -> int | None:
        """Of the planned burst or the long prompt, whichever is more, and the prefixes beside."""
        planned = next(
            (
                needs[name]
                for factor in self._plan.bursts
                if (name := f"burst_{factor:g}x") in needs
            ),
            None,
        )
        if planned is None and not needs.get("long_prompt") and not needs.get("prefix_cache"):
            return None
        return max(planned or 0, needs.get("long_prompt", 0)) + needs.get("prefix_cache", 0)

    def _profile(self, error: EndpointError | None) -> ModelProfile:
        plan, journal = self._plan, self._journal
        verdict = self._verdict
        if verdict is None and journal.unloaded is not None:
            known: Estimate | None = estimate(plan.objective, journal.unloaded, journal.runs)
        else:
            known = None if verdict is None else verdict.estimate
        partial = error is not None or verdict is None or not verdict.complete
        notes = list(self._notes)
        if verdict is not None:
            notes.append(f"the search ended: {verdict.reason}")
        if error is not None:
            notes.append(f"the endpoint failed: {error.message}")
        late_s = max((run.lateness_p99_s for run in journal.runs), default=0.0)
        if late_s > LATENESS_LIMIT_S:
            notes.append(
                f"the load generator itself was late by {late_s * 1e3:.0f} ms (p99): give it a core"
            )
        spare = None if partial else self._spare_bytes()
        bursts = self._bursts()
        needs = self._needs(spare, bursts)
        needed = None if partial else self._needed_bytes(needs)
        is_producer = spare is not None and spare >= max(1, plan.threshold_bytes)
        if is_producer and needed is None:
            needed = 0
        label = ProfileLabel.UNKNOWN
        if not partial:
            label = label_of(spare, needed, plan.threshold_bytes)
        near = _nearest(plan.objective, known, journal.runs)
        sent = sum(run.sent for run in journal.runs) + sum(run.sent for _, run in journal.bursts)
        return ModelProfile(
            model=plan.model,
            kind=ProfileKind.LLM,
            label=label,
            spare_bytes=spare,
            needed_bytes=needed,
            threshold_bytes=plan.threshold_bytes,
            tensor_parallel=plan.tensor_parallel,
            hbm_bytes=plan.hbm_bytes,
            stable_rate_per_s=None if known is None else known.rate_per_s,
            confidence=0.0 if known is None else known.confidence,
            requests_sent=sent + self._lone + self._failed_sends,
            bursts=bursts,
            partial=partial,
            notes=notes,
            provenance=plan.provenance.model_copy(update={"engine": self._engine}),
            **_more(plan, known, near, journal, self._cache, needs, late_s, error),
        )


def _more(
    plan: Plan,
    known: Estimate | None,
    near: Summary | None,
    journal: Journal,
    cache: Cache | None,
    needs: dict[str, int],
    late_s: float,
    error: EndpointError | None,
) -> dict[str, Any]:
    """Fields beyond those that the schema fixes."""
    objective = plan.objective
    return {
        "objective": {
            "ttft_s": objective.ttft_s,
            "ttft_quantile": objective.ttft_quantile,
            "tbt_s": objective.tbt_s,
            "tbt_quantile": objective.tbt_quantile,
        },
        "rate_error": None if known is None else known.error,
        "limited_by": None if known is None else known.limited_by,
        "at_stable_rate": None
        if near is None
        else {
            "rate_per_s": near.rate_per_s,
            "ttft_s": near.ttft_s,
            "ttft_p99_s": near.ttft_p99_s,
            "tbt_s": near.tbt_s,
            "kv_usage": near.kv_usage,
        },
        "kv_cache": None if cache is None else asdict(cache),
        "needs_bytes": needs,
        "lateness_p99_s": late_s,
        "unloaded": None if journal.unloaded is None else asdict(journal.unloaded),
        "runs": [run.as_json() for run in journal.runs],
        "error": None if error is None else error.to_body().model_dump(mode="json"),
    }


def _nearest(
    objective: Objective, known: Estimate | None, runs: Sequence[Summary]
) -> Summary | None:
    """The steady run at the highest rate that met the objective, not above the estimate."""
    steady = [run for run in runs if is_measured(run) and meets(objective, run)]
    if known is None or known.rate_per_s is None or not steady:
        return None
    return max(steady, key=lambda run: run.rate_per_s)


def _usage_at_rate(objective: Objective, known: Estimate, runs: Sequence[Summary]) -> float | None:
    """The highest use of the cache in a steady run near the rate; of overloads, none counts."""
    near = _nearest(objective, known, runs)
    return None if near is None else near.kv_usage


def _subject(plan: Plan) -> dict[str, Any]:
    """What makes two profiles the same measurement."""
    return {
        "url": plan.url,
        "model": plan.model,
        "workload_sha256": plan.lengths.digest,
        "objective": asdict(plan.objective),
        "seed": plan.seed,
    }


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
