"""The plan report: what the order promises, as JSON for programs and as a picture for people."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from aqua_batch.forecast import Forecast
from aqua_batch.target import PlanTarget
from aqua_batch.tokenization import TokenizedBatch
from aqua_batch.tokens import Tokenizer
from aqua_cli.figures import figure
from aqua_schedulers.blendserve import PreparedPool


def plan_report(
    tokenized: TokenizedBatch,
    prepared: PreparedPool,
    course: Forecast,
    target: PlanTarget,
    tokenizer: Tokenizer,
    policy: str,
) -> dict[str, Any]:
    """Densities, sharing, predicted time."""
    tree, resources = prepared.tree, prepared.resources
    prompt = int(tree.prompt_tokens.sum())
    density = prepared.cost.density(tree.prompt_tokens, prepared.lengths.mean)
    density = density[tokenized.first_rows()]  # of lines, not of the answers that each wants
    saved = prompt - course.computed_prompt_tokens
    best = prompt - tree.distinct_tokens
    return {
        "policy": policy,
        "tokenizer": {"name": tokenizer.name, "exact": tokenizer.exact},
        "target": {
            "gpu": target.gpu.name,
            "model": target.model.name,
            "kv_capacity_tokens": target.capacity_tokens,
        },
        "requests": len(tokenized.entries),
        "rejected_lines": len(tokenized.rejections),
        "prompt_tokens": prompt,
        "expected_output_tokens": round(float(prepared.lengths.mean.sum())),
        "requests_of_known_length": int(prepared.lengths.exact.sum()),
        "density": {
            "pool": resources.root_density,
            "requests_p10_p50_p90": np.quantile(density, [0.1, 0.5, 0.9]).tolist(),
            "compute_bound_requests": int((density > 1.0).sum()),
            "units": len(prepared.order.unit_density),
        },
        "sharing": {
            "saved_prompt_share": saved / prompt,
            "optimal_prompt_share": best / prompt,
            "of_optimal": saved / best if best else 1.0,
        },
        "time": {
            "predicted_s": course.makespan_s,
            "optimal_s": course.optimal_s,
            "share_of_optimal": course.optimal_s / course.makespan_s,
            "steps": course.step_count,
            "note": "from data-sheet rates and estimated lengths; ratios mean more than seconds",
        },
    }


def draw_usage(course: Forecast, path: Path) -> None:
    """Compute and memory time per step over the run, as in BlendServe's Figure 8."""
    with figure(path, width=9, height=3.5) as drawing:
        axes = drawing.subplots()
        steps = np.arange(len(course.compute_s)) * course.steps_per_row
        axes.plot(steps, course.compute_s * 1e3, label="compute-bound operators")
        axes.plot(steps, course.memory_s * 1e3, label="memory-bound operators")
        axes.set_xlabel("engine step")
        axes.set_ylabel("time per step in ms")
        axes.set_title(
            f"predicted: {course.makespan_s:,.0f} s, "
            f"{course.optimal_s / course.makespan_s:.1%} of the optimum's rate"
        )
        axes.legend()
