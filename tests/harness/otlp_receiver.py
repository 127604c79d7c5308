"""A collector of traces: OTLP over HTTP on this machine, whose spans a test may look at.

It can also be what collectors are on bad days: `Mood` says how it answers.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from harness.bounds import HANG_S
from harness.scripted_server import Answer, Request, ScriptedServer


class Mood(StrEnum):
    """How a collector answers."""

    WELL = "well"
    REFUSING = "refusing"
    """With 503, which asks for a retry."""
    ABSENT = "absent"
    """Nobody listens there."""
    SILENT = "silent"
    """Never: it reads, and holds the connection until it is closed."""


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """One span, ids in hexadecimal."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    attributes: dict[str, str]
    is_error: bool


class OtlpReceiver:
    """Receives on a free port; a context manager that stops it.

    Attributes:
        url: For OTEL_EXPORTER_OTLP_ENDPOINT.
        request_count: Requests that came, answered or not.
    """

    def __init__(self, mood: Mood = Mood.WELL) -> None:
        self._spans: list[ReceivedSpan] = []
        self._came = threading.Condition()
        self._is_over = threading.Event()
        self.request_count = 0
        self._mood = mood
        self._server = ScriptedServer(self._answer)
        self.url: Final = self._server.url
        if mood is Mood.ABSENT:
            self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._server.close()

    @property
    def spans(self) -> list[ReceivedSpan]:
        """All that have come."""
        with self._came:
            return list(self._spans)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of a process that traces to this, promptly."""
        return {
            "AQUA_TRACING": "true",
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.url,
            "OTEL_BSP_SCHEDULE_DELAY": "20",
        }

    def await_span(self, name: str) -> ReceivedSpan:
        """The first span of this name, when it has come."""

        def found() -> ReceivedSpan | None:
            return next((span for span in self._spans if span.name == name), None)

        with self._came:
            assert self._came.wait_for(found, HANG_S), f"no {name} among {self._spans}"
            span = found()
        assert span is not None
        return span

    def await_request(self) -> None:
        """Wait until something was sent, answered or not."""
        with self._came:
            assert self._came.wait_for(lambda: self.request_count, HANG_S), "nothing was sent"

    def _answer(self, request: Request) -> Answer:
        assert request.path == "/v1/traces", request
        self._receive(request.content if self._mood is Mood.WELL else b"")
        if self._mood is Mood.SILENT:
            self._is_over.wait(HANG_S)
        return Answer(503 if self._mood is Mood.REFUSING else 200, b"")

    def _receive(self, body: bytes) -> None:
        told = ExportTraceServiceRequest.FromString(body)
        with self._came:
            self.request_count += 1
            for resource_spans in told.resource_spans:
                of_resource = {
                    pair.key: pair.value.string_value for pair in resource_spans.resource.attributes
                }
                self._spans += [
                    ReceivedSpan(
                        service=of_resource["service.name"],
                        name=span.name,
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        attributes={
                            pair.key: str(getattr(pair.value, pair.value.WhichOneof("value")))
                            for pair in span.attributes
                        },
                        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
                    )
                    for scope in resource_spans.scope_spans
                    for span in scope.spans
                ]
            self._came.notify_all()
