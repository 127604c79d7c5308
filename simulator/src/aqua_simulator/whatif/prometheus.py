"""A recorded day out of a Prometheus: rates, lengths and latencies of engines that report to it.

Asked over HTTP for vLLM's metrics by model, window by window: first tokens (how many requests),
histograms of prompt and output lengths, steps and the tokens in them, latencies; DCGM's utilisation
of all GPUs; and what Aqua, if it runs, lends already.

Requests are drawn: so many in each window as had a first token in it, between two scrapes as many
as were counted there, with lengths from the histograms, between whose bounds they are spread evenly
in logarithms, scaled to the window's means, which are exact. Step times follow from the scrapes
(`scrapes`), however long windows are.

What is not there is named and left out: a window without samples is cut out, a counter that was
reset is told, a metric that no engine reports leaves its number unchecked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, nan
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float64, Int64

from aqua_protocol.bearer import bearer_headers
from aqua_protocol.errors import ConfigError, UnavailableError
from aqua_simulator.whatif.cluster import Cluster, EngineShape, InputFinding
from aqua_simulator.whatif.histograms import Windows, drawn_values, is_bound, quantile, tells
from aqua_simulator.whatif.recorded_day import ModelLoad, RecordedLoad
from aqua_simulator.whatif.scrapes import ScrapedCounters
from aqua_simulator.whatif.step_fit import StepObservations

TIMEOUT_S: Final = 60.0
"""Seconds that a query may take. Doubled, a dead server is noticed later."""

MAX_WINDOWS: Final = 2000
"""Windows of a day; Prometheus answers with 11,000 points at most. Doubled, longer days may be
asked in as fine windows."""


MAX_SCRAPES: Final = 10_000
"""Scrapes of a day that are looked at, for the same reason. Doubled, Prometheus refuses; halved,
step times of long days rest on every second scrape."""

MOST_REQUESTS: Final = 10**7
"""Of a model in a window: more than any cluster serves in five minutes. Doubled, a broken counter
takes twice the memory."""

LOOK_BACK_S: Final = 3600.0
"""Seconds in which scrapes are counted, to know how far apart they are. Doubled, nothing changes.
"""

_FIRST: Final = "vllm:time_to_first_token_seconds"
_BETWEEN: Final = "vllm:inter_token_latency_seconds"
_ANSWERING: Final = "vllm:request_time_per_output_token_seconds"
_STEPS: Final = "vllm:iteration_tokens_total"
_PROMPT: Final = "vllm:request_prompt_tokens"
_OUTPUT: Final = "vllm:request_generation_tokens"


# What reading an answer of another shape than Prometheus's comes to.
_NO_ANSWER: Final = (
    *(ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError),
)


def _duration(seconds: float) -> str:
    """As its language has it: whole numbers of a unit."""
    return f"{round(seconds * 1e3)}ms"


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

    def query(
        self, expression: str, step_s: float | None = None
    ) -> list[tuple[dict[str, str], Windows]]:
        """Series of an expression, NaN where there is no value.

        Args:
            step_s: Seconds from value to value; default: a value at the end of each window.

        Raises:
            UnavailableError: Nothing answers there.
            ConfigError: It refuses the question, or answers something else.
        """
        import httpx

        headers = bearer_headers(self.token)
        # Differences need a value at the start, sums over windows need none.
        first_s = self.start_s + (self.window_s if step_s is None else 0.0)
        last_s = self.start_s + self.window_count * self.window_s
        step_s = self.window_s if step_s is None else step_s
        value_count = int((last_s - first_s) / step_s + 1e-6) + 1
        try:
            answer = httpx.post(
                f"{self.url.rstrip('/')}/api/v1/query_range",
                data={
                    "query": expression,
                    "start": f"{first_s:.3f}",
                    "end": f"{last_s:.3f}",
                    "step": f"{step_s:.3f}",
                },
                headers=headers,
                timeout=TIMEOUT_S,
            )
        except httpx.InvalidURL as error:
            raise ConfigError(
                f"{self.url!r} is not an address: {error}", remedy="Check --prometheus."
            ) from error
        except httpx.HTTPError as error:
            raise UnavailableError(
                f"no Prometheus at {self.url}: {error}", remedy="Check --prometheus."
            ) from error
        told = f"HTTP {answer.status_code}"
        try:
            document: dict[str, Any] = answer.json()
            told = document.get("error", told)
            if document["status"] != "success":
                raise ValueError(told)
            series = []
            for row in document["data"]["result"]:
                values = np.full(value_count, nan)
                for time_s, value in row["values"]:
                    index = round((float(time_s) - first_s) / step_s)
                    if 0 <= index < value_count:
                        values[index] = float(value)
                series.append((dict(row["metric"]), values))
        except _NO_ANSWER as error:
            raise ConfigError(
                f"{self.url} does not answer as a Prometheus: {told}",
                remedy="Give its address, and --prometheus-token if it wants one.",
            ) from error
        return series

    def increase(self, metric: str, selector: str, by: str = "") -> dict[str, Windows]:
        """How much a counter grew in each window, by a label."""
        grouped = f"sum by ({by})" if by else "sum"
        window = _duration(self.window_s)
        found = self.query(f"{grouped} (increase({metric}{{{selector}}}[{window}]))")
        return {labels.get(by, ""): values for labels, values in found}

    def buckets(self, metric: str, selector: str) -> dict[str, Windows]:
        """How much the buckets of a histogram grew, by bounds that are numbers."""
        found = self.increase(f"{metric}_bucket", selector, "le")
        return {le: values for le, values in found.items() if is_bound(le)}

    def total(self, metric: str, selector: str) -> Windows | None:
        """The growth of a counter over all engines; None if nothing reports it."""
        return next(iter(self.increase(metric, selector).values()), None)


def read_prometheus(source: PrometheusSource, cluster: Cluster, *, seed: int = 0) -> RecordedLoad:
    """The day as a Prometheus saw it.

    Raises:
        UnavailableError: Nothing answers there.
        ConfigError: No model of the cluster reports there, or two by one name.
    """
    _refuse_twins(cluster)
    findings: list[InputFinding] = []
    idle: list[str] = []
    loads, is_seen = dict[str, ModelLoad](), np.zeros(source.window_count, dtype=bool)
    samples: dict[str, Bool[np.ndarray, " windows"]] = {}
    for name, shape in cluster.engines.items():
        selector = f'model_name="{shape.deployed.metrics_name or name}"'
        requests = _requests(source, selector)
        if isinstance(requests, str):
            message = f"{requests}: left out with its GPUs"
            findings.append(InputFinding("missing metric", name, message))
            continue
        is_seen |= ~np.isnan(requests)
        if not np.nansum(requests):
            idle.append(name)
            message = "idle all day, as far as its metrics say"
            findings.append(InputFinding("no requests", name, message))
            continue
        findings += _resets(source, selector, name)
        load = _load(source, shape, selector, np.nan_to_num(requests), findings, seed)
        if load is not None:
            loads[name], samples[name] = load, ~np.isnan(requests)
    if not loads and not idle:
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
    unknown = tuple(name for name in cluster.engines if name not in {*loads, *idle})
    return RecordedLoad(int(is_seen.sum()) * source.window_s, loads, findings, unknown)


def _requests(source: PrometheusSource, selector: str) -> Windows | str:
    """Requests of a model by window, as first tokens or as prompts; or why they are not known."""
    for metric in (_FIRST, _PROMPT):
        found = source.total(f"{metric}_count", selector)
        if found is None or np.isnan(found).all():
            continue
        least, most = float(np.nanmin(found)), float(np.nanmax(found))
        if not 0.0 <= least <= most <= MOST_REQUESTS:
            return f"{least if least < 0.0 else most:g} requests in a window cannot be"
        return found
    return f"no engine reports {selector}"


def _resets(source: PrometheusSource, selector: str, name: str) -> list[InputFinding]:
    """Engines of a model that began anew."""
    window = _duration(source.window_s)
    resets = source.query(f"sum(resets({_FIRST}_count{{{selector}}}[{window}]))")
    count = sum(float(np.nansum(values)) for _, values in resets)
    message = f"{count:.0f} times an engine began anew: counts since the last sample are lost"
    return [InputFinding("counter reset", name, message)] if count else []


def _refuse_twins(cluster: Cluster) -> None:
    """Refuse models that nothing tells apart: each would have the requests of all."""
    by_label: dict[str, list[str]] = {}
    for name, shape in cluster.engines.items():
        by_label.setdefault(shape.deployed.metrics_name or name, []).append(name)
    for label, names in by_label.items():
        if len(names) > 1:
            raise ConfigError(
                f"{' and '.join(names)} report as the same model_name {label!r}",
                remedy="Give each a name of its own (--served-model-name of vLLM), or list one "
                "model with the replicas of all.",
            )


def _unlisted(source: PrometheusSource, cluster: Cluster) -> list[InputFinding]:
    """Models that report there and that the cluster does not list."""
    listed = {shape.deployed.metrics_name or name for name, shape in cluster.engines.items()}
    window = _duration(source.window_s)
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
        if sums is None or counts is None or not 0.0 < np.nansum(counts) < inf:
            findings.append(InputFinding("missing metric", name, f"no {metric}"))
            return None
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(counts > 0, sums / counts, nan), np.nansum(sums) / np.nansum(counts)

    generator = np.random.default_rng([seed, 7])
    # Whole requests: what a window lacks of one, the next ones have.
    edges = np.rint(np.concatenate([[0.0], np.cumsum(requests)])).astype(int)
    owner = np.repeat(np.arange(source.window_count), np.diff(edges))
    scrape_s = _scrape_s(source, selector)
    arrival_s = np.sort(_moments(source, selector, scrape_s, owner, generator))
    lengths = []
    for metric in (_PROMPT, _OUTPUT):
        known = means(metric)
        if known is None:
            findings.append(InputFinding("missing metric", name, _LENGTHS))
            return None
        buckets = source.buckets(metric, selector)
        if not tells(buckets):
            message = f"no {metric}_bucket: all requests of a window are as long as its mean"
            findings.append(InputFinding("missing metric", name, message))
        drawn = drawn_values(buckets, len(owner), generator)
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
            observed[f"{key}_p99_s"] = quantile(source.buckets(metric, selector), 0.99)
    unknown = np.full(len(owner), nan)
    load = ModelLoad(arrival_s, lengths[0], lengths[1], unknown, unknown, observed)
    if scrape_s is not None and {"first", "between", "steps"} <= seen.keys():
        load = replace(load, steps=_scraped(source, shape, selector, load, scrape_s))
    return load


_LENGTHS: Final = (
    "no lengths: left out with its GPUs; vLLM reports lengths, unless --disable-log-stats is set"
)


def _scrape_s(source: PrometheusSource, selector: str) -> float | None:
    """Seconds in which each engine of a model is scraped once or more; None if it hardly is."""
    within_s = min(LOOK_BACK_S, source.end_s - source.start_s)
    metric = f"{_FIRST}_count{{{selector}}}"
    counted = source.query(f"max(count_over_time({metric}[{_duration(within_s)}]))")
    most = max((float(np.nanmax(values)) for _, values in counted), default=0.0)
    if not most >= 2.0:  # noqa: PLR2004 - no difference without two
        return None
    step_s = max(within_s / (most - 1.0), (source.end_s - source.start_s) / MAX_SCRAPES)
    return ceil(step_s * 1e3) / 1e3


def _moments(
    source: PrometheusSource,
    selector: str,
    scrape_s: float | None,
    owner: Int64[np.ndarray, " requests"],
    generator: np.random.Generator,
) -> Float64[np.ndarray, " requests"]:
    """When requests came: in which window is known, and there as first tokens between scrapes."""
    edges_s = np.arange(source.window_count + 1) * source.window_s
    even = generator.random(len(owner))
    if scrape_s is None or scrape_s >= source.window_s:
        return (owner + even) * source.window_s
    found = source.query(f"sum({_FIRST}_count{{{selector}}})", scrape_s)
    if not found:
        return (owner + even) * source.window_s
    counts = found[0][1]
    grown = np.nan_to_num(np.maximum(0.0, np.diff(counts)))
    at_s = np.arange(len(counts)) * scrape_s
    # Edges of windows lie between scrapes, or on them.
    points_s = np.union1d(at_s, edges_s)
    sums = np.interp(points_s, at_s, np.append(0.0, np.cumsum(grown)))
    window = np.minimum(np.searchsorted(edges_s, points_s, side="right") - 1, source.window_count)
    start = sums[np.searchsorted(points_s, edges_s)]
    whole = np.append(np.diff(start), 0.0)
    inside = np.where(
        whole[window] > 0.0,
        (sums - start[window]) / np.where(whole[window] > 0.0, whole[window], 1.0),
        points_s / source.window_s - window,
    )
    place = np.maximum.accumulate(window + np.clip(inside, 0.0, 1.0))
    # As many between two scrapes as were counted there, and at even odds where between them.
    rank = np.arange(len(owner)) - np.searchsorted(owner, owner)
    share = owner + (rank + 0.5) / np.bincount(owner, minlength=1)[owner]
    after = np.clip(np.searchsorted(place, share), 1, len(points_s) - 1)
    found_s: Float64[np.ndarray, " requests"] = points_s[after - 1]
    found_s += even * (points_s[after] - found_s)
    return found_s


def _scraped(
    source: PrometheusSource,
    shape: EngineShape,
    selector: str,
    load: ModelLoad,
    step_s: float,
) -> StepObservations:
    """What scrapes show of the steps of a model's engines."""
    metric = f"{_FIRST}_count{{{selector}}}"

    def at_scrapes(expression: str, by: str = "") -> dict[str, Windows]:
        return {labels.get(by, ""): values for labels, values in source.query(expression, step_s)}

    names = {
        "first": f"{_FIRST}_count",
        "first_s": f"{_FIRST}_sum",
        "between": f"{_BETWEEN}_count",
        "between_s": f"{_BETWEEN}_sum",
        "steps": f"{_STEPS}_count",
        "step_tokens": f"{_STEPS}_sum",
        "ended": f"{_OUTPUT}_count",
        "prompts": f"{_PROMPT}_sum",
        "outputs": f"{_OUTPUT}_sum",
    }
    totals = {key: at_scrapes(f"sum({each}{{{selector}}})") for key, each in names.items()}
    times = at_scrapes(f"min(timestamp({metric}))")
    engines = at_scrapes(f"count({metric})")
    if not times or not engines or not all(totals.values()):
        return StepObservations()
    # An engine that began anew may hide behind others that went on.
    resets = at_scrapes(f"sum(resets({metric}[{_duration(2.0 * step_s)}]))").get("", 0.0)
    engines[""] = np.where(np.nan_to_num(resets) > 0.0, nan, engines[""])
    at_s = times[""]
    # Without a new scrape nothing is told; a lack of any is.
    latest = np.fmax.accumulate(np.append(-inf, at_s))[:-1]
    is_new = np.isnan(at_s) | (at_s > latest)
    sizes = at_scrapes(f"sum by (le) ({_STEPS}_bucket{{{selector}}})", "le")
    kept = {"at_s": at_s[is_new]} | {key: each[""][is_new] for key, each in totals.items()}
    spreads = [
        float(np.var(each) / np.mean(each) ** 2)
        for each in (load.prompt_tokens, load.output_tokens)
    ]
    return StepObservations.joined(
        [
            piece.observations(shape, (spreads[0], spreads[1]))
            for piece in ScrapedCounters.pieces(
                kept, {le: each[is_new] for le, each in sizes.items()}, engines[""][is_new]
            )
        ]
    )


def _without(load: ModelLoad, missing: Sequence[int] | np.ndarray, window_s: float) -> ModelLoad:
    """The load with the missing windows cut out of its times."""
    gone = np.searchsorted(np.asarray(missing), (load.arrival_s // window_s).astype(int))
    return replace(load, arrival_s=load.arrival_s - gone * window_s)


def _tell_others(source: PrometheusSource, findings: list[InputFinding]) -> None:
    """What DCGM and Aqua report, beside the engines."""
    window = _duration(source.window_s)
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
