"""What the constants that BlendServe's paper does not give do to its gains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from aqua_simulator.offline.policies import OfflinePolicy, PlanSettings
from aqua_simulator.papers.blendserve import TRACES, Experiments, gain
from aqua_simulator.papers.report import Row

SENSITIVITY_REQUESTS: Final = 50_000
"""Requests of a trial, an eighth of the paper's; the first row of the table shows what that moves.
Doubled, the table takes twice as long."""

_DENSE_STEPS: Final = (128, 256, 320, 448, 512)
"""Least dense batches tried beside the chosen one."""


def sensitivity(experiments: Experiments) -> list[Row]:
    """What the constants that the paper does not give do to the gain on Trace 2."""
    trace, count = TRACES[1], min(SENSITIVITY_REQUESTS, experiments.request_count)
    plan = PlanSettings(experiments.capacity_tokens, seed=experiments.seed)
    cost = experiments.cost

    def of(label: str, **changes: Any) -> list[Row]:  # noqa: ANN401 - arguments of `run`
        base = experiments.run(trace, OfflinePolicy.DFS, request_count=count, **changes)
        return [
            Row(
                f"{name.value}, {label}",
                gain(experiments.run(trace, name, request_count=count, **changes), base),
                unit="% over DFS",
            )
            for name in (OfflinePolicy.PAPER, OfflinePolicy.FORESIGHT)
        ]

    rows = of(f"Trace 2 with {count:,} requests, all else as above")
    for alpha in (0.2, 0.3, 0.5, 0.6):
        rows += of(f"interference {alpha}", cost=cost._replace(interference=alpha))
    for tokens in _DENSE_STEPS:
        rows += of(
            f"dense steps from {tokens} tokens on", settings=replace(plan, dense_tokens=tokens)
        )
    rows += _dense_steps(experiments, plan, count)
    rows += of("all lengths known", settings=replace(plan, all_known=True))
    rows += of("media lengths sampled too", settings=replace(plan, media_known=False))
    rows += of("10 % of lengths sampled", settings=replace(plan, sample_probability=0.1))
    rows += of("half the memory", settings=replace(plan, capacity_tokens=plan.capacity_tokens // 2))
    rows += of("5 ms of host time per step", cost=cost._replace(overhead_s=0.005))
    floor_s = experiments.model.weight_bytes / experiments.gpu.hbm_bytes_per_s
    rows += of(
        f"weights read every step (floor {floor_s * 1e3:.1f} ms, exponent 1.28)",
        cost=cost._replace(linear_floor_s=floor_s, linear_exponent=1.28),
    )
    return rows


def _dense_steps(experiments: Experiments, plan: PlanSettings, count: int) -> list[Row]:
    """Mean gain of the published policy over the four traces, by its least dense batch."""
    rows = []
    for tokens in sorted((*_DENSE_STEPS, plan.dense_tokens)):
        settings = replace(plan, dense_tokens=tokens)
        gains = [
            gain(
                experiments.run(trace, OfflinePolicy.PAPER, request_count=count, settings=settings),
                experiments.run(trace, OfflinePolicy.DFS, request_count=count),
            )
            for trace in TRACES
        ]
        rows.append(
            Row(
                f"blendserve, mean of four traces, dense steps from {tokens} tokens on",
                float(np.mean(gains)),
                unit="% over DFS",
            )
        )
    return rows
