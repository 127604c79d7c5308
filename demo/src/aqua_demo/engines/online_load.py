"""What people ask an engine, and what waits beside: arrivals, lengths, and the offline file.

Lengths are log-normal with long tails, as chat logs have them, and cut to what a small engine
holds. Arrivals differ in how they cluster: gaps with a gamma distribution of any coefficient of
variation, or streams that are on and off. The same seed gives the same requests.

Offline requests stand in a file as OpenAI's Batch API takes it, a request a line, with prompts of
token ids: any model has them, and none needs a tokenizer.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Self

from aqua_cli import write_text

Arrival = tuple[float, int, int]
"""Second, prompt tokens, output tokens."""

Lengths = list[tuple[int, int]]
"""Prompt and output tokens of requests."""

Row = dict[str, Any]
"""A request and what became of it."""

ON_SHARE: Final = 0.3
"""Of the time, in which the on/off load has all its requests. Doubled, there is less of a burst."""
ON_REQUESTS: Final = 20
"""Requests of an "on" on average. Doubled, bursts and pauses are twice as long."""
OUTPUT_MEDIAN: Final = 90
"""Tokens of an answer, as of chats. Doubled, as many requests take nearly twice as long."""
OFFLINE_PROMPT: Final = 2
"""Offline prompts over those of people, by judgement: documents are longer than questions. Doubled,
more of the offline work is prompts."""
WORDS: Final = (3, 256)
"""Ids that prompts are made of; any model has them."""
FILES_APART: Final = 1 << 40
"""Seeds of prompts between two offline files; people's prompts are below them all. Doubled, files
may have twice as many."""


@dataclass(frozen=True, slots=True)
class OnlineLoad:
    """Online requests, in the order of their arrival."""

    arrivals: list[Arrival]

    @property
    def length_s(self) -> float:
        """Seconds until the last one comes."""
        return self.arrivals[-1][0]

    @classmethod
    def at_once(cls, lengths: Lengths, at_s: float = 0.0) -> Self:
        """All of them come in one moment."""
        return cls([(at_s, *pair) for pair in lengths])

    @classmethod
    def gamma(cls, lengths: Lengths, rate_per_s: float, cv: float, seed: int) -> Self:
        """Arrivals with gamma-distributed gaps of that coefficient of variation."""
        rng = random.Random(seed)
        now_s = 0.0
        arrivals: list[Arrival] = []
        for pair in lengths:
            now_s += rng.gammavariate(1 / cv**2, cv**2 / rate_per_s)
            arrivals.append((now_s, *pair))
        return cls(arrivals)

    @classmethod
    def on_off(
        cls, lengths: Lengths, rate_per_s: float, seed: int, *, on_requests: int = ON_REQUESTS
    ) -> Self:
        """Poisson arrivals in part of the time, at a rate that makes up for the rest."""
        rng = random.Random(seed)
        now_s, left = 0.0, 0.0
        arrivals: list[Arrival] = []
        for pair in lengths:
            if left <= 0:
                left = rng.expovariate(1 / on_requests)
                now_s += rng.expovariate(rate_per_s / (on_requests * (1 - ON_SHARE)))
            now_s += rng.expovariate(rate_per_s / ON_SHARE)
            left -= 1
            arrivals.append((now_s, *pair))
        return cls(arrivals)


def unanswered(arrival_s: float, prompt_tokens: int, output_tokens: int) -> Row:
    """A request of which nothing has come yet."""
    return {
        "arrival_s": arrival_s,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "tokens": [],
        "token_s": [],
    }


def draw_lengths(count: int, seed: int, output_median: float = OUTPUT_MEDIAN) -> Lengths:
    """Prompt and output tokens: log-normal with long tails, cut to what the engine holds."""
    rng = random.Random(seed)

    def draw(median: float, spread: float, low: int, high: int) -> int:
        return round(min(high, max(low, median * math.exp(rng.gauss(0, spread)))))

    return [(draw(110, 0.6, 16, 480), draw(output_median, 0.8, 8, 480)) for _ in range(count)]


def draw_prompt(tokens: int, seed: int) -> list[int]:
    """Token ids of a prompt; the same seed gives the same ones."""
    rng = random.Random(seed)
    return [rng.randrange(*WORDS) for _ in range(tokens)]


def write_offline_file(
    path: Path,
    count: int,
    seed: int,
    longest_prompt: int,
    *,
    topics: int = 0,
    body: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write offline requests as OpenAI's Batch API takes them: longer prompts than people's.

    Args:
        path: The file, in JSON lines.
        count: Requests.
        seed: Of lengths and prompts.
        longest_prompt: What prompts are cut to, tokens.
        topics: Beginnings, half of the longest prompt each, that prompts have by turns; 0 for none.
        body: Further fields of each request.
    """
    first = (seed + 1) * FILES_APART
    shared = [draw_prompt(longest_prompt // 2, first - 1 - topic) for topic in range(topics)]
    lines = []
    for number, (prompt, output) in enumerate(draw_lengths(count, seed)):
        beginning = shared[number % topics] if topics else []
        tokens = min(longest_prompt - len(beginning), OFFLINE_PROMPT * prompt)
        asked = {
            "prompt": beginning + draw_prompt(tokens, first + number),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            **body,
        }
        line = {"custom_id": f"offline-{number}", "method": "POST", "url": "/v1/completions"}
        lines.append(json.dumps(line | {"body": asked}))
    write_text(path, "\n".join(lines) + "\n")


def read_offline_file(path: Path) -> list[dict[str, Any]]:
    """The requests of such a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def busy_s(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in which at least one of these was under way."""
    total_s, until_s = 0.0, -math.inf
    for start_s, end_s in sorted(spans):
        total_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return total_s


def p99(values: Sequence[float]) -> float:
    """The 99th percentile, interpolated."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]
