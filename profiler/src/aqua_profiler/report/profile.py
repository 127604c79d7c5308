"""Makes a profile of what was measured of an LLM endpoint: spare bytes, swap needed, label.

Pure. A profile that is partial has no label and spares nothing, whatever was measured: what its
numbers would be at the true rate is not known.

Source: Aqua sections 4.1 and 9.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from aqua_profiler.errors import EndpointError
from aqua_profiler.estimate.rate import Estimate, estimate_rate
from aqua_profiler.measure.kv_cache import KvCache
from aqua_profiler.measure.summary import TrialSummary
from aqua_profiler.search.journal import Journal
from aqua_profiler.search.rate_search import SearchResult
from aqua_profiler.spec import LatencyObjective, ProfileSpec
from aqua_protocol.profile import (
    Burst,
    ModelProfile,
    ProfileKind,
    ProfileLabel,
    StableQueue,
    label_of,
)

LATENESS_LIMIT_S: Final = 0.010
"""Seconds (p99) from which the generator's own lateness is noted: a tenth of the limit of TBT.
Doubled, it would be a fifth of what is measured before anyone is told."""

NEAR_RATE: Final = 0.9
"""Share of the highest rate that met the objective above which a trial's queue counts as that of
the stable rate: one trial alone sees few waits. Doubled, none would; at 0.8 queues come out
shorter."""


@dataclass(slots=True)
class Findings:
    """What is known of an endpoint so far, beside its journal.

    Attributes:
        engine: Its name and version, if it says so.
        cache: Its KV cache, if it says anything of it.
        verdict: How the search ended; None if it did not.
        lone_requests: Sent one at a time.
        failed_sends: Sent in a trial that failed.
    """

    engine: str = ""
    cache: KvCache | None = None
    verdict: SearchResult | None = None
    lone_requests: int = 0
    failed_sends: int = 0
    notes: list[str] = field(default_factory=list)


def compose(
    plan: ProfileSpec, findings: Findings, journal: Journal, error: EndpointError | None
) -> ModelProfile:
    """The profile of what was found out; the error says why the endpoint failed, if it did."""
    verdict = findings.verdict
    known = None if verdict is None else verdict.estimate
    if verdict is None and journal.unloaded is not None:
        known = estimate_rate(plan.objective, journal.unloaded, journal.trials)
    partial = error is not None or verdict is None or not verdict.complete
    notes = list(findings.notes)
    if verdict is not None:
        notes.append(f"the search ended: {verdict.reason}")
    if error is not None:
        notes.append(f"the endpoint failed: {error.message}")
    if known is not None and known.drift:
        notes.append(
            f"the endpoint's own speed changed between trials, by {known.drift:.0%} (standard"
            " deviation): the rate is that of its median speed, other minutes have others"
        )
    late_s = max((trial.lateness_p99_s for trial in journal.trials), default=0.0)
    if late_s > LATENESS_LIMIT_S:
        notes.append(
            f"the load generator itself was late by {late_s * 1e3:.0f} ms (p99): give it a core"
        )
    spare = None if partial else spare_bytes(plan.objective, findings, journal)
    bursts = _bursts(findings.cache, journal)
    needs = _needs(plan, findings.cache, spare, bursts)
    needed = None if partial else _needed_bytes(plan, needs)
    if needed is None and spare is not None and spare >= max(1, plan.threshold_bytes):
        needed = 0
    more: dict[str, Any] = {
        "needs_bytes": needs,
        "lateness_p99_s": late_s,
        "error": None if error is None else error.to_body().model_dump(mode="json"),
    }
    sent = sum(trial.sent for trial in [*journal.trials, *(burst for _, burst in journal.bursts)])
    return ModelProfile(
        model=plan.model,
        kind=ProfileKind.LLM,
        label=ProfileLabel.UNKNOWN if partial else label_of(spare, needed, plan.threshold_bytes),
        spare_bytes=spare,
        needed_bytes=needed,
        threshold_bytes=plan.threshold_bytes,
        tensor_parallel=plan.tensor_parallel,
        hbm_bytes=plan.hbm_bytes,
        stable_rate_per_s=None if known is None else known.rate_per_s,
        queue=None if partial else stable_queue(plan.objective, verdict, journal.trials),
        confidence=0.0 if known is None else known.confidence,
        requests_sent=sent + findings.lone_requests + findings.failed_sends,
        bursts=bursts,
        partial=partial,
        notes=notes,
        provenance=plan.provenance.model_copy(update={"engine": findings.engine}),
        **_details(plan.objective, known, journal, findings.cache),
        **more,
    )


def spare_bytes(objective: LatencyObjective, findings: Findings, journal: Journal) -> int | None:
    """What the cache leaves at the stable rate; None if it is not known."""
    cache, verdict = findings.cache, findings.verdict
    if cache is None or cache.nbytes is None or verdict is None:
        return None
    # Of overloads, none counts.
    near = _nearest(objective, verdict.estimate, journal.trials)
    if near is None or near.kv_usage is None:
        return None
    return max(0, int((1 - min(near.kv_usage, 1.0)) * cache.nbytes))


def stable_queue(
    objective: LatencyObjective, verdict: SearchResult | None, trials: Sequence[TrialSummary]
) -> StableQueue | None:
    """Requests that wait at the stable rate: of all trials near it that met the objective."""
    known = None if verdict is None else verdict.estimate
    highest = _nearest(objective, known, trials)
    if highest is None:
        return None
    near = [
        (trial.seconds, trial.queue)
        for trial in trials
        if trial.queue is not None
        and trial.is_measured
        and trial.meets(objective)
        and trial.rate_per_s >= NEAR_RATE * highest.rate_per_s
    ]
    total_s = sum(seconds for seconds, _ in near)
    if not total_s:
        return None
    length, share = (sum(s * queue[which] for s, queue in near) / total_s for which in (0, 1))
    return StableQueue(mean_length=length, waiting_share=min(share, 1.0))


def _bursts(cache: KvCache | None, journal: Journal) -> list[Burst]:
    if cache is None or cache.bytes_per_token is None or cache.nbytes is None:
        return []
    found = []
    for factor, summary in sorted(journal.bursts):
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


def _needs(
    plan: ProfileSpec, cache: KvCache | None, spare: int | None, bursts: Sequence[Burst]
) -> dict[str, int]:
    """Swap by purpose."""
    needs = {f"burst_{burst.factor:g}x": burst.needed_bytes for burst in bursts}
    per_token = None if cache is None else cache.bytes_per_token
    if per_token is not None and spare is not None:
        if plan.long_prompt_tokens:
            needs["long_prompt"] = max(0, int(plan.long_prompt_tokens * per_token) - spare)
        if plan.prefix_tokens:
            needs["prefix_cache"] = int(plan.prefix_tokens * per_token)
    return needs


def _needed_bytes(plan: ProfileSpec, needs: dict[str, int]) -> int | None:
    """Of the planned burst or the long prompt, whichever is more, and the prefixes beside."""
    planned = next(
        (needs[name] for factor in plan.bursts if (name := f"burst_{factor:g}x") in needs), None
    )
    if planned is None and not needs.get("long_prompt") and not needs.get("prefix_cache"):
        return None
    return max(planned or 0, needs.get("long_prompt", 0)) + needs.get("prefix_cache", 0)


def _details(
    objective: LatencyObjective, known: Estimate | None, journal: Journal, cache: KvCache | None
) -> dict[str, Any]:
    """Measurements beyond the fields that the schema fixes."""
    near = _nearest(objective, known, journal.trials)
    limits = ("ttft_s", "ttft_quantile", "tbt_s", "tbt_quantile")
    shown = ("rate_per_s", "ttft_s", "ttft_p99_s", "tbt_s", "kv_usage")
    return {
        "objective": {name: getattr(objective, name) for name in limits},
        "rate_error": None if known is None else known.error,
        "limited_by": None if known is None else known.limited_by,
        "at_stable_rate": None if near is None else {name: getattr(near, name) for name in shown},
        "kv_cache": None if cache is None else asdict(cache),
        "unloaded": None if journal.unloaded is None else asdict(journal.unloaded),
        # Tables by level are for the search; the journal has them.
        "runs": [asdict(replace(trial, paces=())) for trial in journal.trials],
    }


def _nearest(
    objective: LatencyObjective, known: Estimate | None, trials: Sequence[TrialSummary]
) -> TrialSummary | None:
    """The steady trial at the highest rate that met the objective, not above the estimate."""
    steady = [trial for trial in trials if trial.is_measured and trial.meets(objective)]
    if known is None or known.rate_per_s is None or not steady:
        return None
    return max(steady, key=lambda trial: trial.rate_per_s)
