"""Whatever the OpenAPI document allows is answered, whatever it forbids is refused.

schemathesis reads the document of a real coordinator and sends what it can think of: good requests,
requests that break one rule each, unknown methods, missing headers. Every answer must be one that
the document describes, none may be a 5xx, and nonsense must not be accepted. Callers of every role
do so, and none may change what is not theirs. A second pass repeats requests on purpose: unknown
ids, stale epochs, replays.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    missing_required_header,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from aqua_coordinator.access.tokens import Role, create_token
from aqua_coordinator.app import Service
from aqua_coordinator.settings import CoordinatorSettings
from aqua_protocol.errors import VersionMismatchError
from harness.bounds import HANG_S
from harness.coordinator_process import CoordinatorProcess
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer
from harness.store_servers import short_directory

pytest_plugins = ("schemathesis.pytest.plugin",)

pytestmark = pytest.mark.slow

CHECKS = [
    schemathesis.checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
    missing_required_header,
    unsupported_method,
]


MEMBER = "member"
"""Whom a bound token may speak for."""

CALLERS = {
    "operator": (Role.OPERATOR, None),
    "producer": (Role.PRODUCER, MEMBER),
    "consumer": (Role.CONSUMER, MEMBER),
    "reader": (Role.READER, None),
}
"""Role of each token, and to whom it is bound."""

CHANGES = {
    Role.PRODUCER: ("/v1/producers/", "/v1/offers/"),
    Role.CONSUMER: ("/v1/consumers/", "/v1/leases"),
    Role.READER: (),
}
"""Where callers without the operator's role may change something, beside heartbeats."""


@dataclass(frozen=True)
class Guarded:
    """A coordinator that wants tokens, and a token of each caller."""

    url: str
    tokens: dict[str, str]

    @property
    def token(self) -> str:
        """The one that may do everything."""
        return self.tokens["operator"]

    def client(self) -> httpx.Client:
        """A client with the token."""
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.url, headers=headers, trust_env=False, timeout=HANG_S)


@pytest.fixture(scope="module")
def coordinator() -> Iterator[Guarded]:
    """A coordinator with one producer and one consumer in its books."""
    with short_directory() as directory:
        tokens = directory / "tokens.json"
        made = {
            caller: create_token(tokens, roles=[role], member=member)[0]
            for caller, (role, member) in CALLERS.items()
        }
        settings: dict[str, Any] = {"AQUA_SILENT_MEMBER_S": "3600", "AQUA_TOKENS_FILE": str(tokens)}
        with CoordinatorProcess(directory / "d", **settings) as running:
            guarded = Guarded(running.url, made)
            with guarded.client() as client:
                for path, body in (
                    ("producers/producer", PaperProducer().report()),
                    ("consumers/consumer", PaperConsumer().report()),
                ):
                    sent = body.model_dump(mode="json")
                    client.put(f"/v1/{path}", json=sent).raise_for_status()
            yield guarded


def openapi_with_tokens() -> dict[str, Any]:
    """Read from an application that is not running: tests are collected before any coordinator."""
    with short_directory() as directory:
        tokens = directory / "tokens.json"
        create_token(tokens, roles=[Role.OPERATOR])
        return Service(CoordinatorSettings(tokens_file=tokens), "unix:///nowhere").api.openapi()


def requests(*modes: schemathesis.GenerationMode) -> schemathesis.BaseSchema:
    """What can be thought of as such requests, without the stream that never ends."""
    read = schemathesis.openapi.from_dict(openapi_with_tokens())
    read.config.generation.update(modes=list(modes))
    return read.exclude(path="/v1/events")


document = requests(*schemathesis.GenerationMode)
# Nonsense is refused whoever sends it: what a caller may change is told by good requests alone.
good_requests = requests(schemathesis.GenerationMode.POSITIVE)


def test_the_document_is_the_one_that_is_served(coordinator: Guarded) -> None:
    served = httpx.get(f"{coordinator.url}/openapi.json", trust_env=False, timeout=HANG_S).json()
    assert served == document.raw_schema


async def test_the_document_names_every_operation_and_its_errors(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    operations = {
        f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method in methods
    }
    assert {"POST /v1/leases", "PUT /v1/producers/{producer_id}", "GET /v1/events"} <= operations
    grant = document["paths"]["/v1/leases"]["post"]
    assert {"201", "422", "4XX", "5XX"} <= grant["responses"].keys()
    assert json.dumps(grant["responses"]["422"]).count("ErrorBody") == 1


async def test_the_document_asks_for_tokens_if_the_coordinator_does(
    http: httpx.AsyncClient,
) -> None:
    def security_of(document: dict[str, Any]) -> tuple[set[str], int]:
        schemes = document["components"].get("securitySchemes", {}).keys()
        operations = [each for path in document["paths"].values() for each in path.values()]
        return set(schemes), sum("security" in each for each in operations)

    guarded = openapi_with_tokens()
    schemes, count = security_of(guarded)
    assert schemes == {"HTTPBearer"}
    assert count > 10
    assert guarded["paths"]["/v1/leases"]["post"]["security"] == [{"HTTPBearer": []}]
    assert security_of((await http.get("/openapi.json")).json()) == (set(), 0)


# Without a parameter of ours all operations would have one name, and xdist runs one test of a name.
@pytest.mark.parametrize("caller", ["operator"])
@document.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_breaks_the_document(
    case: schemathesis.Case[Any], caller: str, coordinator: Guarded
) -> None:
    call_as(coordinator.tokens[caller], case, coordinator)


@pytest.mark.parametrize("caller", sorted(CALLERS.keys() - {"operator"}))
@good_requests.parametrize()
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_caller_breaks_the_document_or_changes_what_is_not_theirs(
    case: schemathesis.Case[Any], caller: str, coordinator: Guarded
) -> None:
    response = call_as(coordinator.tokens[caller], case, coordinator)
    if case.method == "GET" or response.status_code >= httpx.codes.BAD_REQUEST:
        return
    role, member = CALLERS[caller]
    if case.path == "/v1/heartbeats":
        body: Any = case.body
        for kind in (Role.PRODUCER, Role.CONSUMER):
            sent, answers = body.get(f"{kind}s", []), response.json()[f"{kind}s"]
            for report, answer in zip(sent, answers, strict=True):
                mine = (role, member) == (kind, report[f"{kind}_id"])
                assert mine or answer["code"] == "forbidden", f"{caller} reported {report}"
        return
    assert case.path.startswith(CHANGES[role]), f"{caller} changed {case.method} {case.path}"
    if case.path.endswith(("/{producer_id}", "/{consumer_id}")):
        assert case.formatted_path.endswith(f"/{member}")


def call_as(
    token: str, case: schemathesis.Case[Any], coordinator: Guarded
) -> schemathesis.Response:
    """Send the request under this token, and check the answer."""
    # schemathesis makes up a token, and leaves it out to see what happens.
    if "Authorization" in (case.headers or {}):
        case.headers["Authorization"] = f"Bearer {token}"
    response = case.call(base_url=coordinator.url)
    checks = list(CHECKS)
    if response.status_code == VersionMismatchError.http_status:
        # A refusal too: a body that is wrong because it is of another version is told so.
        checks.remove(negative_data_rejection)
    case.validate_response(response, checks=checks)
    return response


def test_the_coordinator_is_still_sane_after_all_that(coordinator: Guarded) -> None:
    with coordinator.client() as client:
        offers = client.get("/v1/offers").json()["offers"]
        metrics = client.get("/metrics").text
    for offer in offers:
        assert offer["free_bytes"] + offer["leased_bytes"] == offer["offered_bytes"]
        assert min(offer["free_bytes"], offer["leased_bytes"]) >= 0
    answered = [line for line in metrics.splitlines() if line.startswith("aqua_coordinator_req")]
    assert not [line for line in answered if 'code="5' in line]
    assert any('code="2' in line and 'method="PUT"' in line for line in answered)


@pytest.mark.parametrize("epoch", [1, 2**31, 2**53 - 1])
@pytest.mark.parametrize("action", ["renew", "release", "revoke"])
def test_unknown_ids_and_stale_epochs_are_refused_however_often(
    coordinator: Guarded, action: str, epoch: int
) -> None:
    # The checks above may have changed what is in the books; these members are this test's own.
    name = f"c-{action}-{epoch}"
    producer = PaperProducer(name=f"p-{action}-{epoch}", domain=name)
    consumer = PaperConsumer(name=name, domain=name)
    with coordinator.client() as client:
        for _ in range(2):
            ack = client.put(
                f"/v1/producers/{producer.name}", json=producer.report().model_dump(mode="json")
            ).json()
            producer.books_id = ack["books_id"]
        client.put(f"/v1/consumers/{name}", json=consumer.report().model_dump(mode="json"))
        wish = {"consumer_id": name, "bytes": SLAB}
        client.put("/v1/placements", json={"pairings": []})
        grants = [
            client.post("/v1/leases", json=wish, headers={"Idempotency-Key": name}).json()
            for _ in range(3)
        ]
        assert grants[0] == grants[1] == grants[2]
        lease_id = grants[0]["lease"]["lease_id"]
        for _ in range(3):
            unknown = client.post(f"/v1/leases/no-such-lease/{action}", json={"epoch": epoch})
            assert unknown.json()["code"] == "unknown_resource"
            stale = client.post(f"/v1/leases/{lease_id}/{action}", json={"epoch": epoch})
            assert stale.json()["code"] == "stale_epoch"
        assert client.get(f"/v1/leases/{lease_id}").json()["state"] == "granted"
