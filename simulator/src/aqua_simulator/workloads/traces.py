"""Reads recorded traces and length files.

Formats are recognised by their columns, never by name:

- `t_s, prompt_tokens, output_tokens`: Azure LLM inference traces; BurstGPT with more columns.
- `t_ms, prompt_tokens, output_tokens, hash_ids`: Mooncake, with identities of 512-token prefixes.
- `prompt_tokens, output_tokens`: lengths without times; they need an arrival process.
- `input_toks, output_toks, queued_ts`: a recorded vLLM run.

A broken line is an error with its number; nothing is guessed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float64

from aqua_protocol.errors import ConfigError
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
    if not path.is_file():
        raise ConfigError(f"no trace {path}", remedy="Give a CSV file, plain or .gz.")
    rows = [_arrival(path, number, row) for number, row in enumerate(rows_of(path), start=2)]
    if not rows:
        raise ConfigError(f"{path} holds no requests")
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


def _arrival(path: Path, number: int, row: dict[str, str]) -> Arrival:
    """Read one line; its time is NaN where the format has none."""
    try:
        if "input_toks" in row:
            return Arrival(
                row["request_id"],
                float(row["queued_ts"]),
                int(row["input_toks"]),
                int(row["output_toks"]),
            )
        time_s = float("nan")
        if "t_s" in row:
            time_s = float(row["t_s"])
        elif "t_ms" in row:
            time_s = float(row["t_ms"]) / 1e3
        prefix = tuple(int(identity) for identity in row.get("hash_ids", "").split())
        # A recorded request may have generated nothing; a served one generates at least one token.
        return Arrival(
            str(number - 2),
            time_s,
            int(row["prompt_tokens"]),
            max(1, int(row["output_tokens"])),
            prefix,
            MOONCAKE_CHUNK_TOKENS if prefix else 0,
        )
    except (KeyError, TypeError, ValueError, ConfigError) as error:
        raise ConfigError(
            f"{path}, line {number}: {error}",
            remedy="Columns: t_s or t_ms, prompt_tokens, output_tokens, and hash_ids if known.",
        ) from error
