"""A recorded day out of a Prometheus: rates, lengths and latencies of engines that report to it.

Asked over HTTP for vLLM's metrics by model, window by window: first tokens (how many requests),
histograms of prompt and output lengths, steps and the tokens in them, latencies; DCGM's utilisation
of all GPUs; and what Aqua, if it runs, lends already.

Requests are drawn: so many in each window as had a first token in it, at even odds, with lengths
from the histograms, between whose bounds they are spread evenly in logarithms, scaled to the
window's means, which are exact. Step times follow from the windows: a token took as long as the
steps that it saw, which have more in them than a mean step, since many tokens see a large one.

What is not there is named and left out: a window without samples is cut out, a counter that was
reset is told, a metric that no engine reports leaves its number unchecked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, nan
from typing import Any, Final, Self

import numpy as np
from jaxtyping import Bool, Float64, Int64

from aqua_protocol.errors import ConfigError, UnavailableError
from aqua_simulator.whatif.cluster import Cluster, EngineShape, InputFinding
from aqua_simulator.whatif.recorded_day import ModelLoad, RecordedLoad

TIMEOUT_S: Final = 60.0
"""Seconds that a query may take. Doubled, a dead server is noticed later."""

MAX_WINDOWS: Final = 2000
"""Windows of a day; Prometheus answers with 11,000 points at most. Doubled, longer days may be
asked in as fine windows."""

QUIET_OTHERS: Final = 0.2
"""Requests beside another one up to which a window's first tokens hardly wait for others. Doubled,
more windows tell of prompts, and waiting enters their step times."""

_ROUNDS: Final = 4
"""Of finding how many decode beside each other and beside prompts. Doubled, nothing changes."""
_HALVINGS: Final = 40
"""Of a span of 1: as fine as floats of that size. Doubled, nothing changes."""

_WIDEST: Final = 4.0
"""Times the mean step of decodes, beyond which a step was a prompt's: a window seldom has decodes
so uneven. Doubled, prompts that are computed again count as decodes sooner."""

Windows = Float64[np.ndarray, " windows"]

_FIRST: Final = "vllm:time_to_first_token_seconds"
_BETWEEN: Final = "vllm:inter_token_latency_seconds"
_ANSWERING: Final = "vllm:request_time_per_output_token_seconds"
_STEPS: Final = "vllm:iteration_tokens_total"
_PROMPT: Final = "vllm:request_prompt_tokens"
_OUTPUT: Final = "vllm:request_generation_tokens"


@dataclass(slots=True)
class PrometheusSource:
    """One Prometheus and the time that it is asked about.

    Attributes:
        window_s: Seconds of a window; the first one ends at `start_s + window_s`.
    """

    url: str
    start_s: float
    end_s: float
    window_s: float
    token: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.window_count <= MAX_WINDOWS:
            raise ConfigError(
                f"{self.window_count} windows of {self.window_s:g} s",
                remedy=f"Choose --window so that the hours have 1 to {MAX_WINDOWS}.",
            )

    @property
    def window_count(self) -> int:
        """Whole windows."""
        return int((self.end_s - self.start_s) / self.window_s + 0.5)

    def query(self, expression: str) -> list[tuple[dict[str, str], Windows]]:
        """Series of an expression, NaN where there is no value.

        Raises:
            UnavailableError: Nothing answers there.
            ConfigError: It refuses the question, or answers something else.
        """
        import httpx

        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        first_s = self.start_s + self.window_s
        try:
            answer = httpx.post(
                f"{self.url.rstrip('/')}/api/v1/query_range",
                data={
                    "query": expression,
                    "start": f"{first_s:.3f}",
                    "end": f"{self.start_s + self.window_count * self.window_s:.3f}",
                    "step": f"{self.window_s:.3f}",
                },
                headers=headers,
                timeout=TIMEOUT_S,
            )
        except httpx.HTTPError as error:
            raise UnavailableError(
                f"no Prometheus at {self.url}: {error}", remedy="Check --prometheus."
            ) from error
        try:
            document: dict[str, Any] = answer.json()
            rows = document["data"]["result"] if document["status"] == "success" else None
        except (ValueError, KeyError, TypeError):
            rows = document = None  # type: ignore[assignment]  # told below
        if rows is None:
            told = (document or {}).get("error", f"HTTP {answer.status_code}")
            raise ConfigError(
                f"{self.url} does not answer as a Prometheus: {told}",
                remedy="Give its address, and --prometheus-token if it wants one.",
            )
        series = []
        for row in rows:
            values = np.full(self.window_count, nan)
            for time_s, value in row["values"]:
                index = round((float(time_s) - first_s) / self.window_s)
                if 0 <= index < self.window_count:
                    values[index] = float(value)
            series.append((row["metric"], values))
        return series

    def increase(self, metric: str, selector: str, by: str = "") -> dict[str, Windows]:
        """How much a counter grew in each window, by a label."""
        window = f"{self.window_s:.3f}".rstrip("0").rstrip(".")
        grouped = f"sum by ({by})" if by else "sum"
        found = self.query(f"{grouped} (increase({metric}{{{selector}}}[{window}s]))")
        return {labels.get(by, ""): values for labels, values in found}

    def total(self, metric: str, selector: str) -> Windows | None:
        """The growth of a counter over all engines; None if nothing reports it."""
        return next(iter(self.increase(metric, selector).values()), None)


def read_prometheus(source: PrometheusSource, cluster: Cluster, *, seed: int = 0) -> RecordedLoad:
    """The day as a Prometheus saw it.

    Raises:
        UnavailableError: Nothing answers there.
        ConfigError: No model of the cluster reports there.
    """
    findings: list[InputFinding] = []
    loads, is_seen = dict[str, ModelLoad](), np.zeros(source.window_count, dtype=bool)
    samples: dict[str, Bool[np.ndarray, " windows"]] = {}
    for name, shape in cluster.engines.items():
        selector = f'model_name="{shape.deployed.metrics_name or name}"'
        requests = source.total(f"{_FIRST}_count", selector)
        if requests is None:
            requests = source.total(f"{_PROMPT}_count", selector)
        if requests is None:
            message = f"no engine reports {selector}: left out with its GPUs"
            findings.append(InputFinding("missing metric", name, message))
            continue
        is_seen |= ~np.isnan(requests)
        window = f"{source.window_s:g}s"
        resets = source.query(f"sum(resets({_FIRST}_count{{{selector}}}[{window}]))")
        count = sum(float(np.nansum(values)) for _, values in resets)
        if count:
            message = (
                f"{count:.0f} times an engine began anew: counts since the last sample are lost"
            )
            findings.append(InputFinding("counter reset", name, message))
        load = _load(source, shape, selector, np.nan_to_num(requests), findings, seed)
        if load is not None:
            loads[name], samples[name] = load, ~np.isnan(requests)
    if not loads:
        told = "; ".join(each.message for each in findings)
        raise ConfigError(
            f"{source.url} knows no model of the cluster in that time: {told}",
            remedy="Name them as the label model_name does, or set metrics_name of each.",
        )
    findings += _unlisted(source, cluster)
    for name, own in samples.items():
        if lacking := int((is_seen & ~own).sum()):
            hours = lacking * source.window_s / 3600.0
            message = f"no samples for {hours:.2f} h in which others have some: idle meanwhile"
            findings.append(InputFinding("gap", name, message))
    missing = np.flatnonzero(~is_seen)
    if len(missing):
        hours = len(missing) * source.window_s / 3600.0
        message = f"no samples of any model for {hours:.2f} h: cut out, neither idle nor busy"
        findings.append(InputFinding("gap", source.url, message))
        loads = {name: _without(load, missing, source.window_s) for name, load in loads.items()}
    _tell_others(source, findings)
    unknown = tuple(name for name in cluster.engines if name not in loads)
    return RecordedLoad(int(is_seen.sum()) * source.window_s, loads, findings, unknown)


def _unlisted(source: PrometheusSource, cluster: Cluster) -> list[InputFinding]:
    """Models that report there and that the cluster does not list."""
    listed = {shape.deployed.metrics_name or name for name, shape in cluster.engines.items()}
    window = f"{source.window_s:g}s"
    counted = source.query(f"sum by (model_name) (increase({_FIRST}_count[{window}]))")
    return [
        InputFinding(
            "unknown model",
            source.url,
            f"{np.nansum(values):.0f} requests of {labels['model_name']!r}, which is not in the "
            "deployment list: left out",
        )
        for labels, values in counted
        if labels.get("model_name") and labels["model_name"] not in listed
    ]


def _load(
    source: PrometheusSource,
    shape: EngineShape,
    selector: str,
    requests: Windows,
    findings: list[InputFinding],
    seed: int,
) -> ModelLoad | None:
    """A model's requests and what was seen of them; None, and why, if nothing says how long."""
    name = shape.deployed.name

    def means(metric: str) -> tuple[Windows, float] | None:
        """Means by window, NaN where nothing was counted, and over the day."""
        sums, counts = (source.total(f"{metric}_{part}", selector) for part in ("sum", "count"))
        if sums is None or counts is None or not np.nansum(counts):
            findings.append(InputFinding("missing metric", name, f"no {metric}"))
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(counts > 0, sums / counts, nan), np.nansum(sums) / np.nansum(counts)

    generator = np.random.default_rng([seed, 7])
    # Whole requests: what a window lacks of one, the next ones have.
    edges = np.rint(np.concatenate([[0.0], np.cumsum(requests)])).astype(int)
    owner = np.repeat(np.arange(source.window_count), np.diff(edges))
    arrival_s = np.sort((owner + generator.random(len(owner))) * source.window_s)
    lengths = []
    for metric in (_PROMPT, _OUTPUT):
        known = means(metric)
        if known is None:
            findings.append(InputFinding("missing metric", name, _LENGTHS))
            return None
        drawn = _drawn(source.increase(f"{metric}_bucket", selector, "le"), len(owner), generator)
        by_window, mean = known
        wanted = np.where(np.isnan(by_window), mean, by_window)[owner]
        # Each window's requests get its mean, whatever was drawn for them.
        sums = np.bincount(owner, drawn, source.window_count)
        counts = np.bincount(owner, minlength=source.window_count)
        drawn_mean = (sums / np.maximum(1, counts))[owner]
        lengths.append(np.maximum(1, np.rint(drawn * wanted / drawn_mean)).astype(np.int64))
    seen = {
        key: found
        for key, metric in (("first", _FIRST), ("between", _BETWEEN), ("steps", _STEPS))
        if (found := means(metric)) is not None
    }
    observed: dict[str, float] = {}
    for key, metric in (("ttft", _FIRST), ("tpot", _ANSWERING)):
        found = seen["first"] if key == "ttft" and "first" in seen else None
        found = found or (means(metric) if key == "tpot" else None)
        if found is not None:
            observed[f"{key}_mean_s"] = float(found[1])
            observed[f"{key}_p99_s"] = _quantile(
                source.increase(f"{metric}_bucket", selector, "le"), 0.99
            )
    unknown = np.full(len(owner), nan)
    rows, seconds = np.empty((0, 5)), np.empty(0)
    if {"between", "steps"} <= seen.keys():
        steps = source.increase(f"{_STEPS}_bucket", selector, "le")
        decodes = source.total(f"{_BETWEEN}_count", selector)
        assert decodes is not None
        summed = _Windows.of(owner, lengths[0], lengths[1], steps, decodes, shape)
        first_s = seen["first"][0] if "first" in seen else np.full(source.window_count, nan)
        rows, seconds = summed.observations(seen["between"][0], first_s)
    return ModelLoad(arrival_s, lengths[0], lengths[1], unknown, unknown, observed, rows, seconds)


_LENGTHS: Final = (
    "no lengths: left out with its GPUs; vLLM reports lengths, unless --disable-log-stats is set"
)


@dataclass(frozen=True, slots=True)
class _Windows:
    """What the engines of a model computed in each window.

    Attributes:
        requests, chunks, tokens, pairs: Prompts, the steps that they take, their tokens, and their
            pairs of tokens.
        decodes: Tokens after first ones.
        context: Mean context that one of these reads.
        others: Requests that decode beside it on its engine, on average.
    """

    requests: Windows
    chunks: Windows
    tokens: Windows
    pairs: Windows
    decodes: Windows
    context: Windows
    others: Windows

    @classmethod
    def of(
        cls,
        owner: Int64[np.ndarray, " requests"],
        prompts: Int64[np.ndarray, " requests"],
        outputs: Int64[np.ndarray, " requests"],
        steps: dict[str, Windows],
        decodes: Windows,
        shape: EngineShape,
    ) -> Self:
        """Add up the requests of each window, `owner` of each.

        Args:
            steps: Up to so many tokens, by bound, as the engines counted them.
            decodes: Tokens after first ones, likewise.
        """

        def summed(values: Float64[np.ndarray, " requests"]) -> Windows:
            found: Windows = np.bincount(owner, values, len(decodes))
            return found

        prompt, output = prompts.astype(float), outputs.astype(float)
        chunks = summed(np.ceil(prompt / shape.deployed.max_num_batched_tokens))
        with np.errstate(divide="ignore", invalid="ignore"):
            # Long answers decode more, and read more each time.
            context = summed(output * (prompt + output / 2.0)) / summed(output)
        return cls(
            summed(np.ones(len(owner))),
            chunks,
            summed(prompt),
            summed(prompt**2 / 2.0),
            decodes,
            context,
            _others(steps, decodes, chunks),
        )

    def observations(
        self, between_s: Windows, first_s: Windows
    ) -> tuple[Float64[np.ndarray, "rows 5"], Windows]:
        """Windows as observations of steps: of decodes, and of prompts where little else ran.

        A token sees the prompts that are computed beside it: those that come to an engine while
        others decode there. One that comes to an idle engine is seen by no token.

        Args:
            between_s, first_s: Means of the times between tokens and to the first one.
        """
        none, one = np.zeros(len(self.others)), np.ones(len(self.others))
        with np.errstate(divide="ignore", invalid="ignore"):
            seen = self.others / self.decodes
            decodes = np.column_stack(
                [
                    one,
                    1.0 + self.others + seen * self.tokens,
                    (1.0 + self.others) * self.context,
                    seen * self.pairs,
                    none,
                ]
            )
            shares = (self.chunks, self.tokens, none, self.pairs, self.requests)
            prompts = np.column_stack([each / self.requests for each in shares])
        prompts[self.others > QUIET_OTHERS] = nan
        system, spent = np.vstack([decodes, prompts]), np.concatenate([between_s, first_s])
        known = np.isfinite(system).all(axis=1) & np.isfinite(spent) & (spent > 0)
        return system[known], spent[known]


def _others(buckets: dict[str, Windows], decodes: Windows, chunks: Windows) -> Windows:
    """How many requests decode beside another one, from how many tokens steps had.

    Steps of prompts have the most tokens; those of the others are their decodes. A request sees a
    step with n of them n times as often as it is taken, so mean squares tell what is seen. Where
    in its bucket a step lies is the same place in all, by which there are as many decodes as were
    counted.

    Args:
        buckets: Steps up to so many tokens, by bound.
    """
    if not buckets:
        return np.full(len(decodes), nan)
    bounds = sorted(float(bound) for bound in buckets)
    highest = max((bound for bound in bounds if isfinite(bound)), default=1.0)
    high = np.minimum(bounds, 2.0 * highest)[:, None]
    low = np.minimum(np.append(0.0, high[:-1]) + 1.0, high[:, 0])[:, None]
    by_bound = {float(bound): values for bound, values in buckets.items()}
    steps = np.maximum.accumulate([np.nan_to_num(by_bound[bound]) for bound in bounds])
    others = np.zeros(len(decodes))
    with np.errstate(divide="ignore", invalid="ignore"):
        alone = steps[-1] - chunks
        of_decodes = np.diff(np.minimum(steps, alone), axis=0, prepend=0.0)
        # Prompts that were put out and computed again make more such steps than there are prompts.
        of_decodes[low > _WIDEST * (1.0 + decodes / alone)] = 0.0
        for _ in range(_ROUNDS):
            # Prompts meet as many decodes as a decode does.
            wanted = decodes - chunks * others
            least, most = np.zeros(len(decodes)), np.ones(len(decodes))
            for _ in range(_HALVINGS):
                place = (least + most) / 2.0
                is_less = (of_decodes * low ** (1.0 - place) * high**place).sum(axis=0) < wanted
                least, most = np.where(is_less, place, least), np.where(is_less, most, place)
            size = low ** (1.0 - least) * high**least
            seen = (of_decodes * size**2).sum(axis=0) / (of_decodes * size).sum(axis=0)
            others = np.maximum(0.0, np.nan_to_num(seen) - 1.0)
    return np.where(decodes > 0, others, nan)


def _cumulated(buckets: dict[str, Windows]) -> tuple[list[float], Float64[np.ndarray, " bounds"]]:
    """Bounds of a histogram, and how many are up to each."""
    sums = sorted((float(le), float(np.nansum(values))) for le, values in buckets.items() if le)
    return [bound for bound, _ in sums], np.maximum.accumulate([count for _, count in sums])


def _drawn(
    buckets: dict[str, Windows], count: int, generator: np.random.Generator
) -> Float64[np.ndarray, " count"]:
    """Lengths from a histogram, even in logarithms between its bounds; stratified."""
    bounds, sums = _cumulated(buckets)
    if not count or not sums.size or sums[-1] <= 0:
        return np.ones(count)
    levels = (generator.permutation(count) + generator.random(count)) / count * sums[-1]
    highest = max(bound for bound in bounds if isfinite(bound))
    ends = np.log([min(max(bound, 1.0), 2.0 * highest) for bound in bounds])
    drawn = np.interp(levels, np.append(0.0, sums), np.append(0.0, ends))
    return np.asarray(np.exp(drawn), dtype=np.float64)


def _quantile(buckets: dict[str, Windows], level: float) -> float:
    """A quantile of a histogram, as Prometheus reckons it."""
    bounds, sums = _cumulated(buckets)
    if not sums.size or sums[-1] <= 0:
        return 0.0
    index = int(np.searchsorted(sums, level * sums[-1]))
    if bounds[index] == inf:
        return bounds[index - 1]
    low, before = (bounds[index - 1], sums[index - 1]) if index else (0.0, 0.0)
    return float(low + (bounds[index] - low) * (level * sums[-1] - before) / (sums[index] - before))


def _without(load: ModelLoad, missing: Sequence[int] | np.ndarray, window_s: float) -> ModelLoad:
    """The load with the missing windows cut out of its times."""
    gone = np.searchsorted(np.asarray(missing), (load.arrival_s // window_s).astype(int))
    return replace(load, arrival_s=load.arrival_s - gone * window_s)


def _tell_others(source: PrometheusSource, findings: list[InputFinding]) -> None:
    """What DCGM and Aqua report, beside the engines."""
    window = f"{source.window_s:g}s"
    for expression, text, factor, unit in (
        (f"avg(avg_over_time(DCGM_FI_DEV_GPU_UTIL[{window}]))", "GPUs were busy for", 1.0, "%"),
        (f"sum(avg_over_time(DCGM_FI_DEV_FB_FREE[{window}]))", "GPU memory free", 1 / 1024, "GiB"),
        (f"max(avg_over_time(aqua_offered_bytes[{window}]))", "Aqua lends already", 1e-9, "GB"),
    ):
        metric = expression.split("(")[2].split("[")[0]
        values = [value for _, value in source.query(expression)]
        known = np.concatenate(values) if values else np.empty(0)
        if len(known) and not np.isnan(known).all():
            mean = float(np.nanmean(known)) * factor
            findings.append(InputFinding("reported", metric, f"{text} {mean:.3g} {unit}, a mean"))
        elif not metric.startswith("aqua"):
            findings.append(InputFinding("missing metric", metric, f"{text}: not reported"))
