"""When requests come: seeded arrival processes.

All four give `count` times from 0 on, in ascending order, at a mean rate. The same seed gives the
same times, bit by bit.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from aqua_protocol.errors import ConfigError


def poisson(count: int, *, rate_per_s: float, seed: int) -> Float64[np.ndarray, " count"]:
    """Independent users: gaps are exponential."""
    return gamma(count, rate_per_s=rate_per_s, variation=1.0, seed=seed)


def gamma(
    count: int, *, rate_per_s: float, variation: float, seed: int
) -> Float64[np.ndarray, " count"]:
    """Gamma-distributed gaps with that coefficient of variation.

    Above 1 requests come in clusters, 1 is Poisson, towards 0 they come like clockwork.

    Raises:
        ConfigError: A rate or variation that is not positive.
    """
    if rate_per_s <= 0.0 or variation <= 0.0:
        raise ConfigError("rate and variation must be positive")
    shape = 1.0 / variation**2
    gaps = np.random.default_rng(seed).gamma(shape, 1.0 / (rate_per_s * shape), count)
    return np.cumsum(gaps)


def on_off(
    count: int, *, rate_per_s: float, on_s: float, off_s: float, seed: int
) -> Float64[np.ndarray, " count"]:
    """Poisson at `rate_per_s` for `on_s` seconds, silence for `off_s`, and again.

    Raises:
        ConfigError: An ON phase without length, or a negative OFF phase.
    """
    if on_s <= 0.0 or off_s < 0.0:
        raise ConfigError("ON phases need a positive length, OFF phases a length of at least 0")
    # The clock that stops in OFF phases: the process is memoryless, so cutting it is exact.
    running = poisson(count, rate_per_s=rate_per_s, seed=seed)
    return running + np.floor(running / on_s) * off_s


def burst(
    count: int, *, rate_per_s: float, factor: float, start_s: float, length_s: float, seed: int
) -> Float64[np.ndarray, " count"]:
    """Poisson at `rate_per_s`, times `factor` for `length_s` from `start_s` on.

    Raises:
        ConfigError: A factor that is not positive, or a negative time.
    """
    if factor <= 0.0 or start_s < 0.0 or length_s < 0.0:
        raise ConfigError("a burst needs a positive factor and times of at least 0")
    # Time is stretched inside the burst: unit-rate arrivals are mapped back to the clock.
    work = poisson(count, rate_per_s=rate_per_s, seed=seed)
    inside = np.clip(work - start_s, 0.0, length_s * factor)
    return work - inside + inside / factor
