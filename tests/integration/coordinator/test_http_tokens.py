"""Who may do what over the REST interface."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from aqua_coordinator.access.tokens import Role, create_token, revoke_token
from aqua_coordinator.app import Service
from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.settings import CoordinatorSettings
from aqua_protocol.members import HeartbeatAck
from harness.asgi import allocate, as_json, client_of, error_of, hear, join
from harness.ledger_room import ledger_room
from harness.members_on_paper import SLAB, PaperConsumer, PaperProducer


@pytest.fixture
async def guarded(store: EmbeddedValkey, tmp_path: Path) -> AsyncIterator[Service]:
    """A coordinator that wants tokens."""
    path = tmp_path / "tokens.json"
    create_token(path, roles=[Role.READER])
    service = Service(CoordinatorSettings(tokens_file=path), store.url)
    async with ledger_room(store.url), service.running():
        yield service


def token_for(
    service: Service, *roles: Role, member: str | None = None, expires_in_s: float | None = None
) -> str:
    """A fresh token that the coordinator knows already."""
    path = service.services.settings.tokens_file
    assert path is not None
    token, _ = create_token(path, roles=list(roles), member=member, expires_in_s=expires_in_s)
    service.services.authenticator.refresh()
    return token


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer x", "Basic abc", "Bearer aqua_0123456789ab_secret"]
)
@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_without_a_good_token_nothing_under_v1_is_answered(
    guarded: Service, header: str | None, method: str
) -> None:
    headers = {} if header is None else {"Authorization": header}
    async with client_of(guarded) as http:
        answer = await http.request(method, "/v1/leases", headers=headers)
        assert error_of(answer).code == "unauthenticated"
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert (await http.get("/healthz")).status_code == 200
        assert (await http.get("/readyz")).status_code == 200


ROLE_CASES = [
    ("PUT", "/v1/producers/producer", Role.PRODUCER, lambda: as_json(PaperProducer().report())),
    ("PUT", "/v1/consumers/consumer", Role.CONSUMER, lambda: as_json(PaperConsumer().report())),
    ("POST", "/v1/leases", Role.CONSUMER, lambda: as_json(PaperConsumer().request())),
    ("POST", "/v1/leases/lease-1/renew", Role.CONSUMER, lambda: {"epoch": 1}),
    ("POST", "/v1/leases/lease-1/release", Role.CONSUMER, lambda: {"epoch": 1}),
    ("POST", "/v1/leases/lease-1/revoke", Role.OPERATOR, lambda: {"epoch": 1}),
    ("POST", "/v1/reclaims", Role.OPERATOR, lambda: {"producer_id": "producer", "bytes": SLAB}),
    ("PUT", "/v1/placements", Role.OPERATOR, lambda: {"pairings": []}),
    ("PUT", "/v1/profiles", Role.OPERATOR, lambda: {"model": "m", "label": "neutral"}),
    ("GET", "/v1/profiles", None, lambda: None),
    ("DELETE", "/v1/producers/producer?incarnation=life-1", Role.PRODUCER, lambda: None),
    ("DELETE", "/v1/consumers/consumer?incarnation=life-1", Role.CONSUMER, lambda: None),
    ("GET", "/v1/leases", None, lambda: None),
    ("GET", "/v1/producers", None, lambda: None),
]


@pytest.mark.parametrize(("method", "path", "needed", "body"), ROLE_CASES)
async def test_each_operation_wants_its_role(
    guarded: Service, method: str, path: str, needed: Role | None, body: Callable[[], object]
) -> None:
    for role in Role:
        async with client_of(guarded, token_for(guarded, role)) as http:
            answer = await http.request(
                method, path, json=body(), headers={"Idempotency-Key": f"key-{role}"}
            )
        allowed = needed is None or role in {needed, Role.OPERATOR}
        assert (answer.status_code != 403) == allowed, (role, answer.text)


async def test_a_bound_token_speaks_for_its_member_only(guarded: Service) -> None:
    token = token_for(guarded, Role.PRODUCER, Role.CONSUMER, member="mine")
    async with client_of(guarded, token) as http:
        mine, other = PaperProducer(name="mine"), PaperProducer(name="other")
        accepted = await http.put("/v1/producers/mine", json=as_json(mine.report()))
        assert accepted.status_code == 200
        refused = await http.put("/v1/producers/other", json=as_json(other.report()))
        assert error_of(refused).code == "forbidden"
        many = await http.post(
            "/v1/heartbeats",
            json={"producers": [as_json(mine.report()), as_json(other.report())]},
        )
        ack = HeartbeatAck.model_validate_json(many.content)
        assert [type(entry).__name__ for entry in ack.producers] == ["ProducerAck", "ErrorBody"]


async def test_a_bound_consumer_cannot_release_the_lease_of_another(guarded: Service) -> None:
    async with client_of(guarded, token_for(guarded, Role.OPERATOR)) as http:
        await join(http, PaperProducer())
        await hear(http, PaperConsumer())
        lease = (await allocate(http, PaperConsumer(), "key")).lease
    thief = token_for(guarded, Role.CONSUMER, member="thief")
    async with client_of(guarded, thief) as http:
        for action in ("release", "renew"):
            answer = await http.post(
                f"/v1/leases/{lease.lease_id}/{action}", json={"epoch": lease.epoch}
            )
            assert error_of(answer).code == "forbidden"


async def test_revoked_and_expired_tokens_stop_working(guarded: Service) -> None:
    path = guarded.services.settings.tokens_file
    assert path is not None
    token = token_for(guarded, Role.READER)
    async with client_of(guarded, token) as http:
        assert (await http.get("/v1/leases")).status_code == 200
        revoke_token(path, token.split("_")[1])
        guarded.services.authenticator.refresh()
        assert error_of(await http.get("/v1/leases")).code == "unauthenticated"
    async with client_of(guarded, token_for(guarded, Role.READER, expires_in_s=0.0)) as http:
        error = error_of(await http.get("/v1/leases"))
        assert "expired" in error.message
