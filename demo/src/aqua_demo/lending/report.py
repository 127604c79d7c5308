"""The verdict: what was promised, what happened, and whether the one matches the other.

The demo succeeds only if every *claim* holds: the tokens and all logits equal those of an
uninterrupted run, pages really went out and in, memory really was taken back and really returned,
and the budget was kept. A claim that fails names its reason, and the demo exits with it.
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any, Final

from pydantic import Field

from aqua_demo.claims import Claim, ClaimsReport, judged, this_machine
from aqua_demo.lending.phases import TITLES, DemoPhase
from aqua_demo.lending.record import RunRecord
from aqua_demo.messages import ConsumerResult, ReclaimMeasure
from aqua_protocol import TransportKind, format_bytes
from aqua_protocol.wire import Wire

PACKAGES: Final = ("aqualib", "aqua-coordinator", "aqua-protocol", "torch", "transformers")

HOST_REMARK: Final = (
    "Without a GPU, borrowed and host memory are the same DRAM: tokens/s does not tell them apart."
)
GPU_REMARK: Final = "Borrowed memory is a GPU's, host memory is behind PCIe."


class PhaseReport(Wire):
    """One phase; times in seconds since the start."""

    name: str
    title: str
    since_s: float
    until_s: float | None
    tokens_per_s: float | None = None


class DemoReport(ClaimsReport):
    """The content of `demo-report.json`."""

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
    phases: list[PhaseReport]
    reference_tokens_per_s: float = Field(description="Uninterrupted, all on the own device.")
    checksum: bool
    remark: str = Field(description="How to read the token rates on this machine.")
    timeline: dict[str, list[int | float]] = Field(
        description="The series behind the plot, lists of equal length for each program."
    )

    @property
    def caption(self) -> str:
        """What ran, on what: the line under the plot."""
        build = f"torch {self.versions['torch']}"
        return f"{self.scale} size, {self.transport}, {build}; {self.machine}. {self.remark}"


def make_report(
    record: RunRecord,
    harvested: ConsumerResult,
    reference: ConsumerResult,
    *,
    kv_bytes: int,
    **settings: Any,  # noqa: ANN401 - of the report, which checks them
) -> DemoReport:
    """Judge a run that came to its end; `settings` are copied into the report."""
    consumer, producer = record.consumer[-1], record.producer[-1]
    link_bytes_per_s = harvested.link_bytes_per_s
    return DemoReport(
        tokens_identical=harvested.answers == reference.answers,
        logits_identical=harvested.logits_sha256 == reference.logits_sha256,
        tokens=harvested.tokens,
        requests=len(harvested.answers),
        paged_out_bytes=consumer.paged_out_bytes,
        paged_in_bytes=consumer.paged_in_bytes,
        spilled_bytes_peak=consumer.spilled_bytes_peak,
        returned_bytes=returned_bytes(record),
        reclaims=producer.reclaims,
        transport=harvested.transport,
        link_gb_per_s=None if link_bytes_per_s is None else link_bytes_per_s / 1e9,
        budget_bytes=harvested.budget_bytes,
        peak_resident_bytes=harvested.peak_resident_bytes,
        kv_bytes=kv_bytes,
        images=producer.images,
        claims=judge(record, harvested, reference, kv_bytes),
        phases=[
            PhaseReport(
                name=span.phase.value,
                title=TITLES[span.phase],
                since_s=round(span.since_s, 3),
                until_s=None if span.until_s is None else round(span.until_s, 3),
                tokens_per_s=record.mean_tokens_per_s(span),
            )
            for span in record.spans
        ],
        reference_tokens_per_s=reference.tokens_per_s,
        machine=this_machine(),
        remark=HOST_REMARK if harvested.transport == TransportKind.MEMFD else GPU_REMARK,
        versions={"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        timeline=_series(record),
        **settings,
    )


def judge(
    record: RunRecord, harvested: ConsumerResult, reference: ConsumerResult, kv_bytes: int
) -> list[Claim]:
    """The claims, in the order in which a reader asks."""
    last, reclaims = record.consumer[-1], record.producer[-1].reclaims
    returned = returned_bytes(record)
    peak, budget = harvested.peak_resident_bytes, harvested.budget_bytes
    return judged(
        (
            "tokens equal those of an uninterrupted run",
            harvested.answers == reference.answers and harvested.tokens > 0,
            _first_difference(harvested.answers, reference.answers),
        ),
        (
            "so do all logits, bit for bit",
            harvested.logits_sha256 == reference.logits_sha256,
            "their digests differ: some byte came back changed",
        ),
        (
            "keys and values exceeded the budget, and kept to it",
            peak <= budget < kv_bytes,
            f"peak {format_bytes(peak)}, budget {format_bytes(budget)}",
        ),
        (
            "layers were paged out and in",
            0 < last.paged_out_bytes < last.paged_in_bytes,
            f"{format_bytes(last.paged_out_bytes)} out, {format_bytes(last.paged_in_bytes)} in",
        ),
        (
            "memory was taken back mid-generation",
            bool(reclaims) and last.spilled_bytes_peak > 0,
            f"{len(reclaims)} reclaims, {format_bytes(last.spilled_bytes_peak)} spilled",
        ),
        (
            "and was lent again",
            returned > 0 and _lived_on_peer_again(record),
            f"{format_bytes(returned)} returned to borrowed memory",
        ),
        (
            "the image service served all the while",
            record.producer[-1].images > 0,
            "no image finished",
        ),
    )


def _first_difference(ours: list[list[int]], theirs: list[list[int]]) -> str:
    for number, (answer, other) in enumerate(zip(ours, theirs, strict=False)):
        for index, (one, another) in enumerate(zip(answer, other, strict=False)):
            if one != another:
                return f"token {index} of answer {number} is {one}, and was {another} uninterrupted"
    lengths = [[len(answer) for answer in answers] for answers in (ours, theirs)]
    return f"the answers have {lengths[0]} tokens, and had {lengths[1]} uninterrupted"


def returned_bytes(record: RunRecord) -> int:
    """What went from host memory back to borrowed memory after the burst had begun."""
    return record.consumer[-1].returned_bytes - _returned_before_burst(record)


def _lived_on_peer_again(record: RunRecord) -> bool:
    """Whether pages were in borrowed memory after some had returned.

    Not whether they still were at the end: the image service may have taken its memory back once
    more, as it may at any time.
    """
    already = _returned_before_burst(record)
    return any(s.peer_bytes > 0 for s in record.consumer if s.returned_bytes > already)


def _returned_before_burst(record: RunRecord) -> int:
    began_s = next((s.since_s for s in record.spans if s.phase is DemoPhase.BURST), 0.0)
    before = [s for s in record.consumer if s.at_s - record.started_s <= began_s]
    return before[-1].returned_bytes if before else 0


def _series(record: RunRecord) -> dict[str, list[int | float]]:
    """Columns of the samples, times in seconds since the start."""
    series = {}
    for prefix, samples, names in (
        ("", record.consumer, "tokens device_bytes peer_bytes host_bytes"),
        ("producer_", record.producer, "queue_length images offered_bytes leased_bytes"),
    ):
        series[f"{prefix}at_s"] = [round(s.at_s - record.started_s, 3) for s in samples]
        series |= {f"{prefix}{name}": [getattr(s, name) for s in samples] for name in names.split()}
    return series
