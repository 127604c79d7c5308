"""The requests of `vllm_burst.py`: kinds of lengths, steady streams, the paper's burst, traces.

The burst is that of Aqua section 9.3 ("Fair scheduling during bursts", Figure 8). Requests come at
the stable rate; then, for a while, at twice that. The rise is noticed and more instances are
ordered, which takes as long as the burst lasts; from then on newly arriving requests are redirected
to them, until as many have been redirected as the burst brought beyond the stable rate. After that
the stable rate resumes. So the engine meets its backlog alone and can drain it.

What the paper does not state follows from what it does:

- *How full the engine is at the stable rate.* A minute of twice that rate leaves first come, first
  served with a TTFT of 20 s (Figure 8). A backlog that grows for a minute by what exceeds the
  capacity makes the last to come wait a minute times the excess; so twice the stable rate is four
  thirds of the capacity.
- *What a request takes*, by which a minute is scaled to a small engine. Llama 70B on two H100 reads
  70 GB of weights on each for a token, 21 ms at 3.35 TB/s, and ShareGPT's outputs have 440 tokens
  on average: a little more than 9 s, so a minute is about six requests long.
"""

from __future__ import annotations

import csv
import gzip
import math
import random
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from aqua_demo.engines.online_load import Arrival, Lengths, busy_s, draw_lengths

CALM_COUNT: Final = 25
"""Requests at the stable rate before the burst (section 9.3), and after it."""

BURST_SERVICE_TIMES: Final = 6.0
"""A minute over about ten seconds, the length of a request."""

STABLE_SHARE: Final = 2 / 3
"""Stable rate over capacity, chosen knowing the paper's result, see above. A test makes sure that
`aqua_simulator.papers.aqua` takes the same."""

NOTICE: Final = 1.0 / 12
"""Of the burst: rates are looked at every 5 s of a minute."""


Draw = Callable[[random.Random], int]
"""A length."""


def _log_normal(median: float, spread: float) -> Draw:
    return lambda rng: round(min(480, max(8, median * math.exp(rng.gauss(0, spread)))))


def _pairs(prompt: Draw, output: Draw) -> Callable[[int, int], Lengths]:
    def draw(count: int, seed: int) -> Lengths:
        rng = random.Random(seed)
        return [(prompt(rng), output(rng)) for _ in range(count)]

    return draw


KINDS: Final[dict[str, Callable[[int, int], Lengths]]] = {
    "chats": draw_lengths,
    "equal": _pairs(lambda _: 100, lambda _: 100),
    "uniform": _pairs(lambda rng: rng.randint(16, 200), lambda rng: rng.randint(16, 200)),
    "little-spread": _pairs(_log_normal(110, 0.3), _log_normal(90, 0.3)),
    "much-spread": _pairs(_log_normal(90, 0.9), _log_normal(70, 1.1)),
    "long-prompts": _pairs(_log_normal(250, 0.6), _log_normal(50, 0.6)),
    "long-outputs": _pairs(_log_normal(40, 0.6), _log_normal(250, 0.5)),
}
"""Makes prompt and output lengths of so many requests, of a seed; lengths are at most 480."""


def steady(lengths: Lengths, rate_per_s: float, seed: int) -> list[Arrival]:
    """Poisson arrivals; the same seed gives the same ones at any rate, stretched."""
    rng = random.Random(seed)
    arrivals: list[Arrival] = []
    now_s = 0.0
    for prompt, output in lengths:
        now_s += rng.expovariate(1.0) / rate_per_s
        arrivals.append((now_s, prompt, output))
    return arrivals


def paper_burst(
    rate_per_s: float,
    service_s: float,
    seed: int,
    draw: Callable[[int, int], Lengths] = draw_lengths,
) -> list[Arrival]:
    """The burst of the module.

    Args:
        rate_per_s: Stable rate.
        service_s: What a request takes at that rate.
        seed: Of arrivals and lengths.
        draw: Makes so many lengths of a seed.
    """
    rng = random.Random(seed)
    times: list[float] = []
    now_s = 0.0
    for _ in range(CALM_COUNT):
        now_s += rng.expovariate(rate_per_s)
        times.append(now_s)
    rise_s = now_s
    length_s = BURST_SERVICE_TIMES * service_s
    while (now_s := now_s + rng.expovariate(2 * rate_per_s)) <= rise_s + length_s:
        times.append(now_s)
    surplus = max(0, len(times) - CALM_COUNT - round(rate_per_s * length_s))
    now_s = rise_s + length_s
    redirected_s = rise_s + (1 + NOTICE) * length_s
    calm = CALM_COUNT
    while calm:
        now_s += rng.expovariate(rate_per_s)
        if now_s >= redirected_s and surplus:
            surplus -= 1
            continue
        times.append(now_s)
        calm -= 1
    lengths = draw(len(times), seed)
    return [(at_s, *pair) for at_s, pair in zip(times, lengths, strict=True)]


def read_trace(path: Path, most_tokens: int) -> list[Arrival]:
    """Arrivals of a file (`t_s,prompt_tokens,output_tokens` as CSV, gzipped or not).

    Args:
        path: The file.
        most_tokens: What prompts and outputs are cut to.
    """
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    arrivals = [
        (
            float(row["t_s"]),
            min(most_tokens, max(1, int(row["prompt_tokens"]))),
            min(most_tokens, max(2, int(row["output_tokens"]))),
        )
        for row in csv.DictReader(content.decode().splitlines())
    ]
    first_s = min(at_s for at_s, _, _ in arrivals)
    return sorted((at_s - first_s, prompt, output) for at_s, prompt, output in arrivals)


def busiest_rate(arrivals: Sequence[Arrival], window_s: float) -> float:
    """Requests per second in the window in which most arrive."""
    times = [at_s for at_s, _, _ in arrivals]
    most = max(bisect_left(times, at_s + window_s) - index for index, at_s in enumerate(times))
    return most / window_s


def faster(arrivals: Sequence[Arrival], speed: float) -> list[Arrival]:
    """The same requests, arriving so many times as fast."""
    return [(at_s / speed, prompt, output) for at_s, prompt, output in arrivals]


def throughput(rows: list[dict[str, float]]) -> float:
    """Output tokens per second in which any of them was unfinished."""
    spans = [(row["arrival_s"], row["end_s"]) for row in rows]
    return sum(row["output_tokens"] for row in rows) / busy_s(spans)
