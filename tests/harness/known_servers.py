"""Servers on a virtual clock, with their requests: what a search is tried on, and measured.

Queues with slots (`queueing`) and engines that work in steps (`stepping`). Their truth is found by
brute force, between the rates that each case names.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from aqua_profiler.load.lengths import LengthDistribution, lengths_of
from harness.queueing import AnyServer, Server
from harness.stepping import StepServer


@dataclass(frozen=True)
class Case:
    """A server, its requests, and between which rates its truth lies."""

    server: AnyServer
    lengths: LengthDistribution
    low: float
    high: float


def drawn(
    prompt: tuple[float, float], output: tuple[float, float], most: int
) -> LengthDistribution:
    """Log-normal lengths of prompts and outputs, each by (mu, sigma); outputs up to `most`."""
    generator = random.Random(3)
    return lengths_of(
        [
            (
                max(1, min(4000, round(generator.lognormvariate(*prompt)))),
                max(1, min(most, round(generator.lognormvariate(*output)))),
            )
            for _ in range(800)
        ]
    )


CHAT: Final = drawn((5.0, 1.0), (2.3, 0.7), 60)
LONG: Final = drawn((5.0, 1.0), (4.5, 0.6), 400)
SHORT: Final = drawn((3.0, 0.6), (3.0, 0.6), 80)

GAPS: Final = fmean(output for _, output in CHAT.pairs) - 1

CASES: Final[dict[str, Case]] = {
    "sixteen slots": Case(Server(16, lambda _p, _r: 0.02, lambda _n, _r: 0.78 / GAPS), CHAT, 5, 60),
    "five slots": Case(Server(5, lambda _p, _r: 0.05, lambda _n, _r: 0.95 / GAPS), CHAT, 1, 20),
    "one at a time": Case(Server(1, lambda _p, _r: 0.05, lambda _n, _r: 0.0), CHAT, 5, 40),
    "tokens slow down with each request": Case(
        Server(64, lambda _p, _r: 0.02, lambda n, _r: 0.02 + 0.004 * n), CHAT, 5, 40
    ),
    "tokens of chance": Case(
        Server(
            64,
            lambda _p, r: 0.05 * r.random(),
            lambda n, r: (0.01 + 0.003 * n) * r.lognormvariate(0, 0.3),
        ),
        CHAT,
        5,
        40,
    ),
    "tokens hardly slow down": Case(
        Server(
            64,
            lambda _p, _r: 0.02,
            lambda n, r: (0.05 + 0.0003 * n) * r.lognormvariate(0, 0.2),
        ),
        CHAT,
        5,
        120,
    ),
    "steps": Case(StepServer(base_s=0.02, decode_s=0.0024, prompt_token_s=1e-5), CHAT, 5, 60),
    "steps of a small engine": Case(
        StepServer(base_s=0.006, decode_s=0.001, prompt_token_s=3e-5, noise=0.15), SHORT, 10, 80
    ),
    "steps, 16 at once": Case(
        StepServer(base_s=0.02, decode_s=0.001, prompt_token_s=2e-5, most_running=16), CHAT, 5, 80
    ),
    "steps, a cache that fills": Case(
        StepServer(base_s=0.02, decode_s=0.0004, prompt_token_s=2e-5, kv_tokens=6000), CHAT, 5, 80
    ),
    "steps, prompts in pieces": Case(
        StepServer(base_s=0.01, decode_s=0.0002, prompt_token_s=6e-5, step_tokens=512), CHAT, 5, 99
    ),
    "steps, long outputs": Case(
        StepServer(base_s=0.02, decode_s=0.0006, prompt_token_s=2e-5), LONG, 2, 40
    ),
    "steps, long prompts in one piece": Case(
        StepServer(base_s=0.015, decode_s=0.001, prompt_token_s=6e-5, step_tokens=8192), CHAT, 2, 60
    ),
}
