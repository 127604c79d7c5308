"""The verdict: what was promised, what happened, and whether the one matches the other.

The demo succeeds only if every *claim* holds: the tokens and all logits equal those of an
uninterrupted run, pages really went out and in, memory really was taken back and really returned,
and the budget was kept. A claim that fails names its reason, and the demo exits with it.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from aqua_demo.machine import describe_machine
from aqua_demo.messages import ConsumerResult, ConsumerSample, ProducerSample, ReclaimMeasure
from aqua_demo.phases import GENERATING, TITLES, Phase
from aqua_demo.timeline import Timeline
from aqua_protocol import TransportKind, format_bytes

PACKAGES: Final = ("aqualib", "aqua-coordinator", "aqua-protocol", "torch", "transformers")

HOST_REMARK: Final = (
    "Without a GPU, borrowed and host memory are the same DRAM: tokens/s does not tell them apart."
)
GPU_REMARK: Final = "Borrowed memory is a GPU's, host memory is behind PCIe."


class PhaseReport(BaseModel):
    """One phase; times in seconds since the start."""

    model_config = ConfigDict(extra="forbid")

    name: str
    title: str
    since_s: float
    until_s: float | None
    tokens_per_s: float | None = None


class Claim(BaseModel):
    """Something the demo shows, and whether it did."""

    model_config = ConfigDict(extra="forbid")

    text: str
    holds: bool
    reason: str = Field(default="", description="Why not, with figures.")


class TimelineReport(BaseModel):
    """The series behind the plot, as lists of equal length."""

    model_config = ConfigDict(extra="forbid")

    at_s: list[float]
    tokens: list[int]
    device_bytes: list[int]
    peer_bytes: list[int]
    host_bytes: list[int]
    producer_at_s: list[float]
    producer_queue_length: list[int]
    producer_images: list[int]
    producer_offered_bytes: list[int]
    producer_leased_bytes: list[int]


class DemoReport(BaseModel):
    """`demo-report.json`."""

    model_config = ConfigDict(extra="forbid")

    tokens_identical: bool
    logits_identical: bool
    tokens: int = Field(description="New tokens generated, and compared.")
    requests: int = Field(description="Answers that they make up.")
    prompt_tokens: int
    paged_out_bytes: int = Field(description="From the model's device to the store.")
    paged_in_bytes: int = Field(description="From the store to the model's device.")
    spilled_bytes_peak: int = Field(description="Most bytes that were in host memory at once.")
    returned_bytes: int = Field(
        description="From host memory back to borrowed memory, since the burst began."
    )
    reclaims: list[ReclaimMeasure]
    transport: str
    link_gb_per_s: float | None = Field(description="Measured at connect; 10^9 bytes a second.")
    budget_bytes: int
    peak_resident_bytes: int
    kv_bytes: int = Field(description="Keys and values at the end of an answer.")
    images: int
    claims: list[Claim]
    phases: list[PhaseReport]
    reference_tokens_per_s: float = Field(description="Uninterrupted, all on the own device.")
    seed: int
    checksum: bool
    scale: str
    machine: str
    remark: str = Field(description="How to read the token rates on this machine.")
    versions: dict[str, str]
    timeline: TimelineReport

    @property
    def succeeded(self) -> bool:
        """Whether every claim holds."""
        return all(claim.holds for claim in self.claims)


@dataclass(frozen=True, slots=True)
class Run:
    """All that a finished run has left behind.

    Attributes:
        kv_bytes: Keys and values at the end of an answer.
        settings: Copied into the report: scale, seed, checksum, prompt_tokens.
    """

    timeline: Timeline
    harvested: ConsumerResult
    reference: ConsumerResult
    kv_bytes: int
    settings: dict[str, Any]


def make_report(run: Run) -> DemoReport:
    """Judge a run that came to its end."""
    timeline, harvested, reference = run.timeline, run.harvested, run.reference
    consumer, producer = timeline.consumer[-1], timeline.producer[-1]
    return DemoReport(
        tokens_identical=harvested.answers == reference.answers,
        logits_identical=harvested.logits_sha256 == reference.logits_sha256,
        tokens=harvested.tokens,
        requests=len(harvested.answers),
        paged_out_bytes=consumer.paged_out_bytes,
        paged_in_bytes=consumer.paged_in_bytes,
        spilled_bytes_peak=consumer.spilled_bytes_peak,
        returned_bytes=returned_bytes(timeline),
        reclaims=producer.reclaims,
        transport=harvested.transport,
        link_gb_per_s=(
            None if harvested.link_bytes_per_s is None else harvested.link_bytes_per_s / 1e9
        ),
        budget_bytes=harvested.budget_bytes,
        peak_resident_bytes=harvested.peak_resident_bytes,
        kv_bytes=run.kv_bytes,
        images=producer.images,
        claims=judge(harvested, reference, consumer, producer, run),
        phases=[
            PhaseReport(
                name=span.phase.value,
                title=TITLES[span.phase],
                since_s=round(span.since_s, 3),
                until_s=None if span.until_s is None else round(span.until_s, 3),
                tokens_per_s=(
                    timeline.mean_tokens_per_s(span.phase) if span.phase in GENERATING else None
                ),
            )
            for span in timeline.spans
        ],
        reference_tokens_per_s=reference.tokens_per_s,
        machine=describe_machine(),
        remark=HOST_REMARK if harvested.transport == TransportKind.MEMFD else GPU_REMARK,
        versions={"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        timeline=_series(timeline),
        **run.settings,
    )


def judge(
    harvested: ConsumerResult,
    reference: ConsumerResult,
    consumer: ConsumerSample,
    producer: ProducerSample,
    run: Run,
) -> list[Claim]:
    """The claims, in the order in which a reader asks."""
    return [
        _claim(
            "tokens equal those of an uninterrupted run",
            harvested.answers == reference.answers and harvested.tokens > 0,
            _first_difference(harvested.answers, reference.answers),
        ),
        _claim(
            "so do all logits, bit for bit",
            harvested.logits_sha256 == reference.logits_sha256,
            "their digests differ: some byte came back changed",
        ),
        _claim(
            "keys and values exceeded the budget, and kept to it",
            harvested.peak_resident_bytes <= harvested.budget_bytes < run.kv_bytes,
            f"peak {format_bytes(harvested.peak_resident_bytes)}, budget"
            f" {format_bytes(harvested.budget_bytes)}",
        ),
        _claim(
            "layers were paged out and in",
            consumer.paged_out_bytes > 0 and consumer.paged_in_bytes > consumer.paged_out_bytes,
            f"{format_bytes(consumer.paged_out_bytes)} out,"
            f" {format_bytes(consumer.paged_in_bytes)} in",
        ),
        _claim(
            "memory was taken back mid-generation",
            bool(producer.reclaims) and consumer.spilled_bytes_peak > 0,
            f"{len(producer.reclaims)} reclaims,"
            f" {format_bytes(consumer.spilled_bytes_peak)} spilled",
        ),
        _claim(
            "and was lent again",
            returned_bytes(run.timeline) > 0 and consumer.peer_bytes > 0,
            f"{format_bytes(returned_bytes(run.timeline))} returned to borrowed memory",
        ),
        _claim("the image service served all the while", producer.images > 0, "no image finished"),
    ]


def _claim(text: str, holds: bool, reason: str) -> Claim:  # noqa: FBT001 - the second of three columns
    return Claim(text=text, holds=holds, reason="" if holds else reason)


def _first_difference(ours: list[list[int]], theirs: list[list[int]]) -> str:
    for number, (answer, other) in enumerate(zip(ours, theirs, strict=False)):
        for index, (one, another) in enumerate(zip(answer, other, strict=False)):
            if one != another:
                return f"token {index} of answer {number} is {one}, and was {another} uninterrupted"
    lengths = [[len(answer) for answer in answers] for answers in (ours, theirs)]
    return f"the answers have {lengths[0]} tokens, and had {lengths[1]} uninterrupted"


def returned_bytes(timeline: Timeline) -> int:
    """What went from host memory back to borrowed memory after the burst had begun."""
    began_s = next((s.since_s for s in timeline.spans if s.phase is Phase.BURST), 0.0)
    before = [s for s in timeline.consumer if s.at_s - timeline.started_s <= began_s]
    already = before[-1].returned_bytes if before else 0
    return timeline.consumer[-1].returned_bytes - already


def _series(timeline: Timeline) -> TimelineReport:
    start_s = timeline.started_s
    consumer, producer = timeline.consumer, timeline.producer
    return TimelineReport(
        at_s=[round(sample.at_s - start_s, 3) for sample in consumer],
        tokens=[sample.tokens for sample in consumer],
        device_bytes=[sample.device_bytes for sample in consumer],
        peer_bytes=[sample.peer_bytes for sample in consumer],
        host_bytes=[sample.host_bytes for sample in consumer],
        producer_at_s=[round(sample.at_s - start_s, 3) for sample in producer],
        producer_queue_length=[sample.queue_length for sample in producer],
        producer_images=[sample.images for sample in producer],
        producer_offered_bytes=[sample.offered_bytes for sample in producer],
        producer_leased_bytes=[sample.leased_bytes for sample in producer],
    )
