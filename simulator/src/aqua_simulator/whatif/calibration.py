"""Step times calibrated on a recording: fitted, and freed of what the fit gets wrong by itself.

The fit (`step_times`) knows of each request when it came and when its tokens did, and reckons what
else was computed meanwhile as if all had answered evenly. That is not quite so, the less the busier
engines are. How far off that leads a simulation says: the fitted engines serve the same requests,
the fit is made again on what their users would have seen, and by what it then misses the
coefficients that were simulated, they are corrected. Of all rounds that one counts whose latencies
are nearest to the recorded ones, among the requests that step times are fitted to.

Models out of a Prometheus have no such requests and keep their fit. Of a large recording its
busiest stretch is simulated, where coefficients tell most.

Source: Gourieroux, Monfort and Renault, "Indirect Inference", Journal of Applied Econometrics 8
(1993).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf, log
from typing import Final

import numpy as np
from jaxtyping import Float64

from aqua_simulator.whatif.cluster import Cluster
from aqua_simulator.whatif.fleet_day import recording_of
from aqua_simulator.whatif.recorded_day import ModelLoad, RecordedLoad
from aqua_simulator.whatif.step_times import (
    COEFFICIENTS,
    FITTED_EVERY,
    StepCoefficients,
    fitted,
    kinds_of,
)

ROUNDS: Final = 8
"""Of simulating and correcting, at most. Halved, one drawn day of five is further off; doubled,
none is nearer."""

EASE: Final = 0.6
"""Of a correction's logarithm, what a round takes: coefficients move each other's fit, and rounds
that take all of it swing on some days. Halved, it takes twice as many rounds."""

NEAR_ENOUGH: Final = 0.02
"""Sum of the differences of nine measures of latencies, as `distance` weighs them, that ends the
search. Doubled, easy days take fewer rounds."""

MOST_CORRECTION: Final = 1.5
"""Factor by which a round moves a coefficient at most. Doubled, one that the recording hardly tells
may run away before the next round."""

MOST_REQUESTS: Final = 100_000
"""Of all models, that are simulated; some seconds of compiled work a round. Doubled, it takes twice
as long, and coefficients are as well known as before."""

ANSWER_WEIGHT: Final = 3.0
"""Of times between tokens beside those to first tokens, in what is nearest: those wait for others,
and change by chance. Doubled, queues count for less."""

Times = dict[str, StepCoefficients]


def calibrated(cluster: Cluster, day: RecordedLoad) -> Times:
    """Step times of each model as the recording tells them; the data sheet's where it does not."""
    first = fitted(day.loads, cluster.engines)
    loads, span_s = busiest(day)
    loads = {name: load for name, load in loads.items() if first[name].is_fitted}
    if not loads:
        return first
    begun = {**first, **{k: v for k, v in fitted(loads, cluster.engines).items() if v.is_fitted}}
    times, kept = dict(first), dict(first)
    kinds = [
        mine
        for names in kinds_of(cluster.engines).values()
        if (mine := [name for name in names if name in loads])
    ]
    nearest = dict.fromkeys((names[0] for names in kinds), inf)
    for _ in range(ROUNDS + 1):
        shown = _shown(cluster, times, loads, span_s)
        again = fitted(shown, cluster.engines)
        is_near = True
        for names in kinds:
            off = sum(distance(loads[name], shown[name]) for name in names)
            if off < nearest[names[0]]:
                nearest[names[0]] = off
                kept |= {name: times[name] for name in names}
            is_near = is_near and nearest[names[0]] < NEAR_ENOUGH * len(names)
            for name in names:
                if again[name].is_fitted:
                    times[name] = _corrected(times[name], begun[name], again[name])
        if is_near:
            break
    for names in kinds_of(cluster.engines).values():
        # Models of one kind have one kernel, also those of which nothing was seen.
        if mine := [name for name in names if name in loads]:
            kept |= dict.fromkeys(names, kept[mine[0]])
    return kept


def _shown(
    cluster: Cluster, times: Times, loads: Mapping[str, ModelLoad], span_s: float
) -> dict[str, ModelLoad]:
    """The latencies of simulated engines, where the recording has some."""
    shown = recording_of(cluster, times, loads, span_s)
    for name, load in loads.items():
        is_known = ~np.isnan(load.last_s)
        first_s, last_s = (
            np.where(is_known, each, np.nan) for each in (shown[name].first_s, shown[name].last_s)
        )
        shown[name] = replace(shown[name], first_s=first_s, last_s=last_s)
    return shown


def busiest(day: RecordedLoad) -> tuple[dict[str, ModelLoad], float]:
    """The requests of models that have them, all or those of a stretch; and how long it is."""
    loads = {name: load for name, load in day.loads.items() if not len(load.steps)}
    times_s = np.sort(np.concatenate([np.empty(0), *(each.arrival_s for each in loads.values())]))
    if len(times_s) <= MOST_REQUESTS:
        return loads, day.span_s
    lengths_s = times_s[MOST_REQUESTS:] - times_s[:-MOST_REQUESTS]
    start = int(np.argmin(lengths_s))
    start_s, length_s = float(times_s[start]), float(lengths_s[start])
    stretch = {}
    for name, load in loads.items():
        low, high = np.searchsorted(load.arrival_s, (start_s, start_s + length_s))
        # So many are left out in front that every third one is the same.
        low = -(-low // FITTED_EVERY) * FITTED_EVERY
        part = load.known(np.arange(low, max(low, high)))
        stretch[name] = replace(
            part,
            arrival_s=part.arrival_s - start_s,
            first_s=part.first_s - start_s,
            last_s=part.last_s - start_s,
        )
    return stretch, length_s


def distance(load: ModelLoad, shown: ModelLoad) -> float:
    """How far simulated latencies are off recorded ones: of means and quantiles, in logarithms."""
    chosen = np.arange(0, len(load), FITTED_EVERY)
    chosen = chosen[~np.isnan(load.last_s[chosen]) & ~np.isnan(shown.last_s[chosen])]
    steps = load.output_tokens[chosen] - 1
    waits = [(each.first_s - each.arrival_s)[chosen] for each in (load, shown)]
    answers = [
        ((each.last_s - each.first_s)[chosen] / np.maximum(1, steps))[steps > 0]
        for each in (load, shown)
    ]
    return _off(*waits) + ANSWER_WEIGHT * _off(*answers)


def _off(
    recorded: Float64[np.ndarray, " requests"], simulated: Float64[np.ndarray, " requests"]
) -> float:
    """The same of one latency; nothing where it was not seen."""
    found = 0.0
    measures: tuple[Callable[..., float], ...] = (
        np.mean,
        lambda values: np.quantile(values, 0.5),
        lambda values: np.quantile(values, 0.9),
    )
    for measure in measures if len(recorded) else ():
        pair = float(measure(recorded)), float(measure(simulated))
        if min(pair) > 0.0:
            found += abs(log(pair[1] / pair[0]))
    return found


def _corrected(
    simulated: StepCoefficients, wanted: StepCoefficients, found: StepCoefficients
) -> StepCoefficients:
    """What was simulated, moved by how far what was found of it is off what is wanted."""
    moved = {}
    for key in COEFFICIENTS:
        now, goal, got = (getattr(each, key) for each in (simulated, wanted, found))
        ratio = goal / got if goal > 0.0 and got > 0.0 else 1.0
        moved[key] = now * min(max(ratio, 1.0 / MOST_CORRECTION), MOST_CORRECTION) ** EASE
    front_s = max(0.0, simulated.front_s + EASE * (wanted.front_s - found.front_s))
    return replace(simulated, front_s=front_s, **moved)
