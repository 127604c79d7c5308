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

import csv
import gzip
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import inf, isfinite, isnan, nan
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Bool, Float64, Int64

from aqua_protocol.errors import ConfigError
from aqua_simulator.serving.recordings import MOST_SECONDS, MOST_TOKENS, REQUEST_COLUMNS
from aqua_simulator.serving.request import Arrival
from aqua_simulator.whatif.cluster import InputFinding
from aqua_simulator.whatif.step_fit import StepObservations

PIECE_S: Final = 300.0
"""Seconds of a piece of the day that is drawn again as a whole: longer than bursts, shorter than
the day's ups and downs. Doubled, draws differ less from the recording."""

LEAST_PIECES: Final = 12
"""Pieces of a short recording. Doubled, its draws keep less of its bursts together."""

LEAST_GAP_S: Final = 900.0
"""Seconds of silence of all models from which on it may be an outage of the recording. Doubled,
shorter outages count as idle time."""

LEAST_SILENCE_S: Final = 60.0
"""Seconds of a silence from which on it is told, though it is idle time. Doubled, fewer are."""

GAP_RATIO: Final = 20.0
"""Of such a silence to the longest but few (99 of 100) between two requests. Doubled, likewise."""

CLOCK_STEP_S: Final = 1.0
"""Seconds that a time may lie before that of the line above, as logs are written. Doubled, smaller
steps of a clock pass."""

CHUNK_LINES: Final = 1 << 15
"""Lines that are read at once. Doubled, text takes twice the memory, and no less time."""

TOLD_LINES: Final = 3
"""Broken lines that are told one by one; the others are counted. Doubled, more is printed."""


@dataclass(frozen=True, eq=False)
class ModelLoad:
    """Requests of one model, in order of arrival.

    Attributes:
        first_s, last_s: When their tokens came; NaN where it was not recorded.
        observed: What was seen of latencies, by the names of `serving.request.summary`; may lack
            any of them.
        steps: What was seen of steps beside the requests, to fit step times on.
    """

    arrival_s: Float64[np.ndarray, " requests"]
    prompt_tokens: Int64[np.ndarray, " requests"]
    output_tokens: Int64[np.ndarray, " requests"]
    first_s: Float64[np.ndarray, " requests"]
    last_s: Float64[np.ndarray, " requests"]
    observed: dict[str, float] = field(default_factory=dict)
    steps: StepObservations = field(default_factory=StepObservations)

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
        unknown: Models of which nothing was recorded, not even that they were idle.
    """

    span_s: float
    loads: dict[str, ModelLoad]
    findings: list[InputFinding]
    unknown: tuple[str, ...] = ()


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
    files = [_Lines(path, models, findings) for path in paths]
    owner = np.concatenate([each.owner for each in files])
    table = np.concatenate([each.table for each in files])
    if not len(table):
        told = "; ".join(one.message for one in findings)
        raise ConfigError(
            f"no usable request in {', '.join(map(str, paths))}" + (f": {told}" if told else ""),
            remedy=_COLUMNS,
        )
    order = np.argsort(table[:, 0], kind="stable")
    owner, table = owner[order], table[order]
    # From 0 on where that is what the times say, else from the first request on.
    first_s = float(table[0, 0])
    start_s = 0.0 if hours is not None and 0.0 <= first_s <= hours * 3600.0 else first_s
    table[:, [0, 3, 4]] -= start_s
    end_s = float(np.nanmax(table[:, [0, 4]])) if hours is None else hours * 3600.0
    if end_s < table[-1, 0]:
        keep = table[:, 0] <= end_s
        message = f"{int((~keep).sum())} requests come later: cut"
        findings.append(InputFinding("outside", "--hours", message))
        owner, table = owner[keep], table[keep]
    names = list(models)
    findings += [
        InputFinding("no requests", name, "idle all day, as far as the traces say")
        for name in sorted(set(models) - {names[index] for index in np.unique(owner)})
    ]
    cut_s = 0.0 if is_silence_idle else _cut_silence(table, findings)
    if not end_s > cut_s:
        raise ConfigError(
            f"the {len(table)} requests of {', '.join(map(str, paths))} cover no time",
            remedy="Say how long the recording is with --hours.",
        )
    loads = {}
    for index, name in sorted(enumerate(names), key=lambda item: item[1]):
        mine = table[owner == index]
        if not len(mine):
            continue
        lengths = mine[:, 1:3].astype(np.int64)
        load = ModelLoad(mine[:, 0], lengths[:, 0], lengths[:, 1], mine[:, 3], mine[:, 4])
        loads[name] = load
        for start_s, length_s in () if is_silence_idle else _silences(mine, LEAST_GAP_S):
            message = (
                f"no request for {length_s / 3600:.2f} h from {start_s:.0f} s on: idle meanwhile"
            )
            findings.append(InputFinding("silence", name, message))
        unknown = int(np.isnan(load.last_s).sum())
        if unknown:
            what = "all" if unknown == len(load) else f"{unknown} of {len(load)}"
            findings.append(InputFinding("missing metric", name, f"{what} requests: no latencies"))
    return RecordedLoad(end_s - cut_s, loads, findings)


_COLUMNS: Final = "Columns: t_s, model, prompt_tokens, output_tokens, ttft_s, latency_s."


class _Lines:
    """The usable lines of a file.

    Lines are read some thousands at a time and column by column; only those that look wrong are
    looked at one by one.

    Attributes:
        owner: Index of each line's model.
        table: Arrival, lengths, first and last token, of each line.
    """

    def __init__(self, path: Path, models: Collection[str], findings: list[InputFinding]) -> None:
        if not path.is_file():
            raise ConfigError(f"no trace {path}", remedy="Give CSV files, plain or .gz.")
        by_file = path.name.split(".")[0]
        only = next(iter(models)) if len(models) == 1 else None
        self._path, self._default = path, by_file if by_file in models else only
        self._codes = {name: index for index, name in enumerate(models)}
        self._strange, self._broken, self._steps = Counter[str](), _Told(), _Told()
        self._latest_s = -inf
        owners, tables = [np.empty(0, np.int64)], [np.empty((0, 5))]
        line_count = 0
        try:
            for header, number, lines in _chunks(path):
                owner, table = self._read(header, number, lines)
                owners.append(owner)
                tables.append(table)
                line_count = number + len(lines) - 1
        except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
            message = f"{error}: nothing is read of it after line {line_count}"
            findings.append(InputFinding("broken file", path.name, message))
        self.owner, self.table = np.concatenate(owners), np.concatenate(tables)
        findings += _line_findings(path.name, len(self.table), self._broken, self._steps)
        for name, count in sorted(self._strange.items()):
            message = f"{count} requests of {name!r}, which is not in the deployment list: left out"
            findings.append(InputFinding("unknown model", path.name, message))

    def _read(
        self, header: Sequence[str], number: int, lines: Sequence[Sequence[str]]
    ) -> tuple[Int64[np.ndarray, " lines"], Float64[np.ndarray, "lines 5"]]:
        """Some lines, of which the first has that number: owners and numbers of the usable ones."""
        width = len(header)
        numbers = [number + index for index, line in enumerate(lines) if line]
        lines = [line if len(line) == width else _padded(line, width) for line in lines if line]
        columns = dict(zip(header, zip(*lines, strict=True), strict=False)) if lines else {}
        named = columns.get("model", ("",) * len(lines))
        if self._default is None and not all(named):
            raise ConfigError(
                f"{self._path} does not say of which model its requests are",
                remedy="Add a column model, or call the file after the model.",
            )
        names = [name or self._default for name in named]
        owner = np.array([self._codes.get(str(name), -1) for name in names], np.int64)
        self._strange.update(
            str(name) for name, code in zip(names, owner.tolist(), strict=True) if code < 0
        )
        table, is_doubtful = _numbers_of(columns, len(lines))
        is_usable = owner >= 0
        for index in np.flatnonzero(is_doubtful & is_usable):
            try:
                table[index] = _request(dict(zip(header, lines[index], strict=False)))
            except (TypeError, ValueError) as error:
                self._broken.tell(f"line {numbers[index]}: {error}")
                is_usable[index] = False
        usable = np.flatnonzero(is_usable)
        arrival_s = table[usable, 0]
        back_s = np.append(self._latest_s, arrival_s)[:-1] - arrival_s
        for place in np.flatnonzero(back_s > CLOCK_STEP_S):
            self._steps.tell(f"line {numbers[usable[place]]}: {back_s[place]:.1f} s back")
        if len(usable):
            self._latest_s = float(arrival_s[-1])
        return owner[usable], table[usable]


@dataclass(slots=True)
class _Told:
    """Things to tell: the first few, and how many there are."""

    first: list[str] = field(default_factory=list)
    count: int = 0

    def tell(self, text: str) -> None:
        """One more."""
        self.count += 1
        if len(self.first) < TOLD_LINES:
            self.first.append(text)


def _chunks(path: Path) -> Iterator[tuple[list[str], int, list[list[str]]]]:
    """Some lines at a time, with the header and the number of the first."""
    opener = gzip.open if path.suffix == ".gz" else open
    # Spreadsheets begin a file with a byte order mark, which is no part of a name.
    with opener(path, "rt", newline="", encoding="utf-8-sig") as text:
        reader = csv.reader(text)
        header = [name.strip() for name in next(reader, [])]
        if twice := [name for name, count in Counter(header).items() if name and count > 1]:
            raise ConfigError(
                f"{path}: the column {twice[0]} is there twice", remedy="Keep one of them."
            )
        for what, columns in _NEEDED:
            if not set(REQUEST_COLUMNS[columns]) & set(header):
                raise ConfigError(
                    f"{path}: no {what}: it has the columns {', '.join(header) or 'of no header'}",
                    remedy=f"One of {', '.join(REQUEST_COLUMNS[columns])}. {_COLUMNS}",
                )
        number = 2
        while lines := list(islice(reader, CHUNK_LINES)):
            yield header, number, lines
            number += len(lines)


_NEEDED: Final = (("time", "queued"), ("prompt length", "prompt"), ("output length", "output"))


def _padded(line: Sequence[str], width: int) -> list[str]:
    """A line of another length than the header's."""
    return [*line[:width], *[""] * (width - len(line))]


def _numbers_of(
    columns: Mapping[str, Sequence[str]], count: int
) -> tuple[Float64[np.ndarray, "lines 5"], Bool[np.ndarray, " lines"]]:
    """Lines as `_request` reads them, and which it has to look at by itself."""
    is_doubtful = np.zeros(count, dtype=bool)

    def found(column: str) -> Float64[np.ndarray, " lines"]:
        present = [columns[name] for name in REQUEST_COLUMNS[column] if name in columns]
        if not present:
            return np.full(count, nan)
        texts = present[0]
        for others in present[1:]:
            texts = [one or other for one, other in zip(texts, others, strict=True)]
        try:
            return np.array([float(text) if text else nan for text in texts])
        except ValueError:
            values = np.full(count, nan)
            for index, text in enumerate(texts):
                try:
                    values[index] = float(text) if text else nan
                except ValueError:
                    is_doubtful[index] = True
            return values

    arrival_s, prompt, output = found("queued"), found("prompt"), found("output")
    first_s, last_s = found("first"), found("last")
    first_s = np.where(np.isnan(first_s), arrival_s + found("ttft"), first_s)
    last_s = np.where(np.isnan(last_s), arrival_s + found("latency"), last_s)
    known = np.isfinite(arrival_s) & np.isfinite(prompt) & np.isfinite(output)
    is_doubtful |= ~known | (prompt < 1) | (output < 0)
    is_doubtful |= (prompt > MOST_TOKENS) | (output > MOST_TOKENS)
    is_doubtful |= np.abs(arrival_s) > MOST_SECONDS
    is_doubtful |= (first_s < arrival_s) | (last_s < first_s) | np.isinf(first_s) | np.isinf(last_s)
    # As in `_request`.
    is_whole = ~np.isnan(first_s) & ~np.isnan(last_s)
    times = [np.where(is_whole, each, nan) for each in (first_s, last_s)]
    with np.errstate(invalid="ignore"):
        lengths = [np.trunc(prompt), np.maximum(1.0, np.trunc(output))]
    return np.column_stack([arrival_s, *lengths, *times]), is_doubtful


def _line_findings(
    where: str, row_count: int, broken: _Told, steps: _Told
) -> Iterator[InputFinding]:
    """What is wrong with lines of a file; the first are told one by one."""
    if steps.count > TOLD_LINES + row_count // 100:
        # So many are no clock: the log is in another order, as of ends.
        steps = _Told([f"{steps.count} lines are not in order of arrival"], 1)
    for kind, found, done in (
        ("broken line", broken, "left out"),
        ("clock step", steps, "ordered by time; what lies between may be twice or not at all"),
    ):
        if found.count:
            more = found.count - len(found.first)
            told = "; ".join(found.first) + (f" and {more} more" if more else "")
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
    if not 1 <= prompt <= MOST_TOKENS or not 0 <= output <= MOST_TOKENS:
        raise ValueError(f"{prompt:g} prompt and {output:g} output tokens")
    if abs(arrival_s) > MOST_SECONDS:
        raise ValueError(f"{arrival_s:g} is no time in seconds")
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


def _silences(
    table: Float64[np.ndarray, "requests 5"], least_s: float
) -> list[tuple[float, float]]:
    """Silences so long and much longer than usual: from when on, and for how long."""
    if len(table) < 2:  # noqa: PLR2004 - no gap without two
        return []
    last_s = np.fmax(table[:, 0], np.nan_to_num(table[:, 4], nan=-np.inf))
    silent_from = np.maximum.accumulate(last_s)[:-1]
    gaps = np.maximum(0.0, table[1:, 0] - silent_from)
    usual = float(np.quantile(gaps, 0.99)) if len(gaps) >= 100 else float(np.median(gaps))  # noqa: PLR2004 - below, one gap is a percent
    chosen = np.flatnonzero(gaps > max(least_s, GAP_RATIO * usual))
    return [(float(silent_from[index]), float(gaps[index])) for index in chosen]


def _cut_silence(table: Float64[np.ndarray, "requests 5"], findings: list[InputFinding]) -> float:
    """Take silences that may be outages of the recording out of the times; returns their sum."""
    short = [length for _, length in _silences(table, LEAST_SILENCE_S) if length <= LEAST_GAP_S]
    if short:
        message = (
            f"{len(short)} times no request of any model for {max(short):.0f} s at most, much "
            "longer than usual: counted as idle"
        )
        findings.append(InputFinding("silence", "traces", message))
    shift = np.zeros(len(table))
    for start_s, length_s in _silences(table, LEAST_GAP_S):
        message = (
            f"no request of any model for {length_s / 3600:.2f} h from "
            f"{start_s:.0f} s on: cut out, neither idle nor busy"
        )
        findings.append(InputFinding("gap", "traces", message))
        shift[table[:, 0] > start_s] += length_s
    table[:, [0, 3, 4]] -= shift[:, None]
    return float(shift[-1])
