"""Prompt and output lengths of a deployment, and requests drawn from them.

Owns the reading of CSV files and traces (`docs/profiling.md` lists the columns): lenient on the
names of columns, strict on their values. And the drawing: sampling is
stratified. A block holds one request from each of 8 x 8 equal strata, by output and prompt,
shuffled.
Every row is as likely as any other, but a stretch of requests carries nearly the same work as any
other stretch, so that two runs, or two rates, differ by the server and not by who drew the long
prompts. Independent drawing needs several times as many requests for the same precision.

Not promised: correlations between requests. A trace is read for its lengths; its times are not
replayed, for the search sets the rate.

Source: Aqua section 4.1, "samples requests for profiling using input and output token
distributions from individual LLM deployments". Strata are ours.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from aqua_profiler.errors import LengthsInvalidError

STRATA: Final = 8
"""Strata by output, and within each by prompt: a block has the square of that many requests.
Doubled, a block of 256 outlasts the trials of slow servers."""

GOLDEN: Final = (5**0.5 - 1) / 2
"""Fixed by number theory: steps of this share visit a stratum evenly (van der Corput, Weyl)."""

MAX_TOKENS: Final = 10_000_000
"""Tokens of a prompt or an output: ten times the longest context on offer. Beyond, a cell is a time
or an id."""

MAX_FILE_BYTES: Final = 1 << 30
"""Bytes of a file of lengths, unpacked: it is read at once. Twice as many need 10 GB of memory."""

# Names of columns as traces of Azure, Mooncake, BurstGPT, vLLM and others have them, in order of
# preference; compared without case and spaces around, with `_` for `-` and for a space.
PROMPT_NAMES: Final = tuple(
    (  # noqa: SIM905 - a list of them would take a page
        "prompt_tokens input_tokens prompt_len input_len prompt_length input_length"
        " num_prefill_tokens context_tokens contexttokens request_tokens prompt input"
    ).split()
)
OUTPUT_NAMES: Final = tuple(
    (  # noqa: SIM905 - as above
        "output_tokens completion_tokens generated_tokens generatedtokens output_len output_length"
        " num_decode_tokens response_tokens max_tokens completion output"
    ).split()
)


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """A distribution of (prompt, output) lengths in tokens.

    Attributes:
        pairs: One per observed request, sorted by work: output, then prompt.
        digest: SHA-256 of the pairs, whatever file they came from.
    """

    pairs: tuple[tuple[int, int], ...]
    digest: str

    def fitting(self, max_tokens: int) -> LengthDistribution:
        """Those of at most `max_tokens` in all, which is what an engine's context holds.

        Raises:
            LengthsInvalidError: None fits.
        """
        kept = [pair for pair in self.pairs if sum(pair) <= max_tokens]
        if not kept:
            raise LengthsInvalidError(
                f"no request fits the engine's context of {max_tokens} tokens",
                remedy="Give lengths of this deployment, or raise the engine's context length.",
            )
        return lengths_of(kept)

    def drawn(self, seed: int) -> Iterator[tuple[int, int]]:
        """Requests for ever; the same seed gives the same ones."""
        generator = random.Random(seed)
        # Equal shares of the distribution: by output, then within each share by prompt.
        bands = _parts(self.pairs, STRATA)
        cells = [cell for band in bands for cell in _parts(sorted(band), STRATA)]
        places = [generator.random() for _ in cells]
        while True:
            block = [
                cell[int(place * len(cell))] for cell, place in zip(cells, places, strict=True)
            ]
            places = [(place + GOLDEN) % 1.0 for place in places]
            generator.shuffle(block)
            yield from block


def _parts(pairs: Sequence[tuple[int, int]], count: int) -> list[Sequence[tuple[int, int]]]:
    """`count` parts of nearly equal size; of fewer pairs, as many parts as there are pairs."""
    count = min(count, len(pairs))
    edges = [round(part * len(pairs) / count) for part in range(count + 1)]
    return [pairs[low:high] for low, high in pairwise(edges)]


def lengths_of(pairs: Sequence[tuple[int, int]]) -> LengthDistribution:
    """The distribution of these pairs; checks nothing."""
    ordered = tuple(sorted(pairs, key=lambda pair: (pair[1], pair[0])))
    text = "\n".join(f"{prompt},{output}" for prompt, output in ordered)
    return LengthDistribution(ordered, hashlib.sha256(text.encode()).hexdigest())


def read_lengths(path: Path) -> LengthDistribution:
    """Read a CSV (or TSV) with a header, or a trace of JSON lines; `.gz` or not.

    Raises:
        LengthsInvalidError: Unreadable, columns missing, or a value that is no token count; the
            message names the line.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise LengthsInvalidError(
            f"cannot read {path}: {error}", remedy="Check the path and that the file is whole."
        ) from error
    if len(raw) > MAX_FILE_BYTES:
        raise LengthsInvalidError(
            f"{path} is larger than {MAX_FILE_BYTES} bytes", remedy="Sample its rows."
        )
    rows = _json_rows if text.lstrip().startswith("{") else _csv_rows
    try:
        pairs = [_pair(row, f"{path}, line {number}") for number, row in rows(text, path)]
    except csv.Error as error:
        raise LengthsInvalidError(
            f"{path} is no CSV: {error}", remedy="Check that the file is whole."
        ) from error
    if not pairs:
        raise LengthsInvalidError(
            f"{path} has no rows", remedy="Give one row per request: prompt_tokens,output_tokens."
        )
    return lengths_of(pairs)


def _csv_rows(text: str, _: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    first = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = next((mark for mark in "\t;" if mark in first and "," not in first), ",")
    rows = csv.reader(io.StringIO(text), delimiter=delimiter)
    header: list[str] | None = None
    for row in rows:
        if any(cell.strip() for cell in row):
            if header is None:
                header = row
            else:
                yield rows.line_num, dict(zip(header, row, strict=False))


def _json_rows(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            raise LengthsInvalidError(
                f"{path}, line {number} is not a JSON object",
                remedy="Write one JSON object per line.",
            )
        yield number, entry


@cache
def _plain(name: str) -> str:
    return re.sub("[- ]", "_", name.strip().lower())


def _pair(row: dict[str, Any], place: str) -> tuple[int, int]:
    named = {_plain(name): value for name, value in row.items()}
    return _tokens(named, PROMPT_NAMES, place), _tokens(named, OUTPUT_NAMES, place)


def _tokens(named: dict[str, Any], names: tuple[str, ...], place: str) -> int:
    name = next((name for name in names if name in named), None)
    if name is None:
        raise LengthsInvalidError(
            f"{place} has no {names[0]}; it has: {', '.join(named) or 'nothing'}",
            remedy="Name the columns prompt_tokens and output_tokens, with a header line.",
        )
    value = named[name]
    try:
        number = math.nan if isinstance(value, bool) else float(value)
        count = int(number)
    except (TypeError, ValueError, OverflowError):
        count, number = -1, 0.0
    if count != number or not 1 <= count <= MAX_TOKENS:
        raise LengthsInvalidError(
            f"{place}: {value!r} is not a count of tokens",
            remedy=f"Give whole numbers from 1 to {MAX_TOKENS}.",
        )
    return count
