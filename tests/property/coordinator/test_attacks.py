"""Members that attack over HTTP, and honest ones beside them that notice nothing.

Drawn by seed: who sends what to which route (the routes are those that the application has), with
tokens of every role: bound, unbound, revoked, expired, none; bodies that are good, nearly good and
hostile; what an honest member may send, sent by another; and, in histories of their own, poison in
the books themselves. After each step no answer is a fault, what is refused is refused for a reason,
no request makes Redis work without a bound, the books agree with themselves, and honest members
keep, renew and give back what is theirs. Two holes that are made on purpose have to be found.

What tokens that are not bound may do to others by their role, as an operator's, is no attack: these
name only members and leases that nobody has. Poison may be taken for the truth until a member
contradicts it, so after it the claim is that the books heal, and that nothing ends meanwhile.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final
from unittest import mock

import httpx
import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aqua_coordinator.access.auth import Caller
from aqua_coordinator.access.tokens import Role, create_token, revoke_token
from aqua_coordinator.app import Service
from aqua_coordinator.embedded import EmbeddedValkey
from aqua_coordinator.settings import CoordinatorSettings
from aqua_coordinator.store import Ledger
from aqua_protocol import LeaseState
from aqua_protocol.leases import LeaseGrant, LeaseView
from harness.asgi import as_json, client_of
from harness.ledger_room import LedgerRoom, ledger_room
from harness.members_on_paper import ADOPTION_KEY, SLAB, PaperConsumer, PaperProducer
from harness.poison import poison
from harness.slices import examples
from harness.store_servers import running_store

BRIEF: Final = settings(
    max_examples=examples(2, whole=200), deadline=None, suppress_health_check=list(HealthCheck)
)
STEPS: Final = 25
STEALS: Final = 3
"""In each step: most of what is drawn otherwise falls before anybody asks whose it is."""
MAX_COMMANDS: Final = 1000
"""Of Redis for one request, and for a sweep beside it. What was measured is 107."""
ROUNDS_TO_HEAL: Final = 8
SEEDS_TO_FIND: Final = 8
"""In which a hole that was planted has to be found."""
VALUES: Final[list[Any]] = [
    *(None, True, -1, 0, 1, 2**53 - 1, 2**53, 2**64, -(2**63), 1e308, float("nan"), 0.5),
    *("", "x", "x" * 5000, "é\u202e", "\0", "a b", "../..", "{aqua}:books", "1", [], {}, [[]]),
]
REFUSALS: Final = {
    *(httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND),
}
"""Of what belongs to others: no other fault may come first and hide who asked."""
DEAD: Final = ("revoked", "expired", "invented", "nobody")
"""Callers that get no answer under `/v1`, whatever they send."""


class Siege:
    """A coordinator with honest members, and those who attack it."""

    def __init__(self, draw: random.Random, service: Service, room: LedgerRoom) -> None:
        self.draw, self.service, self.room = draw, service, room
        self.clients: dict[str, httpx.AsyncClient] = {}
        self.producers = [PaperProducer(name=f"lender-{n}") for n in range(2)]
        self.consumers = [PaperConsumer(name=f"llm-{n}") for n in range(2)]
        self.kept: dict[str, LeaseView] = {}
        self.numbers = itertools.count()
        self.evil = PaperProducer(name="evil-lender", slabs=4), PaperConsumer(name="evil-llm")
        self.seen: list[str] = ["lease-nobody-has", "evil-llm", "evil-lender"]
        self.answers: Counter[str] = Counter()
        path = room.url.removeprefix("unix://").partition("?")[0]
        self.redis = redis.Redis(unix_socket_path=path, protocol=2)
        document = service.api.openapi()["paths"]
        self.routes = [
            (method.upper(), route)
            for route in sorted(document)
            for method in sorted(document[route])
            if route != "/v1/events"  # It never ends.
        ]

    async def enter(self, stack: AsyncExitStack, tokens: Path) -> None:
        """Give everybody a token, and let the honest ones lend to each other."""
        callers: dict[str, tuple[list[Role], str | None]] = {
            member.name: ([role], member.name)
            for role, members in ((Role.PRODUCER, self.producers), (Role.CONSUMER, self.consumers))
            for member in members
        }
        callers |= {
            "evil-lender": ([Role.PRODUCER], "evil-lender"),
            "evil-llm": ([Role.CONSUMER], "evil-llm"),
            "reader": ([Role.READER], None),
            **{f"any-{role}": ([role], None) for role in Role},
            "revoked": (list(Role), None),
        }
        self.tokens: dict[str, str | None] = {"nobody": None}
        self.tokens["invented"] = "aqua_0123456789ab_secret"
        for name, (roles, member) in callers.items():
            self.tokens[name], record = create_token(tokens, roles=roles, member=member)
            if name == "revoked":
                revoke_token(tokens, record.token_id)
        self.tokens["expired"], _ = create_token(tokens, roles=list(Role), expires_in_s=1e-6)
        self.service.services.authenticator.refresh()
        for name, token in self.tokens.items():
            client = client_of(self.service, token)
            self.clients[name] = await stack.enter_async_context(client)
        await self.honest_round()
        await self.honest_round()
        await self.renew_bonds()

    # --- Honest members ------------------------------------------------------------------

    async def report(self, member: PaperProducer | PaperConsumer) -> str:
        """Report, and do what the answer says; a refusal's code, or nothing."""
        kind = "producers" if isinstance(member, PaperProducer) else "consumers"
        answer = await self.clients[member.name].put(
            f"/v1/{kind}/{member.name}", json=as_json(member.report())
        )
        self.require_sound(answer, f"{member.name} reports")
        body = answer.json()
        if answer.status_code != httpx.codes.OK:
            return str(body["code"])
        for notice in body["ended"]:
            held = member.held if isinstance(member, PaperProducer) else member.used
            held.pop(notice["lease_id"], None)
        if isinstance(member, PaperProducer):
            member.books_id = body["books_id"]
        return ""

    async def honest_round(self) -> list[str]:
        """Let every honest member report; their refusals."""
        members: list[PaperProducer | PaperConsumer] = [*self.producers, *self.consumers]
        said = [await self.report(member) for member in members]
        return [code for code in said if code]

    async def renew_bonds(self) -> None:
        """Lease, attach, give back; what is attached is to be kept from now on."""
        for consumer in self.consumers:
            client = self.clients[consumer.name]
            for is_kept in (False, True):
                key = {"Idempotency-Key": f"honest-{next(self.numbers)}"}
                sent = as_json(consumer.request())
                answer = await client.post("/v1/leases", json=sent, headers=key)
                self.require_sound(answer, "an honest grant")
                if answer.status_code != httpx.codes.CREATED:
                    assert answer.json()["code"] in {"capacity_exhausted", "books_rebuilding"}
                    continue
                lease = LeaseGrant.model_validate_json(answer.content).lease
                lender = next((p for p in self.producers if p.name == lease.producer_id), None)
                if lender is not None and is_kept:
                    lender.hand_out(lease)
                    consumer.use(lease)
                    self.kept[lease.lease_id] = lease
                    assert not await self.report(lender)
                    continue
                sent = {"epoch": lease.epoch}
                path = f"/v1/leases/{lease.lease_id}/release"
                released = await client.post(path, json=sent)
                assert released.status_code == httpx.codes.OK, released.text
                assert released.json()["state"] == LeaseState.RELEASED
        self.seen += self.kept

    async def require_kept(self) -> None:
        """Every honest lease stands, is renewed, and is what it was."""
        assert await self.honest_round() == []
        for lease in self.kept.values():
            client = self.clients[lease.consumer_id]
            renewed = await client.post(
                f"/v1/leases/{lease.lease_id}/renew", json={"epoch": lease.epoch}
            )
            assert renewed.status_code == httpx.codes.OK, renewed.text
            view = LeaseView.model_validate_json(renewed.content)
            assert (view.state, view.bytes) == (LeaseState.ACTIVE, lease.bytes)

    # --- Attacks -------------------------------------------------------------------------

    def body(self, route: str, ids: list[str]) -> Any:  # noqa: ANN401 - JSON
        """Something that fits the route, with ids of these."""
        producer, consumer = self.evil
        draw = self.draw
        count = draw.choice([0, 1, 3, 300, 4097])
        named = [draw.choice(ids) if draw.random() < 0.7 else f"lease-{n}" for n in range(count)]
        epochs = [1, 2**53 - 1, *(lease.epoch for lease in self.kept.values())]
        proofs = [None, f"{SLAB}.{'A' * 22}", "x", *self.proofs()]
        held = [
            {
                "lease_id": name,
                "epoch": draw.choice(epochs),
                "held_bytes": SLAB,
                "consumer_id": draw.choice(["evil-llm", "llm-0", "nobody"]),
                "proof": draw.choice(proofs),
            }
            for name in named
        ]
        report = as_json(producer.report()) | {
            "leases": held,
            "offered_bytes": max(4, count) * SLAB,
            "books_id": producer.books_id,
        }
        used = [{"lease_id": n, "epoch": draw.choice(epochs), "mapped_bytes": 0} for n in named]
        user = as_json(consumer.report()) | {"leases": used}
        if "producers" in route or "offers" in route:
            return (
                report
                if "producers" in route
                else {
                    "incarnation": producer.incarnation,
                    "revision": 2**40,
                    "offered_bytes": 0,
                }
            )
        if "consumers" in route:
            return user
        if "heartbeats" in route:
            return {"producers": [report] * draw.choice([1, 3]), "consumers": [user]}
        if route.endswith("leases"):
            return as_json(consumer.request(draw.choice([1, 2, 10**6]))) | draw.choice(
                [{}, {"exclude": ids[:4]}, {"min_bytes": SLAB, "ttl_s": 1e9}]
            )
        return draw.choice(
            [
                {"epoch": draw.choice(epochs)},
                {"producer_id": draw.choice(ids), "bytes": SLAB},
                {"pairings": [{"consumer_id": "nobody", "producers": ids, "reason": "é"}] * 2},
                {"model": "m", "label": "consumer", "needed_bytes": SLAB},
            ]
        )

    def proofs(self) -> list[str]:
        """Those of honest leases, which their tokens carry."""
        held = [held for producer in self.producers for held in producer.held.values()]
        return [one.proof for one in held if one.proof is not None]

    def spoil(self, body: Any) -> Any:  # noqa: ANN401 - JSON
        """The body with one thing in it that should not be there, or missing."""
        body = copy.deepcopy(body)
        at = body
        while True:
            keys = list(at) if isinstance(at, dict) else list(range(len(at)))
            if not keys:
                return self.draw.choice(VALUES)
            key = self.draw.choice(keys)
            if isinstance(at[key], dict | list) and at[key] and self.draw.random() < 0.7:
                at = at[key]
                continue
            change = self.draw.randrange(3)
            if change == 0:
                del at[key]
            elif change == 1 and isinstance(at, dict):
                at[self.draw.choice(["odd", "é", ""])] = 1
            else:
                at[key] = self.draw.choice(VALUES)
            return body

    async def attack(self) -> None:
        """One request of somebody who means no good."""
        draw = self.draw
        caller = draw.choice(
            ["evil-lender", "evil-llm"] * 4 + [*DEAD, "reader"] + [f"any-{role}" for role in Role]
        )
        ids = ["nobody", "lease-nobody-has"] if caller.startswith("any-") else self.seen
        method, route = draw.choice(self.routes)
        if draw.random() < 0.3:
            own = "producers/evil-lender" if draw.random() < 0.5 else "consumers/evil-llm"
            method, route = draw.choice([("PUT", f"/v1/{own}"), ("POST", "/v1/heartbeats")])
        path = "/".join(
            str(draw.choice([*ids, *VALUES[12:]])) if "{" in part else part
            for part in route.split("/")
        )
        body = self.body(route, ids)
        if caller.startswith("any-"):  # Of members that nobody is.
            body = json.loads(json.dumps(body).replace("llm-0", "nobody"))
        if draw.random() < 0.5:
            body = self.spoil(body)
        params: dict[str, Any] = draw.choice(
            [{}, {"limit": draw.choice([-1, 1, 10**9])}, {"cursor": "x"}]
        )
        before = self.commands()
        answer = await self.clients[caller].request(
            method,
            httpx.URL("http://127.0.0.1").copy_with(path=path.replace("\0", "%00")),
            content=json.dumps(body) if method != "GET" else None,
            headers={
                "Content-Type": "application/json",
                "Idempotency-Key": draw.choice(["evil", "é".encode().hex(), "k" * 500]),
            },
            params=params,
        )
        did = f"{caller}: {method} {path[:80]} {json.dumps(body)[:300]}"
        assert self.commands() - before < MAX_COMMANDS, did
        self.require_sound(answer, did)
        if caller in DEAD and answer.request.url.path.startswith("/v1/"):
            assert answer.status_code == httpx.codes.UNAUTHORIZED, did
        elif answer.status_code == httpx.codes.CREATED:
            self.seen.append(answer.json()["lease"]["lease_id"])
        self.answers[f"{caller} {answer.status_code}"] += 1

    async def steal(self) -> None:
        """Something that an honest member may send, word by word, sent by another."""
        draw = self.draw
        lease = draw.choice([*self.kept.values()])
        lender, user = draw.choice(self.producers), draw.choice(self.consumers)
        on_lease = f"/v1/leases/{lease.lease_id}"
        offer = {"incarnation": lender.incarnation, "revision": 2**40, "offered_bytes": 0}
        method, path, body = draw.choice(
            [
                ("POST", f"{on_lease}/release", {"epoch": lease.epoch}),
                ("POST", f"{on_lease}/renew", {"epoch": lease.epoch}),
                ("POST", "/v1/leases", as_json(user.request())),
                ("PUT", f"/v1/producers/{lender.name}", as_json(lender.report())),
                ("PUT", f"/v1/consumers/{user.name}", as_json(user.report())),
                ("PUT", f"/v1/offers/{lender.name}", offer),
                ("DELETE", f"/v1/producers/{lender.name}?incarnation={lender.incarnation}", None),
                ("DELETE", f"/v1/consumers/{user.name}?incarnation={user.incarnation}", None),
            ]
        )
        caller = draw.choice(["evil-lender", "evil-llm", "reader", draw.choice(DEAD)])
        answer = await self.clients[caller].request(
            method, path, json=body, headers={"Idempotency-Key": f"stolen-{next(self.numbers)}"}
        )
        did = f"{caller}: {method} {path}: {answer.text}"
        assert answer.status_code in REFUSALS, did
        self.answers[f"{caller} {answer.status_code}"] += 1

    def require_sound(self, answer: httpx.Response, did: str) -> None:
        """No answer is a fault of the coordinator's."""
        waits = answer.status_code == httpx.codes.SERVICE_UNAVAILABLE
        if not waits or answer.json()["code"] != "books_rebuilding":
            assert answer.status_code < httpx.codes.INTERNAL_SERVER_ERROR, f"{did}: {answer.text}"

    def commands(self) -> int:
        """Commands that Redis has carried out, those of scripts as well."""
        stats: dict[str, Any] = self.redis.info("commandstats")
        return sum(one["calls"] for name, one in stats.items() if not name.endswith("info"))

    # --- What must hold --------------------------------------------------------------------

    async def require_revoked(self) -> None:
        for caller in DEAD:
            answer = await self.clients[caller].get("/v1/leases")
            assert answer.status_code == httpx.codes.UNAUTHORIZED

    async def require_expiry(self) -> None:
        """Time passes: what was granted and not attached ends, what is honest stays."""
        await self.honest_round()
        await self.room.pass_time(11)
        await self.room.sweep()
        leases, _ = await self.room.ledger.leases(limit=1000)
        assert not [lease for lease in leases if lease.state is LeaseState.GRANTED]

    async def heal(self, words: object) -> None:
        """After poison: what is bad is set aside, and all goes on as before."""
        for _ in range(ROUNDS_TO_HEAL):
            refused = await self.honest_round()
            await self.require_revoked()
            await self.room.sweep()
            faults = await self.room.ledger.audit()
            if not refused and not faults:
                break
            if refused:  # Until a silent member is lost, and comes anew.
                await self.room.pass_time(40)
                await self.room.sweep()
        else:
            pytest.fail(f"{words}: {refused} {faults}")
        for method, route in self.routes:
            if method == "GET" and "{" not in route:
                answer = await self.clients["any-operator"].get(route)
                assert answer.status_code == httpx.codes.OK, f"{words}: {route} {answer.text}"


@pytest.fixture(scope="module")
def store() -> Iterator[EmbeddedValkey]:
    with running_store() as server:
        yield server


async def besiege(
    store: EmbeddedValkey, draw: random.Random, tokens: Path, *, poisons: bool
) -> None:
    create_token(tokens, roles=[Role.READER])
    settings = CoordinatorSettings.model_validate(
        {"tokens_file": tokens, "adoption_key": ADOPTION_KEY.decode()}
    )
    service = Service(settings, store.url)
    async with AsyncExitStack() as stack:
        room = await stack.enter_async_context(ledger_room(store.url))
        await stack.enter_async_context(service.running())
        siege = Siege(draw, service, room)
        await siege.enter(stack, tokens)
        for number in range(STEPS):
            await siege.attack()
            if poisons and number % 5 == 4:
                words = poison(siege.redis, draw)
                await siege.heal(words)
            elif not poisons:
                for _ in range(STEALS):
                    await siege.steal()
                assert await room.ledger.audit() == []
                await siege.require_kept()
        if not poisons:
            await siege.require_expiry()
            await siege.require_kept()
        else:
            siege.kept.clear()
            for producer, consumer in zip(siege.producers, siege.consumers, strict=True):
                producer.held.clear()
                consumer.used.clear()
            await siege.heal("the end")
        await siege.renew_bonds()
        await siege.require_kept()
        await siege.require_revoked()
        for _ in range(2):  # All fall silent, and nothing of them stays.
            await room.pass_time(100)
            await room.sweep()


@BRIEF
@given(seed=st.integers(0, 2**32))
def test_honest_members_notice_nothing_of_those_who_attack(
    store: EmbeddedValkey, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.json"
    asyncio.run(besiege(store, random.Random(seed), tokens, poisons=False))


@BRIEF
@given(seed=st.integers(0, 2**32))
def test_books_that_are_poisoned_heal_and_end_nothing(
    store: EmbeddedValkey, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.json"
    asyncio.run(besiege(store, random.Random(seed), tokens, poisons=True))


def require_nothing(self: Caller, role: Role, *, member: str | None = None) -> None:
    """Let every token do everything."""


_release = Ledger.release_lease


async def release_of_any(self: Ledger, lease_id: str, **words: Any) -> LeaseView:  # noqa: ANN401 - as of the step
    """Release a lease, whoever asks."""
    return await _release(self, lease_id, **words | {"as_consumer": None, "as_tenant": ""})


@pytest.mark.parametrize(
    ("owner", "name", "hole"),
    [
        pytest.param(Caller, "require", require_nothing, id="roles and bindings do not count"),
        pytest.param(
            Ledger, "release_lease", release_of_any, id="who holds a lease does not count"
        ),
    ],
)
def test_a_hole_is_found(
    store: EmbeddedValkey, tmp_path: Path, owner: type, name: str, hole: object
) -> None:
    async def search() -> None:
        for seed in range(SEEDS_TO_FIND):
            await besiege(store, random.Random(seed), tmp_path / str(seed), poisons=False)

    with mock.patch.object(owner, name, hole), pytest.raises(AssertionError, match=r"evil|reader"):
        asyncio.run(search())
