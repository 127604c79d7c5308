"""Open-loop load at one rate on an OpenAI-compatible endpoint, however long requests queue.

A child of `vllm_profiler.py`: `URL MODEL LENGTHS RATE SECONDS SEED`, and one JSON object on
standard output. It is the profiler's own generator, told neither to search nor to stop early.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from aqua_profiler.load.endpoint import Endpoint
from aqua_profiler.load.lengths import read_lengths
from aqua_profiler.load.trial import Trial
from aqua_profiler.measure.open_loop import OpenLoopTrial
from aqua_profiler.spec import LatencyObjective, UnloadedLatency

WORDS_OF_A_PROBE = 20


async def load(url: str, model: str, lengths: Path, rate: float, seconds: float, seed: int) -> None:
    """Print what the requests met."""
    async with Endpoint(url, model) as endpoint:
        tokens = await endpoint.ask(WORDS_OF_A_PROBE, 2, 0, lambda: None, lambda: None)
        if tokens:
            endpoint.words_per_token = WORDS_OF_A_PROBE / tokens
        trial = Trial(rate, seed=seed, most_s=seconds, to_the_end=True)
        requests = read_lengths(lengths).drawn(seed)
        running = OpenLoopTrial(
            endpoint,
            requests,
            trial,
            LatencyObjective(),
            UnloadedLatency(0.1, 1.0, 0.01),
            stall_s=60,
            drain_s=30,
        )
        found = await running.go()
        names = ("rate_per_s", "sent", "ttft_s", "ttft_p99_s", "tbt_s", "lateness_p99_s")
        print(json.dumps({name: getattr(found, name) for name in names}))


if __name__ == "__main__":
    address, name, csv, *numbers = sys.argv[1:]
    asyncio.run(
        load(address, name, Path(csv), float(numbers[0]), float(numbers[1]), int(numbers[2]))
    )
