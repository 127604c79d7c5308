"""What the co-serving demo promises, what happened, and whether the one matches the other.

Claims are on answers, and that offline work went on and gave way; figures are beside a control.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from aqua_demo.claims import Claim, judged
from aqua_demo.engines.race import (
    Run,
    busy_share,
    differing,
    offline_rate,
    offline_tokens,
)
from aqua_demo.engines.report import EngineDemoReport, OnlineFigures, gave_way, online_figures


class CoServingFigures(OnlineFigures):
    """How fast it was."""

    online_busy_share: float = Field(description="Of the time, with an online request under way.")
    offline_tokens: int = Field(description="Prompts and answers, beside the online requests.")
    offline_ideal_tokens: float = Field(description="What an ideal filler of the gaps computes.")
    offline_share_of_ideal: float | None = Field(description="None where there are no gaps.")


class CoServingReport(EngineDemoReport):
    """The content of `demo-report.json`."""

    figures: CoServingFigures
    compared_answers: int = Field(description="Answers with one of stock vLLM beside them.")


def make_report(
    runs: Mapping[str, Run],
    stock: Mapping[str, Run],
    **settings: Any,  # noqa: ANN401 - of the report, which checks them
) -> CoServingReport:
    """Judge a run that came to its end.

    Args:
        runs: Of the four engines.
        stock: Stock vLLM's answers to offline requests, by name.
        settings: Copied into the report.
    """
    ours = runs["ours"]
    return CoServingReport(
        claims=judge(runs, stock),
        figures=figures_of(runs),
        online_requests=len(ours["online"]),
        offline_requests=len(ours["offline"]),
        compared_answers=len(ours["online"]) + sum(r["name"] in stock for r in ours["offline"]),
        **settings,
    )


def figures_of(runs: Mapping[str, Run]) -> CoServingFigures:
    """The figures of the runs of `online`, `control`, `ours` and `offline`."""
    alone = [runs["online"], runs["control"]]
    ours = runs["ours"]
    busy = statistics.fmean(map(busy_share, alone))
    # Of the same length as the run that it is compared with.
    ideal = (1 - busy) * offline_rate(runs["offline"]) * ours["seconds"]
    tokens = offline_tokens(ours)
    return CoServingFigures(
        **online_figures(alone, ours, ours["counted"]),
        online_busy_share=busy,
        offline_tokens=tokens,
        offline_ideal_tokens=ideal,
        offline_share_of_ideal=tokens / ideal if ideal else None,
    )


def judge(runs: Mapping[str, Run], stock: Mapping[str, Run]) -> list[Claim]:
    """The claims, in the order in which a reader asks."""
    ours, online = runs["ours"], runs["online"]["online"]
    names = [row["name"] for row in ours["offline"]]
    beside = [stock[name] for name in names if name in stock]
    uncompared = len(names) - len(beside)
    differ = (
        differing(ours["online"], online),
        differing([row for row in ours["offline"] if row["name"] in stock], beside),
    )
    short = [row for row in (*ours["online"], *ours["offline"]) if not _is_whole(row)]
    again = len(names) - len(set(names))
    return judged(
        (
            "every request was answered once and in full",
            bool(ours["online"]) and not short and not again,
            f"{len(short)} answers are short, {again} came twice",
        ),
        (
            "every answer equals stock vLLM's",
            not uncompared and not any(differ),
            f"{differ[0]} online and {differ[1]} offline ones differ, {uncompared} not compared",
        ),
        (
            "offline work went on beside online requests",
            offline_tokens(ours) > 0,
            f"none of {len(names)} offline requests had a token before the last online one ended",
        ),
        *gave_way(ours["counted"]),
    )


def _is_whole(row: Run) -> bool:
    return len(row["tokens"]) == int(row["output_tokens"])
