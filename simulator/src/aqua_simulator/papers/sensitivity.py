"""What the constants that BlendServe's paper does not give do to its gains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from aqua_simulator.offline.policies import OfflinePolicy
from aqua_simulator.papers.blendserve import TRACES, Experiments, gain

SENSITIVITY_REQUESTS: Final = 50_000
"""Requests of a trial, an eighth of the paper's; the first row of the table shows what that moves.
Doubled, the table takes twice as long."""

_DENSE_STEPS: Final = (128, 256, 320, 448, 512)
"""Least dense batches tried beside the chosen one."""


def sensitivity(experiments: Experiments) -> dict[str, float]:
    """Gains over DFS in percent, by case: on Trace 2, and the mean of four where a row says so."""
    count = min(SENSITIVITY_REQUESTS, experiments.request_count)
    values: dict[str, float] = {}
    for label, changes in _cases(experiments, count):
        base = experiments.run(TRACES[1], OfflinePolicy.DFS, request_count=count, **changes)
        for name in (OfflinePolicy.PAPER, OfflinePolicy.FORESIGHT):
            run = experiments.run(TRACES[1], name, request_count=count, **changes)
            values[f"{name}, {label}"] = gain(run, base)
    return values | _dense_steps(experiments, count)


def _cases(experiments: Experiments, count: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Label and what it changes among the arguments of `Experiments.run`."""
    cost, plan = experiments.cost, experiments.plan
    yield f"Trace 2 with {count:,} requests, all else as above", {}
    for alpha in (0.2, 0.3, 0.5, 0.6):
        yield f"interference {alpha}", {"cost": cost._replace(interference=alpha)}
    for tokens in _DENSE_STEPS:
        label = f"dense steps from {tokens} tokens on"
        yield label, {"settings": replace(plan, dense_tokens=tokens)}
    plans: dict[str, dict[str, Any]] = {
        "all lengths known": {"all_known": True},
        "media lengths sampled too": {"media_known": False},
        "10 % of lengths sampled": {"sample_probability": 0.1},
        "half the memory": {"capacity_tokens": plan.capacity_tokens // 2},
    }
    for label, change in plans.items():
        yield label, {"settings": replace(plan, **change)}
    yield "5 ms of host time per step", {"cost": cost._replace(overhead_s=0.005)}
    floor_s = experiments.model.weight_bytes / experiments.gpu.hbm_bytes_per_s
    label = f"weights read every step (floor {floor_s * 1e3:.1f} ms, exponent 1.28)"
    yield label, {"cost": cost._replace(linear_floor_s=floor_s, linear_exponent=1.28)}


def _dense_steps(experiments: Experiments, count: int) -> dict[str, float]:
    """Mean gain of the published policy over the four traces, by its least dense batch."""
    values = {}
    for tokens in sorted((*_DENSE_STEPS, experiments.plan.dense_tokens)):
        settings = replace(experiments.plan, dense_tokens=tokens)
        gains = [
            gain(
                experiments.run(trace, OfflinePolicy.PAPER, request_count=count, settings=settings),
                experiments.run(trace, OfflinePolicy.DFS, request_count=count),
            )
            for trace in TRACES
        ]
        name = f"blendserve, mean of four traces, dense steps from {tokens} tokens on"
        values[name] = float(np.mean(gains))
    return values
