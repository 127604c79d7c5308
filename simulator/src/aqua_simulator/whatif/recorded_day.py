"""The recorded day: requests and latencies by model, out of CSV files; and what is wrong with them.

A file has a line for each request, in order of arrival: when it came (`t_s`), `prompt_tokens`,
`output_tokens`, which `model` (or the file's name says so), and where they are known `ttft_s` and
`latency_s` in seconds, or `first_token_s` and `last_token_s` on the clock of `t_s`.

Nothing is invented. A line that cannot be is left out, a clock that was set back is told, rows of a
model that the cluster does not list are counted and left out. Where all models fall silent for much
longer than they ever do, nothing may have been recorded: that time is cut out, so that it counts
neither as idle nor as busy. All of it is named in findings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite, isnan, nan
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from aqua_protocol.errors import ConfigError
from aqua_simulator.serving.recordings import REQUEST_COLUMNS
from aqua_simulator.serving.request import Arrival
from aqua_simulator.timing.profiles import rows_of
from aqua_simulator.whatif.cluster import InputFinding

PIECE_S: Final = 300.0
"""Seconds of a piece of the day that is drawn again as a whole: longer than bursts, shorter than
the day's ups and downs. Doubled, draws differ less from the recording."""

LEAST_PIECES: Final = 12
"""Pieces of a short recording. Doubled, its draws keep less of its bursts together."""

LEAST_GAP_S: Final = 900.0
"""Seconds of silence of all models from which on it may be an outage of the recording. Doubled,
shorter outages count as idle time."""

GAP_RATIO: Final = 20.0
"""Of such a silence to the longest but few (99 of 100) between two requests. Doubled, likewise."""

CLOCK_STEP_S: Final = 1.0
"""Seconds that a time may lie before that of the line above, as logs are written. Doubled, smaller
steps of a clock pass."""

TOLD_LINES: Final = 3
"""Broken lines that are told one by one; the others are counted. Doubled, more is printed."""


@dataclass(frozen=True, eq=False)
class ModelLoad:
    """Requests of one model, in order of arrival.

    Attributes:
        first_s, last_s: When their tokens came; NaN where it was not recorded.
        observed: What was seen of latencies, by the names of `serving.request.summary`; may lack
            any of them.
        step_rows, step_seconds: Observations to fit step times on: rows of (steps, tokens,
            contexts, token pairs), and the seconds that they took together.
    """

    arrival_s: Float64[np.ndarray, " requests"]
    prompt_tokens: Int64[np.ndarray, " requests"]
    output_tokens: Int64[np.ndarray, " requests"]
    first_s: Float64[np.ndarray, " requests"]
    last_s: Float64[np.ndarray, " requests"]
    observed: dict[str, float] = field(default_factory=dict)
    step_rows: Float64[np.ndarray, "rows 4"] = field(default_factory=lambda: np.empty((0, 4)))
    step_seconds: Float64[np.ndarray, " rows"] = field(default_factory=lambda: np.empty(0))

    def __len__(self) -> int:
        return len(self.arrival_s)

    def known(self, chosen: Int64[np.ndarray, " chosen"]) -> ModelLoad:
        """Some of the requests; what was seen of all of them is left behind."""
        return ModelLoad(
            self.arrival_s[chosen],
            self.prompt_tokens[chosen],
            self.output_tokens[chosen],
            self.first_s[chosen],
            self.last_s[chosen],
        )

    def drawn(self, seed: int, span_s: float) -> ModelLoad:
        """Another day like this one; seed 0 is the recorded one.

        Each piece of `PIECE_S` at most is drawn from itself and its two neighbours: bursts and
        lengths stay together, the day keeps its ups and downs.
        """
        if seed == 0 or not len(self):
            return self
        generator = np.random.default_rng([seed, len(self)])
        piece_s = min(PIECE_S, span_s / LEAST_PIECES)
        piece_count = max(1, int(np.ceil(span_s / piece_s)))
        piece = np.minimum((self.arrival_s // piece_s).astype(int), piece_count - 1)
        starts = np.searchsorted(piece, np.arange(piece_count + 1))
        rows, times = [], []
        for index in range(piece_count):
            source = int(np.clip(index + generator.integers(-1, 2), 0, piece_count - 1))
            chosen = np.arange(starts[source], starts[source + 1])
            rows.append(chosen)
            times.append(self.arrival_s[chosen] + (index - source) * piece_s)
        taken, arrival_s = np.concatenate(rows), np.concatenate(times)
        is_inside = arrival_s <= span_s
        taken, arrival_s = taken[is_inside], arrival_s[is_inside]
        order = np.argsort(arrival_s, kind="stable")
        unknown = np.full(len(order), nan)
        taken = taken[order]
        return ModelLoad(
            arrival_s[order], self.prompt_tokens[taken], self.output_tokens[taken], unknown, unknown
        )

    def arrivals(
        self,
        chosen: Int64[np.ndarray, " chosen"] | None = None,
        *,
        load: float = 1.0,
        outputs: float = 1.0,
    ) -> list[Arrival]:
        """The requests, or some, with so much of the load (by time) and of the output lengths."""
        rows = np.arange(len(self)) if chosen is None else chosen
        lengths = np.maximum(1, np.rint(self.output_tokens[rows] * outputs)).astype(int)
        return [
            Arrival(str(index), time_s / load, prompt, output)
            for index, time_s, prompt, output in zip(
                rows.tolist(),
                self.arrival_s[rows].tolist(),
                self.prompt_tokens[rows].tolist(),
                lengths.tolist(),
                strict=True,
            )
        ]


@dataclass(frozen=True, eq=False)
class RecordedLoad:
    """What was recorded of a cluster.

    Attributes:
        span_s: Seconds that the recording covers, without what was cut out.
        loads: By model; models without a request have none.
    """

    span_s: float
    loads: dict[str, ModelLoad]
    findings: list[InputFinding]


def read_day(
    paths: Sequence[Path],
    models: Collection[str],
    *,
    hours: float | None = None,
    is_silence_idle: bool = False,
) -> RecordedLoad:
    """Read traces.

    Args:
        models: Names that the cluster lists.
        hours: What the traces cover, from time 0 on; default: first to last event.
        is_silence_idle: A silence of all models is idle time, however long.

    Raises:
        ConfigError: No such file, no such columns, or no usable line.
    """
    findings: list[InputFinding] = []
    rows: list[tuple[str, float, int, int, float, float]] = []
    for path in paths:
        rows += _rows(path, models, findings)
    names = sorted({row[0] for row in rows})
    if not rows:
        told = "; ".join(one.message for one in findings)
        raise ConfigError(
            f"no usable request in {', '.join(map(str, paths))}" + (f": {told}" if told else ""),
            remedy="Columns: t_s, model, prompt_tokens, output_tokens, ttft_s, latency_s.",
        )
    findings += [
        InputFinding("no requests", name, "idle all day, as far as the traces say")
        for name in sorted(set(models) - set(names))
    ]
    rows.sort(key=lambda row: row[1])
    # From 0 on where that is what the times say, else from the first request on.
    start_s = 0.0 if hours is not None and 0.0 <= rows[0][1] <= hours * 3600.0 else rows[0][1]
    table = np.array([row[1:] for row in rows], dtype=np.float64)
    table[:, [0, 3, 4]] -= start_s
    end_s = float(np.nanmax(table[:, [0, 4]])) if hours is None else hours * 3600.0
    if end_s < table[-1, 0]:
        beyond = int((table[:, 0] > end_s).sum())
        findings.append(InputFinding("outside", "--hours", f"{beyond} requests come later: cut"))
        keep = table[:, 0] <= end_s
        table, rows = table[keep], [row for row, kept in zip(rows, keep, strict=True) if kept]
    cut_s = 0.0 if is_silence_idle else _cut_silence(table, findings)
    loads = {}
    owner = np.array([names.index(row[0]) for row in rows])
    for index, name in enumerate(names):
        mine = table[owner == index]
        lengths = mine[:, 1:3].astype(np.int64)
        load = ModelLoad(mine[:, 0], lengths[:, 0], lengths[:, 1], mine[:, 3], mine[:, 4])
        loads[name] = load
        unknown = int(np.isnan(load.last_s).sum())
        if unknown:
            what = "all" if unknown == len(load) else f"{unknown} of {len(load)}"
            findings.append(InputFinding("missing metric", name, f"{what} requests: no latencies"))
    return RecordedLoad(end_s - cut_s, loads, findings)


def _rows(
    path: Path, models: Collection[str], findings: list[InputFinding]
) -> list[tuple[str, float, int, int, float, float]]:
    """Lines of a file: model, arrival, lengths, first and last token."""
    if not path.is_file():
        raise ConfigError(f"no trace {path}", remedy="Give CSV files, plain or .gz.")
    by_file = path.name.split(".")[0]
    default = by_file if by_file in models else next(iter(models)) if len(models) == 1 else None
    rows, broken, strange = [], [], dict[str, int]()
    steps = []
    latest_s = -np.inf
    for number, row in enumerate(rows_of(path), start=2):
        name = row.get("model") or default
        if name is None:
            raise ConfigError(
                f"{path} does not say of which model its requests are",
                remedy="Add a column model, or call the file after the model.",
            )
        if name not in models:
            strange[name] = strange.get(name, 0) + 1
            continue
        try:
            read = _request(row)
        except (TypeError, ValueError) as error:
            broken.append(f"line {number}: {error}")
            continue
        if read[0] < latest_s - CLOCK_STEP_S:
            steps.append(f"line {number}: {latest_s - read[0]:.1f} s back")
        latest_s = read[0]
        rows.append((name, *read))
    findings += _line_findings(path.name, len(rows), broken, steps)
    for name, count in sorted(strange.items()):
        message = f"{count} requests of {name!r}, which is not in the deployment list: left out"
        findings.append(InputFinding("unknown model", path.name, message))
    return rows


def _line_findings(
    where: str, row_count: int, broken: Sequence[str], steps: Sequence[str]
) -> Iterator[InputFinding]:
    """What is wrong with lines of a file; the first are told one by one."""
    if len(steps) > TOLD_LINES + row_count // 100:
        # So many are no clock: the log is in another order, as of ends.
        steps = [f"{len(steps)} lines are not in order of arrival"]
    for kind, found, done in (
        ("broken line", broken, "left out"),
        ("clock step", steps, "ordered by time; what lies between may be twice or not at all"),
    ):
        if found:
            more = f" and {len(found) - TOLD_LINES} more" if len(found) > TOLD_LINES else ""
            told = "; ".join(found[:TOLD_LINES]) + more
            yield InputFinding(kind, where, f"{told}: {done}")


def _request(row: dict[str, str]) -> tuple[float, int, int, float, float]:
    """A line in numbers.

    Raises:
        ValueError: A column is missing, is no number, or cannot be.
    """

    def found(column: str) -> float:
        text = next((row[key] for key in REQUEST_COLUMNS[column] if row.get(key)), None)
        return nan if text is None else float(text)

    arrival_s, prompt, output = found("queued"), found("prompt"), found("output")
    for what, value in (("time", arrival_s), ("prompt length", prompt), ("output length", output)):
        if not isfinite(value):
            raise ValueError(f"no {what}")
    if prompt < 1 or output < 0:
        raise ValueError(f"{prompt:g} prompt and {output:g} output tokens")
    first_s, last_s = found("first"), found("last")
    if isnan(first_s):
        first_s = arrival_s + found("ttft")
    if isnan(last_s):
        last_s = arrival_s + found("latency")
    if first_s < arrival_s or last_s < first_s or np.isinf((first_s, last_s)).any():
        raise ValueError("its tokens came before it, or out of order (a clock was set)")
    is_whole = not isnan(first_s) and not isnan(last_s)
    # A recorded request may have generated nothing; a served one generates at least one token.
    times = (first_s, last_s) if is_whole else (nan, nan)
    return arrival_s, int(prompt), max(1, int(output)), *times


def _cut_silence(table: Float64[np.ndarray, "requests 5"], findings: list[InputFinding]) -> float:
    """Take silences that may be outages of the recording out of the times; returns their sum."""
    if len(table) < 2:  # noqa: PLR2004 - no gap without two
        return 0.0
    last_s = np.fmax(table[:, 0], np.nan_to_num(table[:, 4], nan=-np.inf))
    silent_from = np.maximum.accumulate(last_s)[:-1]
    gaps = np.maximum(0.0, table[1:, 0] - silent_from)
    usual = float(np.quantile(gaps, 0.99)) if len(gaps) >= 100 else float(np.median(gaps))  # noqa: PLR2004 - below, one gap is a percent
    limit = max(LEAST_GAP_S, GAP_RATIO * usual)
    shift = np.zeros(len(table))
    for index in np.flatnonzero(gaps > limit):
        message = (
            f"no request of any model for {gaps[index] / 3600:.2f} h from "
            f"{silent_from[index]:.0f} s on: cut out, neither idle nor busy"
        )
        findings.append(InputFinding("gap", "traces", message))
        shift[index + 1 :] += gaps[index]
    table[:, [0, 3, 4]] -= shift[:, None]
    return float(shift[-1])
