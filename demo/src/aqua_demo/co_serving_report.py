"""What the co-serving demo promises, what happened, and whether the one matches the other.

Claims are on answers, and that offline work went on and gave way; figures are beside a control.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Final

from pydantic import Field

from aqua_demo.co_serving_race import (
    Run,
    busy_share,
    differing,
    offline_rate,
    offline_tokens,
    p99_tpot,
    p99_ttft,
)
from aqua_demo.engine_report import EngineDemoReport, judged, surroundings
from aqua_demo.report import Claim
from aqua_protocol.wire import Wire

PREEMPTIONS: Final = "aqua:offline_preemptions_total"
VICTIMS: Final = "aqua:online_preempted_before_offline_total"


class CoServingFigures(Wire):
    """How fast it was; ratios are to the mean of both engines with online requests alone."""

    ttft_p99_ratio: float
    tpot_p99_ratio: float
    control_ttft_p99_ratio: float = Field(description="Of an equal engine: the noise.")
    control_tpot_p99_ratio: float
    online_ttft_p99_s: float = Field(description="Without offline work, seconds.")
    online_tpot_p99_s: float
    online_busy_share: float = Field(description="Of the time, with an online request under way.")
    offline_tokens: int = Field(description="Prompts and answers, beside the online requests.")
    offline_ideal_tokens: float = Field(description="What an ideal filler of the gaps computes.")
    offline_share_of_ideal: float | None = Field(description="None where there are no gaps.")
    offline_preemptions: int = Field(description="Offline requests that gave their memory up.")


class CoServingReport(EngineDemoReport):
    """The content of `demo-report.json`."""

    figures: CoServingFigures
    online_requests: int
    offline_requests: int = Field(description="Begun, and answered.")
    compared_answers: int = Field(description="Answers with one of stock vLLM beside them.")


def make_report(
    runs: Mapping[str, Run],
    stock: Mapping[str, Run],
    *,
    objectives: dict[str, float],
    scale: str,
    seed: int,
    took_s: float,
) -> CoServingReport:
    """Judge a run that came to its end.

    Args:
        runs: Of the four engines.
        stock: Stock vLLM's answers to offline requests, by name.
        objectives: As they were measured, seconds.
        scale: Its name.
        seed: Of all that is random.
        took_s: The whole demo, seconds.
    """
    ours = runs["ours"]
    return CoServingReport(
        claims=judge(runs, stock),
        figures=figures_of(runs),
        online_requests=len(ours["online"]),
        offline_requests=len(ours["offline"]),
        compared_answers=len(ours["online"]) + sum(r["name"] in stock for r in ours["offline"]),
        objectives=objectives,
        scale=scale,
        seed=seed,
        took_s=took_s,
        **surroundings(),
    )


def figures_of(runs: Mapping[str, Run]) -> CoServingFigures:
    """The figures of the runs of `online`, `control`, `ours` and `offline`."""
    alone = [runs["online"], runs["control"]]
    ours, control = runs["ours"], runs["control"]
    ttft_s = statistics.fmean(map(p99_ttft, alone))
    tpot_s = statistics.fmean(map(p99_tpot, alone))
    busy = statistics.fmean(map(busy_share, alone))
    # Of the same length as the run that it is compared with.
    ideal = (1 - busy) * offline_rate(runs["offline"]) * ours["seconds"]
    tokens = offline_tokens(ours)
    return CoServingFigures(
        ttft_p99_ratio=p99_ttft(ours) / ttft_s,
        tpot_p99_ratio=p99_tpot(ours) / tpot_s,
        control_ttft_p99_ratio=p99_ttft(control) / ttft_s,
        control_tpot_p99_ratio=p99_tpot(control) / tpot_s,
        online_ttft_p99_s=ttft_s,
        online_tpot_p99_s=tpot_s,
        online_busy_share=busy,
        offline_tokens=tokens,
        offline_ideal_tokens=ideal,
        offline_share_of_ideal=tokens / ideal if ideal else None,
        offline_preemptions=int(ours["counted"].get(PREEMPTIONS, 0)),
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
    victims = int(ours["counted"].get(VICTIMS, 0))
    preemptions = int(ours["counted"].get(PREEMPTIONS, 0))
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
        (
            "offline requests gave their memory up for online ones, and went on",
            preemptions > 0,
            "none did: memory was never wanted",
        ),
        (
            "no online request lost memory while an offline one held some",
            victims == 0,
            f"{victims} did",
        ),
    )


def _is_whole(row: Run) -> bool:
    return len(row["tokens"]) == int(row["output_tokens"])
