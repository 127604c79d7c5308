"""When requests come, and how long they are: recorded traces and seeded arrival processes.

Formats of traces and length files are recognised by their columns, never by name:

- `t_s, prompt_tokens, output_tokens`: Azure LLM inference traces; BurstGPT with more columns.
- `t_ms, prompt_tokens, output_tokens, hash_ids`: Mooncake, with identities of 512-token prefixes.
- `prompt_tokens, output_tokens`: lengths without times; they need an arrival process.
- `input_toks, output_toks, queued_ts`: a recorded vLLM run.

A broken line is an error with its number; nothing is guessed. All four processes give `count` times
from 0 on, in ascending order, at a mean rate; the same seed gives the same times, bit by bit.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from aqua_protocol.errors import ConfigError
from aqua_simulator.serving.recordings import MOST_SECONDS, MOST_TOKENS
from aqua_simulator.serving.request import Arrival
from aqua_simulator.timing.profiles import rows_of

MOONCAKE_CHUNK_TOKENS: Final = 512
"""Fixed by the format: tokens behind one of Mooncake's hash ids."""


def read_trace(
    path: Path, *, times_s: Float64[np.ndarray, " count"] | None = None
) -> list[Arrival]:
    """Read a trace; with `times_s` its own times are replaced, row by row.

    Args:
        times_s: Arrival times, at least as many as are wanted; the trace is repeated if shorter,
            and cut if longer.

    Raises:
        ConfigError: No such file, unknown columns, a broken line, or lengths without times.
    """
    rows = _rows(path)
    if times_s is None:
        if any(row.arrival_s != row.arrival_s for row in rows):  # NaN: the file has no times
            raise ConfigError(
                f"{path} has lengths but no times", remedy="Name an arrival process and a rate."
            )
        start = min(row.arrival_s for row in rows)
        return [replace(row, arrival_s=row.arrival_s - start) for row in rows]
    return [
        replace(rows[index % len(rows)], arrival_s=float(time_s), request_id=str(index))
        for index, time_s in enumerate(times_s)
    ]


def read_lengths(path: Path) -> Int64[np.ndarray, "count 2"]:
    """Prompt and output tokens of a file with or without times.

    Raises:
        ConfigError: No such file, unknown columns, or a broken line.
    """
    return np.array([(row.prompt_tokens, row.output_tokens) for row in _rows(path)], dtype=np.int64)


def _rows(path: Path) -> list[Arrival]:
    if not path.is_file():
        raise ConfigError(f"no trace {path}", remedy="Give a CSV file, plain or .gz.")
    rows = [_arrival(path, number, row) for number, row in enumerate(rows_of(path), start=2)]
    if not rows:
        raise ConfigError(f"{path} holds no requests", remedy=_COLUMNS)
    return rows


def _arrival(path: Path, number: int, row: dict[str, str]) -> Arrival:
    """Read one line; its time is NaN where the format has none."""
    try:
        if "input_toks" in row:
            time_s, tokens = float(row["queued_ts"]), (row["input_toks"], row["output_toks"])
            prompt, output = map(int, tokens)
            _check(time_s, prompt, output)
            return Arrival(row["request_id"], time_s, prompt, output)
        time_s = float("nan")
        if "t_s" in row:
            time_s = float(row["t_s"])
        elif "t_ms" in row:
            time_s = float(row["t_ms"]) / 1e3
        prefix = tuple(int(identity) for identity in row.get("hash_ids", "").split())
        prompt, output = int(row["prompt_tokens"]), int(row["output_tokens"])
        _check(time_s, prompt, output)
        # A recorded request may have generated nothing; a served one generates at least one token.
        return Arrival(
            str(number - 2),
            time_s,
            prompt,
            max(1, output),
            prefix,
            MOONCAKE_CHUNK_TOKENS if prefix else 0,
        )
    except KeyError as missing:
        raise ConfigError(f"{path}: no column {missing}", remedy=_COLUMNS) from missing
    except (TypeError, ValueError, OverflowError, ConfigError) as error:
        told = error.message if isinstance(error, ConfigError) else error
        raise ConfigError(f"{path}, line {number}: {told}", remedy=_COLUMNS) from error


def _check(time_s: float, *tokens: int) -> None:
    """Refuse what no trace can hold; NaN is a time that is not there."""
    if abs(time_s) > MOST_SECONDS:
        raise ValueError(f"{time_s:g} is no time in seconds")
    if max(tokens) > MOST_TOKENS:
        raise ValueError(f"more than {MOST_TOKENS} tokens")


_COLUMNS: Final = "Columns: t_s or t_ms, prompt_tokens, output_tokens, and hash_ids if known."


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
