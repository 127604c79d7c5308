"""Traces by OpenTelemetry: spans, and the context that ties those of several processes together.

One lease is one trace: the page-out that asks for it, the coordinator's grant, the attach, what is
paged out into it, and each reclaim until the last slab is back. Members begin traces and the
coordinator continues them, as the producer does: by the header `traceparent` over HTTP, and by the
field of that name on the lease channel (W3C Trace Context).

Off unless asked for. Then `open_tracer` gives None, nothing of OpenTelemetry is imported, and what
would be traced costs a comparison. On, a span is a few tens of microseconds of Python, so spans are
for what happens to leases, and what is paged all the time is drawn as a sample.

Spans leave on a thread of their own, from a queue that drops what does not fit: a collector that is
slow, wrong or away costs spans and nothing else. A span has names, ids, sizes and codes; never what
a prompt or a page contains, nor a token.

Where to, and what part: the standard `OTEL_*` variables, which the SDK reads itself. Its provider
is this module's own, for that of the process belongs to the engine.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from aqua_protocol.errors import AquaError, ConfigError

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

    from aqua_protocol.wire import TraceParent

Kind: TypeAlias = Literal["internal", "client", "server"]
Attribute: TypeAlias = str | int | float

HEADER: Final = "traceparent"

EXPORT_TIMEOUT_S: Final = 2.0
"""Seconds that a batch may take to reach the collector, unless OTEL_EXPORTER_OTLP_TIMEOUT says
otherwise (the SDK's own are 10). Doubled, a process beside a dead collector ends 4 s later."""

LEAVING_S: Final = 1.0
"""Seconds in which batches are still begun when the process ends. Doubled, it ends a second later
beside a slow collector."""

PROTOCOL: Final = "http/protobuf"


@cache
def open_tracer(service: str) -> Tracer:
    """The tracer of this process, made when first asked for.

    Args:
        service: Name of the service, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES has one.

    Raises:
        ConfigError: OpenTelemetry is not installed, or its variables ask for what is not there.
    """
    _require_http()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
    except ImportError as error:
        raise ConfigError(
            f"tracing is on and OpenTelemetry is not installed: {error}",
            remedy="Install the extra `otel` (pip install 'aqualib[otel]', 'aqua-coordinator[otel]'"
            "), or unset AQUA_TRACING.",
        ) from error

    class Exporter(OTLPSpanExporter):
        """Begins no batch any more when the process has had its time to leave."""

        give_up_at_s = float("inf")

        def export(self, spans):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 - the base's
            if time.monotonic() > self.give_up_at_s:
                return SpanExportResult.FAILURE
            return super().export(spans)

    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: service}))
    has_timeout = any(
        os.environ.get(f"OTEL_EXPORTER_OTLP_{kind}TIMEOUT") for kind in ("", "TRACES_")
    )
    exporter = Exporter(timeout=None if has_timeout else EXPORT_TIMEOUT_S)
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    try:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    except ValueError as error:
        raise ConfigError(f"OTEL_BSP_*: {error}", remedy="Correct or unset them.") from error

    def leave() -> None:
        exporter.give_up_at_s = time.monotonic() + LEAVING_S
        provider.shutdown()

    _leaving.callback(leave)
    return Tracer(provider)


def _require_http() -> None:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(name) or PROTOCOL
        if protocol != PROTOCOL:
            raise ConfigError(
                f"{name}: {protocol!r} is not spoken here",
                remedy=f"Set it to {PROTOCOL}, which collectors take on port 4318.",
            )
        if os.environ.get(name):
            return  # The one for traces counts.


class Tracer:
    """Makes spans.

    Args:
        provider: Samples and exports them.
    """

    def __init__(self, provider: TracerProvider) -> None:
        # Once: an import statement that runs for each span costs a lookup and a lock.
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._context: Final = context
        self._trace: Final = trace
        self._propagator: Final = TraceContextTextMapPropagator()
        self._tracer: Final = provider.get_tracer("aqua")

    # --- Spans ----------------------------------------------------------------------------

    def begin(
        self,
        name: str,
        *,
        kind: Kind = "internal",
        parent: Context | Span | None = None,
        links: Sequence[Span] = (),
        start_ns: int | None = None,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> Span:
        """A span that the caller ends; under the current one of this thread unless told.

        Args:
            name: Of few values; what varies is an attribute.
            parent: Another span, or what `context_of` found.
            links: Spans of other traces that belong to it.
            start_ns: Of the system's clock, for what began before; now if None.
            attributes: By name, as OpenTelemetry has it for HTTP and errors.
        """
        trace = self._trace
        context = parent
        if context is not None and not isinstance(context, dict):
            context = trace.set_span_in_context(context)
        return self._tracer.start_span(
            name,
            context=context,
            kind=trace.SpanKind[kind.upper()],
            attributes=attributes,
            links=[trace.Link(link.get_span_context()) for link in links],
            start_time=start_ns,
        )

    def end(
        self, span: Span, error: AquaError | str | None = None, end_ns: int | None = None
    ) -> None:
        """End a span.

        Args:
            span: One that `begin` gave.
            error: What went wrong, or its code; None if nothing did.
            end_ns: Of the system's clock, for what ended before; now if None.
        """
        if error is not None:
            code = error.code if isinstance(error, AquaError) else error
            span.set_attribute("error.type", code)
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(end_ns)

    @contextlib.contextmanager
    def span(
        self,
        name: str,
        *,
        kind: Kind = "internal",
        parent: Context | Span | None = None,
        attributes: Mapping[str, Attribute] | None = None,
    ) -> Iterator[Span]:
        """A span that is the current one of this thread or task within the block."""
        span = self.begin(name, kind=kind, parent=parent, attributes=attributes)
        token = self._context.attach(self._trace.set_span_in_context(span))
        error: AquaError | str | None = None
        try:
            yield span
        except AquaError as refused:
            error = refused
            raise
        except BaseException as fault:
            error = type(fault).__name__
            raise
        finally:
            self._context.detach(token)
            self.end(span, error)

    # --- Context across processes ---------------------------------------------------------

    @property
    def is_within(self) -> bool:
        """Whether this thread or task is within a span."""
        return self._trace.get_current_span().get_span_context().is_valid

    def headers(self) -> dict[str, str]:
        """What tells the other side of the current span; empty without one."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier

    def traceparent_of(self, span: Span) -> TraceParent | None:
        """What tells the other side of this span."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._trace.set_span_in_context(span))
        return carrier.get(HEADER)

    def context_of(self, headers: Mapping[str, str]) -> Context:
        """The span that the other side told of; without one, the beginning of a new trace."""
        return self._propagator.extract(headers, self._context.Context())


_NO_SPAN: Final = contextlib.nullcontext()


def span_of(
    tracer: Tracer | None, name: str, attributes: Mapping[str, Attribute]
) -> AbstractContextManager[Span | None]:
    """`Tracer.span` under the current one, or nothing at all where tracing is off."""
    return _NO_SPAN if tracer is None else tracer.span(name, attributes=attributes)


# Registered when this is imported. The interpreter goes backwards: a module that imports this and
# then registers an end of its own, as that of consumers does, ends first: slabs are back before
# a collector is waited for.
_leaving: Final = contextlib.ExitStack()
atexit.register(_leaving.close)
