"""The highest rate at which a simulated engine keeps the limits of a profile, by bisection.

A rate is sustained if the median time to the first token and the 99th percentile of the time
between tokens are within their limits, as `aqua profile` has it (Aqua section 4.1). Between two
tokens of a request lies one step, unless it was put out meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import sqrt
from typing import Final

import numpy as np

from aqua_protocol.errors import ConfigError
from aqua_simulator.serving.engine import Engine
from aqua_simulator.serving.request import Arrival, summary
from aqua_simulator.timing.iteration import ScheduledBatch
from aqua_simulator.workloads.arrivals import poisson

REQUESTS: Final = 400
"""Of a run at one rate: a p99 of gaps needs hundreds. Doubled, a prediction takes twice as long and
differs less from seed to seed."""

PRECISION: Final = 0.04
"""Of the bisection; finer than the step times are known. Doubled, a run less."""

# Rates that are looked at, requests per second. Doubled or halved, one more run.
LEAST_PER_S: Final = 0.01
MOST_PER_S: Final = 2000.0


def stable_rate(
    engine_of: Callable[[], Engine],
    lengths: Sequence[tuple[int, int]],
    *,
    ttft_s: float,
    tbt_s: float,
    seed: int = 0,
    on_progress: Callable[[float], None] = lambda _: None,
) -> float:
    """The highest rate that keeps both limits, requests per second.

    Args:
        engine_of: Makes an idle engine.
        lengths: Of prompts and outputs; drawn from.
        on_progress: Told each rate that is tried.

    Raises:
        ConfigError: A single request now and then breaks a limit.
    """
    generator = np.random.default_rng(seed)
    chosen = [lengths[index] for index in generator.integers(0, len(lengths), REQUESTS)]

    def keeps(rate_per_s: float) -> bool:
        on_progress(rate_per_s)
        times = poisson(REQUESTS, rate_per_s=rate_per_s, seed=seed)
        arrivals = [
            Arrival(str(index), float(time_s), prompt, output)
            for index, (time_s, (prompt, output)) in enumerate(zip(times, chosen, strict=True))
        ]
        return _keeps(engine_of(), arrivals, ttft_s, tbt_s)

    low, high = LEAST_PER_S, MOST_PER_S
    if not keeps(low):
        raise ConfigError(
            f"no rate keeps {ttft_s:g} s to the first token and {tbt_s:g} s between tokens",
            remedy="Check the limits, the GPU and the lengths.",
        )
    while high / low > 1.0 + PRECISION:
        rate = sqrt(low * high)
        low, high = (rate, high) if keeps(rate) else (low, rate)
    return sqrt(low * high)


def _keeps(engine: Engine, arrivals: Sequence[Arrival], ttft_s: float, tbt_s: float) -> bool:
    gaps: list[tuple[float, int]] = []
    time_of = engine.time_of

    def noted(batch: ScheduledBatch) -> float:
        spent_s = time_of.attention(batch)
        whole_s = spent_s + time_of.linear(batch.tokens) + time_of.head(batch.sampled_count)
        gaps.append((whole_s + time_of.overhead_s, batch.decoding_count))
        return spent_s

    engine.time_of = replace(time_of, attention=noted)
    found = summary(engine.run(arrivals))
    table = np.array(gaps)
    table = table[np.argsort(table[:, 0])]
    shares = np.cumsum(table[:, 1]) / max(1.0, table[:, 1].sum())
    slowest = float(table[np.searchsorted(shares, 0.99).clip(max=len(table) - 1), 0])
    has_gaps = bool(table[:, 1].any())
    return bool(found["ttft_p50_s"] <= ttft_s and (not has_gaps or slowest <= tbt_s))
