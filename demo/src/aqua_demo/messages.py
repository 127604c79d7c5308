"""What the demo's processes tell each other: one JSON object a line, on pipes.

Children report *samples* (their full state, ten times a second), *news* (one line for people) and
one *result*; the parent sends what it wants of them. A pipe that ends means that the other side is
gone. Times are CLOCK_MONOTONIC in seconds, which all processes of one machine share.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, TypeAdapter

from aqua_demo.scale import DemoScale
from aqua_protocol import ErrorBody, TransportKind, format_bytes
from aqua_protocol.wire import Wire

PRODUCER_ID: Final = "image-service"
CONSUMER_ID: Final = "llm"

SAMPLE_INTERVAL_S: Final = 0.1
"""Seconds between samples: ten a second draw a smooth plot. Doubled, the plot shows steps."""


class ProgramSettings(Wire):
    """What both programs need to know."""

    scale: DemoScale
    seed: int
    transport: TransportKind | None
    device: str | None
    threads: int


class ProducerSettings(ProgramSettings):
    """What the producer program needs to know."""

    coordinator_url: str
    token: str | None = Field(None, repr=False)
    socket: Path


class ConsumerSettings(ProgramSettings):
    """What the consumer needs to know; the reference has lengths instead of a coordinator."""

    answer_lengths: list[int] | None = None
    coordinator_url: str | None = None
    token: str | None = Field(None, repr=False)
    checksum: bool = False


class ReclaimMeasure(Wire):
    """A finished reclaim, as the producer measured it."""

    bytes: int
    first_slab_ms: float
    total_ms: float

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.bytes)} in {self.total_ms:.0f} ms, the first slab after"
            f" {self.first_slab_ms:.1f} ms"
        )


class ProducerSample(Wire):
    """State of the image service and of its offer."""

    type: Literal["producer"] = "producer"
    at_s: float
    arrivals_per_s: float = Field(default=0.0, description="Mean rate at which requests arrive.")
    queue_length: int = Field(default=0, description="Requests that wait.")
    batch: int = Field(default=0, description="Images being denoised.")
    images: int = Field(default=0, description="Images finished so far.")
    memory_total_bytes: int = 0
    memory_used_bytes: int = Field(default=0, description="By the service itself.")
    offered_bytes: int = 0
    leased_bytes: int = 0
    reclaims: list[ReclaimMeasure] = Field(default_factory=list)


class ConsumerSample(Wire):
    """State of the generation and of the cache."""

    type: Literal["consumer"] = "consumer"
    at_s: float
    tokens: int = Field(default=0, description="New tokens so far, of all requests.")
    device_bytes: int = Field(default=0, description="Keys and values on the own device.")
    peer_bytes: int = 0
    host_bytes: int = 0
    paged_out_bytes: int = 0
    paged_in_bytes: int = 0
    spilled_bytes_peak: int = 0
    returned_bytes: int = Field(
        default=0, description="Moved from host memory back to a peer so far."
    )


class LogLine(Wire):
    """One line for people."""

    type: Literal["news"] = "news"
    text: str


class ConsumerResult(Wire):
    """What came out of a generation, interrupted or not."""

    type: Literal["result"] = "result"
    answers: list[list[int]] = Field(description="New tokens, request by request.")
    logits_sha256: str = Field(description="Over the logits of every new token, bit by bit.")
    prefill_s: float = Field(description="Until the first new token.")
    decode_s: float = Field(description="For all others.")
    peak_resident_bytes: int = 0
    budget_bytes: int = 0
    transport: str = ""
    link_bytes_per_s: float | None = None

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return sum(map(len, self.answers))

    @property
    def tokens_per_s(self) -> float:
        """New tokens a second, without the prefill."""
        return max(0, self.tokens - 1) / max(self.decode_s, 1e-9)


class Failure(Wire):
    """The child gives up."""

    type: Literal["failure"] = "failure"
    error: ErrorBody


class Command(Wire):
    """All that the parent wants from now on; what it does not say is as at the start."""

    load_factor: float = Field(default=1.0, description="Of the usual number of requests.")
    corrupt_one_byte: bool = Field(
        default=False, description="Flip one bit of what the cache has stored (negative control)."
    )
    finish: bool = Field(default=False, description="Come to an end and report the result.")


Report = Annotated[
    ProducerSample | ConsumerSample | LogLine | ConsumerResult | Failure,
    Field(discriminator="type"),
]
REPORTS: Final[TypeAdapter[Report]] = TypeAdapter(Report)
"""Parses what the parent receives."""
