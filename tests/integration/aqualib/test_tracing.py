"""Traces of real processes, as a collector gets them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated, Any, Final

import httpx
import pytest
import torch
from pydantic import Field, TypeAdapter, model_validator

import aqualib
from aqua_client.tracing import open_tracer
from aqua_coordinator.access.tokens import Role, create_token
from aqua_protocol import ConfigError
from aqua_protocol.channel import Goodbye, Hello, Released
from aqualib.settings import load_settings
from aqualib.tensor import Location
from harness.bounds import HANG_S, until
from harness.coordinator_process import CoordinatorProcess, data_dir
from harness.otlp_receiver import Mood, OtlpReceiver
from harness.producers import SLAB, socket_dir
from harness.program import Program, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


SECRET: Final = "a prompt that nobody else may read"
MEMBER: Final = {
    "AQUA_HEARTBEAT_S": "0.1",
    "AQUA_SLAB_BYTES": str(SLAB),
    "AQUA_TRANSPORT": "memfd",
    "AQUA_NODE": "node",
    "AQUA_DOMAIN": "domain",
    "AQUA_RECLAIM_DEADLINE_S": str(HANG_S),
}


def lend_drawing_at_the_end(_: str) -> None:
    """A producer that has drawn nothing when it ends."""
    pytest.MonkeyPatch().setattr("aqualib.traced_leases.LATE_S", 10 * HANG_S)
    lend("")


def lend(_: str) -> None:
    """A producer as programs open one."""
    with aqualib.open_producer("lender", device="cpu") as producer:
        say(producer.offer(SLAB))
        for line in sys.stdin:
            match json.loads(line):
                case ["reclaim"]:
                    say(producer.reclaim(SLAB).wait(HANG_S))
                case ["leave"]:
                    producer.close()
                    say(True)


def borrow(_: str) -> None:
    """A consumer as engines connect one: pages out until it is told to end."""
    with aqualib.connect("borrower", host_bytes=64 * SLAB) as aqua:
        content = torch.frombuffer(bytearray(SECRET.encode().ljust(SLAB)), dtype=torch.uint8)
        stored = aqua.offload(content)
        say(True)
        for line in sys.stdin:
            match json.loads(line):
                case ["leased"]:
                    until(lambda: stored.location is Location.PEER, "it is with the peer")
                    say(True)
                case ["reclaimed"]:
                    done = lambda: any(r.total_ms is not None for r in aqua.stats().reclaims)  # noqa: E731
                    until(done, "the reclaim is over")
                    say(torch.equal(stored.load(), content))


@contextlib.contextmanager
def cluster(
    tracing: dict[str, str], lend: Callable[[str], None] = lend
) -> Iterator[tuple[Program, Program]]:
    """A lender, and a borrower whose one slab has moved there after it was paged out."""
    with (
        data_dir() as path,
        socket_dir() as sockets,
        CoordinatorProcess(path, port=0, **tracing) as coordinator,
    ):
        environment = {
            **MEMBER,
            **tracing,
            "AQUA_COORDINATOR_URL": coordinator.url,
            "AQUA_SOCKET_DIR": str(sockets),
        }
        with Program(borrow, "", within_s=HANG_S, **environment) as borrower:
            assert borrower.answer(), "it has paged out"
            with Program(lend, "", within_s=HANG_S, **environment) as lender:
                assert lender.answer() == SLAB
                assert borrower.call("leased")
                yield lender, borrower


def reclaim(lender: Program, borrower: Program) -> None:
    assert lender.call("reclaim"), "the memory is back"
    assert borrower.call("reclaimed")


def test_page_out_grant_and_reclaim_of_three_processes_are_one_trace() -> None:
    with OtlpReceiver() as collector:
        with cluster(collector.environment) as (lender, borrower):
            reclaim(lender, borrower)
            drain = collector.await_span("drain")
            grant, asked = collector.await_span("grant"), collector.await_span("reclaim")
        spans = {span.span_id: span for span in collector.spans}
        first = collector.await_span("page_out")
        assert {first.trace_id, grant.trace_id, asked.trace_id} == {drain.trace_id}

        path = [drain.name]
        while parent := spans.get(spans[drain.span_id].parent_id):
            drain = parent
            path.append(drain.name)
        assert path == ["drain", "attach", "lease", "page_out"]
        assert spans[asked.parent_id].name == "attach"
        path = [grant.name]
        while parent := spans.get(grant.parent_id):
            grant = parent
            path.append(f"{grant.service} {grant.name}")
        assert path == [
            "grant",
            "aqua-coordinator POST /v1/leases",
            "aqualib POST",
            "aqualib lease",
            "aqualib page_out",
        ]
        assert asked.attributes["aqua.slabs"] == "1"
        told = " ".join(str(span) for span in spans.values())
        assert SECRET not in told
        assert not any(span.is_error for span in spans.values())


def test_what_a_producer_gives_up_as_it_ends_is_drawn() -> None:
    with OtlpReceiver() as collector:
        with cluster(collector.environment, lend_drawing_at_the_end) as (lender, _):
            assert lender.call("leave")
            given_up = collector.await_span("reclaim")
        assert not given_up.is_error


def test_a_stranger_is_in_no_trace() -> None:
    strangers, ours = "a" * 32, "b" * 32
    with data_dir() as path, OtlpReceiver() as collector:
        tokens_file = path / "tokens.json"
        token, _ = create_token(tokens_file, roles=[Role.READER])
        settings = collector.environment | {"AQUA_TOKENS_FILE": str(tokens_file)}
        with CoordinatorProcess(path, port=0, **settings) as coordinator:
            for known, trace in (("aqua_000000000000_guessed", strangers), (token, ours)):
                headers = {"Authorization": f"Bearer {known}"}
                headers["traceparent"] = f"00-{trace}-{'c' * 16}-01"
                httpx.get(
                    f"{coordinator.url}/v1/leases", headers=headers, trust_env=False, timeout=HANG_S
                )
            span = collector.await_span("GET /v1/leases")
        assert [each.trace_id for each in collector.spans] == [ours] == [span.trace_id]


@pytest.mark.slow
def test_without_being_asked_for_nothing_is_traced_or_imported() -> None:
    with OtlpReceiver() as collector:
        off = {**collector.environment, "AQUA_TRACING": "false"}
        with cluster(off) as (lender, borrower):
            reclaim(lender, borrower)
        assert not collector.request_count
        # In interpreters of their own: what the test's server has imported, its children have.
        for module, absent in (
            ("aqualib.connection", "opentelemetry"),
            (
                "aqua_coordinator.server",
                "opentelemetry.exporter",
            ),  # FastAPI imports the rest itself.
        ):
            program = f"import sys, {module}; sys.exit({absent!r} in sys.modules)"
            subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_S)


@pytest.mark.parametrize("mood", [Mood.REFUSING, Mood.SILENT, Mood.ABSENT])
def test_leases_go_on_whatever_the_collector_does(mood: Mood) -> None:
    with OtlpReceiver(mood) as collector:
        environment = {**collector.environment, "OTEL_BSP_MAX_QUEUE_SIZE": "8"}
        environment["OTEL_BSP_MAX_EXPORT_BATCH_SIZE"] = "8"
        with cluster(environment) as (lender, borrower):
            if mood is not Mood.ABSENT:
                collector.await_request()
            reclaim(lender, borrower)
        assert not collector.spans


def test_a_consumer_that_traces_attaches_to_a_producer_of_the_version_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that knows no `traceparent` refuses it as it refuses any field that it does not know."""
    refused = []

    class HelloOfBefore(Hello):
        @model_validator(mode="before")
        @classmethod
        def _know_no_trace(cls, told: dict[str, Any]) -> dict[str, Any]:
            if "traceparent" in told:
                refused.append(told["traceparent"])
                raise ValueError("Extra inputs are not permitted")
            return told

    of_before: TypeAdapter[HelloOfBefore | Released | Goodbye] = TypeAdapter(
        Annotated[HelloOfBefore | Released | Goodbye, Field(discriminator="type")]
    )
    monkeypatch.setattr("aqualib.producer.server.CONSUMER_MESSAGES", of_before)
    with data_dir() as path, socket_dir() as sockets, CoordinatorProcess(path) as coordinator:
        given = MEMBER | {"AQUA_COORDINATOR_URL": coordinator.url, "AQUA_SOCKET_DIR": str(sockets)}
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        with (
            aqualib.open_producer("lender", device="cpu") as producer,
            OtlpReceiver() as collector,
        ):
            producer.offer(SLAB)
            with Program(borrow, "", within_s=HANG_S, **given, **collector.environment) as borrower:
                assert borrower.answer()
                assert borrower.call("leased")
                assert producer.reclaim(SLAB).wait(HANG_S)
                assert borrower.call("reclaimed")
                first = collector.await_span("drain")
                assert first.trace_id == collector.await_span("attach").trace_id
    assert len(refused) == 1


def test_what_tracing_needs_is_said_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AQUA_TRACING", "true")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    open_tracer.cache_clear()
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL") as spoken:
        load_settings().tracer()
    assert "http/protobuf" in spoken.value.remedy
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(ConfigError, match="not installed") as missing:
        load_settings().tracer()
    assert "aqualib[otel]" in missing.value.remedy
