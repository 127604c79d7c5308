"""What the batch demo promises, what happened, and whether the one matches the other.

Claims are on answers and on who died, gave way and finished. Figures of speed compare three runs of
one file, of which each differs from the one before in one thing (`batch`), and are of this machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic import Field

from aqua_demo.claims import Claim, judged
from aqua_demo.engines.race import Run, differing
from aqua_demo.engines.report import EngineDemoReport, OnlineFigures, gave_way, online_figures
from aqua_demo.messages import ReclaimMeasure
from aqua_protocol import format_bytes

DRAINED: Final = "aqua:kv_drained_bytes_total"
PAGED_OUT: Final = "aqua:kv_paged_out_bytes_total"
OUTSIDE: Final = "aqua:offline_requests_waiting"


@dataclass(slots=True)
class BatchEvents:
    """What was done to the third run, and what it met.

    Attributes:
        burst_s: When images were asked for, more than usual; seconds, None if they were not.
        reclaims: What the producer took back from then on, while the batch ran.
        reclaimed_s: When the first of these had ended.
        dispatcher_s: When a dispatcher was killed.
        dispatcher_held: Requests that it had at engines then.
        engine_s: When an engine was killed.
        engine_held: Requests that it computed then.
        counted: Of the engine that co-serves, over this run.
    """

    burst_s: float | None = None
    reclaims: list[ReclaimMeasure] = field(default_factory=list)
    reclaimed_s: float | None = None
    dispatcher_s: float | None = None
    dispatcher_held: int = 0
    engine_s: float | None = None
    engine_held: int = 0
    counted: dict[str, float] = field(default_factory=dict)

    def count(self, name: str) -> int:
        """One of the counters; 0 if nothing of it was counted."""
        return int(self.counted.get(name, 0))

    @property
    def first_kill_s(self) -> float:
        """When something died first, seconds; infinite if nothing did."""
        died_s = (self.dispatcher_s, self.engine_s)
        return min((at_s for at_s in died_s if at_s is not None), default=float("inf"))


class BatchFigures(OnlineFigures):
    """How fast it was."""

    file_order_s: float = Field(description="The batch on the engine for it, in file order.")
    ordered_s: float = Field(description="The same in BlendServe's order.")
    order_gain: float | None = Field(description="The one over the other.")
    co_serving_s: float = Field(description="On both engines, with all deaths.")
    undisturbed_answers: int = Field(description="Of these, before anything died.")
    co_serving_gain: float | None = Field(
        description="Time for so many on the engine for it alone, over that on both."
    )
    reclaims: list[ReclaimMeasure]
    drained_bytes: int = Field(description="Keys and values moved away for these.")
    paged_out_bytes: int
    dispatcher_held: int = Field(description="Requests under way that a dispatcher died over.")
    engine_held: int = Field(description="Requests that an engine died over.")


class BatchReport(EngineDemoReport):
    """The content of `demo-report.json`."""

    figures: BatchFigures


def make_report(
    runs: Mapping[str, Run],
    done: BatchEvents,
    names: list[str],
    **settings: Any,  # noqa: ANN401 - of the report, which checks them
) -> BatchReport:
    """Judge a run that came to its end.

    Args:
        runs: `stock`, `ordered` and `ours`.
        done: What happened to the last.
        names: Of all offline requests.
        settings: Copied into the report.
    """
    return BatchReport(
        claims=judge(runs, done, names),
        figures=figures_of(runs, done),
        online_requests=len(runs["ours"]["online"]),
        offline_requests=len(names),
        **settings,
    )


def figures_of(runs: Mapping[str, Run], done: BatchEvents) -> BatchFigures:
    """The figures of the three runs."""
    stock, ordered, ours = (runs[name] for name in ("stock", "ordered", "ours"))
    undisturbed = max(count for at_s, count in ours["progress"] if at_s <= done.first_kill_s)
    took_s = {name: seconds_to(run, run["progress"][-1][1]) for name, run in runs.items()}
    return BatchFigures(
        **online_figures([stock, ordered], ours, done.counted),
        file_order_s=took_s["stock"],
        ordered_s=took_s["ordered"],
        order_gain=_ratio(took_s["stock"], took_s["ordered"]),
        co_serving_s=took_s["ours"],
        undisturbed_answers=undisturbed,
        co_serving_gain=_ratio(seconds_to(ordered, undisturbed), seconds_to(ours, undisturbed)),
        reclaims=done.reclaims,
        drained_bytes=done.count(DRAINED),
        paged_out_bytes=done.count(PAGED_OUT),
        dispatcher_held=done.dispatcher_held,
        engine_held=done.engine_held,
    )


def seconds_to(run: Run, count: int) -> float:
    """When so many requests of a batch had been answered; its end if they never were."""
    progress = run["progress"]
    return float(next((at_s for at_s, done in progress if done >= count), progress[-1][0]))


def _ratio(one: float, other: float) -> float | None:
    return one / other if other else None


def judge(runs: Mapping[str, Run], done: BatchEvents, names: list[str]) -> list[Claim]:
    """The claims, in the order in which a reader asks."""
    ours, stock = runs["ours"], runs["stock"]
    answers = Counter(row["name"] for row in ours["offline"])
    missing = [name for name in names if not answers[name]]
    again = [name for name, count in answers.items() if count > 1]
    expected = {row["name"]: row["tokens"] for row in stock["offline"]}
    differ = [r["name"] for r in ours["offline"] if r["tokens"] != expected.get(r["name"])]
    online = differing(ours["online"], stock["online"])
    short = sum(len(row["tokens"]) != row["output_tokens"] for row in ours["online"])
    taken = sum(measure.bytes for measure in done.reclaims)
    return judged(
        (
            "each offline request was answered once, whatever died",
            bool(names) and not missing and not again and not ours["errors"],
            f"{len(missing)} are missing, {len(again)} came twice, {len(ours['errors'])} failed",
        ),
        (
            "each of these answers equals stock vLLM's",
            not differ and bool(expected),
            f"{len(differ)} of {len(ours['offline'])} differ, {differ[:1]} first",
        ),
        (
            "each online answer equals the one without offline work beside",
            not online and not short and len(ours["online"]) == len(stock["online"]),
            f"{online} differ, {short} are short",
        ),
        (
            "the producer took its memory back amid the batch, and what lay there moved",
            taken > 0 and done.count(DRAINED) > 0,
            f"{format_bytes(taken)} taken back, {format_bytes(done.count(DRAINED))} moved",
        ),
        (
            "a dispatcher was killed amid its requests, and another one went on",
            done.dispatcher_held > 0 and ours["status"] == "completed",
            f"it had {done.dispatcher_held} requests; the batch is {ours['status']}",
        ),
        (
            "an engine was killed amid its requests, and another one answered them",
            done.engine_held > 0 and ours["status"] == "completed",
            f"it had {done.engine_held} requests; the batch is {ours['status']}",
        ),
        *gave_way(done.counted),
    )
