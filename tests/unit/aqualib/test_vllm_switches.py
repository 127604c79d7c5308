"""Switches of an engine, and the admin API that turns them, without vLLM."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import httpx
import pytest

from aqua_protocol import ConfigError, UnavailableError
from aqua_protocol.errors import UnknownResourceError
from aqua_schedulers.cfs import RequestView, TenantAccounts, TenantSettings
from aqualib.engines.vllm.coordinator_start import look_for_coordinator
from aqualib.engines.vllm.operations.admin_api import (
    AquaMiddleware,
    Message,
    Receive,
    Scope,
    Send,
)
from aqualib.engines.vllm.operations.admin_commands import UTILITY, answer
from aqualib.engines.vllm.operations.evictions import EvictionRequest
from aqualib.engines.vllm.operations.switches import Feature, Switches, SwitchState
from aqualib.engines.vllm.paging.block_table import BlockTable
from aqualib.engines.vllm.paging.pins import Prefix, PrefixPinTable
from aqualib.settings import load_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aqualib.engines.vllm.lending.scheduler import LendingScheduler

TOKEN = "operator-of-this-engine"
NOWHERE = "http://127.0.0.1:9"


class Rank:
    """A scheduler that has switches and nothing else."""

    def __init__(self, *features: Feature) -> None:
        self.turned: list[tuple[Feature, bool]] = []
        self.switches = Switches()
        self.accounts: TenantAccounts | None = None
        self.pins: PrefixPinTable | None = None
        for feature in features:
            self.switches.add(feature, partial(self._note, feature))

    def _note(self, feature: Feature, on: bool) -> None:
        self.turned.append((feature, on))


class Core:
    """vLLM's client of its engine cores, one for each rank."""

    def __init__(self, *ranks: Rank) -> None:
        self.ranks = ranks

    async def call_utility_all_async(self, method: str, *arguments: object) -> list[object]:
        """Call each rank's `EngineCore.scheduler`."""
        assert method == UTILITY
        command, given = cast("tuple[str, dict[str, object]]", arguments)
        return [answer(cast("LendingScheduler", rank), command, given) for rank in self.ranks]


class OlderCore:
    """The same before there was a call for all answers."""

    def __init__(self, *ranks: Rank) -> None:
        self._core = Core(*ranks)

    async def call_utility_async(self, method: str, *arguments: object) -> object:
        """Call all ranks and answer as the first does."""
        return (await self._core.call_utility_all_async(method, *arguments))[0]


class FailingCore:
    """An engine that cannot be asked, for a reason of vLLM's."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def call_utility_all_async(self, *_: object) -> list[object]:
        """Fail."""
        raise self._error


async def server(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer as vLLM itself does whatever is not Aqua's."""
    del receive
    body = scope["path"].encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


def call(
    core: Core | OlderCore | FailingCore,
    method: str,
    path: str,
    body: object = None,
    token: str | None = TOKEN,
) -> httpx.Response:
    app = SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(engine_core=core)))
    middleware = AquaMiddleware(server)

    async def run(scope: Scope, receive: Receive, send: Send) -> None:
        await middleware({**scope, "app": app}, receive, send)

    async def ask() -> httpx.Response:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        transport = httpx.ASGITransport(app=run)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
            content = body if isinstance(body, bytes) else json.dumps(body) if body else None
            return await http.request(method, path, content=content, headers=headers)

    return asyncio.run(ask())


@pytest.fixture(autouse=True)
def admin_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AQUA_ADMIN_TOKEN", TOKEN)


# --- Switches ----------------------------------------------------------------------------------


def test_a_switch_is_turned_once_for_each_change() -> None:
    rank = Rank(Feature.SLICING, Feature.PAGING)
    for on in (True, False, False, True):
        rank.switches.change(SwitchState(paging=on))
    assert rank.turned == [(Feature.PAGING, False), (Feature.PAGING, True)]
    assert rank.switches.states() == SwitchState(slicing=True, paging=True)


def test_what_the_engine_has_not_is_refused_and_nothing_is_turned() -> None:
    rank = Rank(Feature.SLICING)
    with pytest.raises(ConfigError, match="lending") as refused:
        rank.switches.change(SwitchState(slicing=False, lending=False))
    assert "slicing" in refused.value.remedy
    assert rank.turned == []


def test_a_change_asks_for_a_step_that_tells_it() -> None:
    switches = Rank(Feature.SLICING).switches
    for on in (True, False):
        switches.change(SwitchState(slicing=on))
        assert switches.has_changed is not on
    assert switches.levels() == {"slicing_on": 0.0}


# --- The admin API -----------------------------------------------------------------------------


def test_every_rank_is_turned_and_answers_for_itself() -> None:
    ranks = Rank(Feature.SLICING, Feature.PAGING), Rank(Feature.SLICING, Feature.PAGING)
    answered = call(Core(*ranks), "PATCH", "/aqua/switches", {"paging": False})
    position = {"slicing": True, "paging": False, "lending": None}
    assert answered.json() == {"engines": [position, position]}
    assert [rank.turned for rank in ranks] == [[(Feature.PAGING, False)]] * 2
    assert call(Core(*ranks), "GET", "/aqua/switches").json() == answered.json()


def test_a_vllm_that_answers_for_the_first_rank_only_will_do() -> None:
    ranks = Rank(Feature.SLICING), Rank(Feature.SLICING)
    answered = call(OlderCore(*ranks), "PATCH", "/aqua/switches", {"slicing": False})
    assert [each["slicing"] for each in answered.json()["engines"]] == [False]
    assert [len(rank.turned) for rank in ranks] == [1, 1]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "named"),
    [
        ("PATCH", "/aqua/switches", {"pagign": False}, 422, "pagign"),
        ("PATCH", "/aqua/switches", {"paging": "off"}, 422, "paging"),
        ("PATCH", "/aqua/switches", {"lending": False}, 400, "lending"),
        ("PATCH", "/aqua/switches", b"{", 422, "JSON"),
        ("PATCH", "/aqua/switches", [1], 422, "object"),
        ("PATCH", "/aqua/switches", b" " * 70_000, 413, "bytes"),
        ("DELETE", "/aqua/switches", None, 405, "DELETE"),
        ("GET", "/aqua/switch", None, 404, "/aqua/switches"),
    ],
)
def test_what_is_wrong_is_refused_with_what_would_be_right(
    method: str, path: str, body: object, status: int, named: str
) -> None:
    rank = Rank(Feature.SLICING, Feature.PAGING)
    refused = call(Core(rank), method, path, body)
    assert refused.status_code == status
    assert named in refused.text
    assert refused.json()["remedy"]
    assert rank.turned == []


@pytest.mark.parametrize("token", [None, "", "another-operators-token"])
def test_without_the_admin_token_nothing_is_answered(token: str | None) -> None:
    refused = call(Core(Rank(Feature.SLICING)), "GET", "/aqua/switches", token=token)
    assert refused.status_code == 401
    assert "slicing" not in refused.text


def test_half_a_command_of_a_client_that_went_away_is_none() -> None:
    rank = Rank(Feature.PAGING)
    core = SimpleNamespace(engine_core=Core(rank))
    scope = {
        "type": "http",
        "method": "PATCH",
        "path": "/aqua/switches",
        "headers": [(b"authorization", f"Bearer {TOKEN}".encode())],
        "app": SimpleNamespace(state=SimpleNamespace(engine_client=core)),
    }
    parts: Iterator[Message] = iter(
        [
            {"type": "http.request", "body": b'{"paging": false}', "more_body": True},
            {"type": "http.disconnect"},
        ]
    )
    sent: list[Message] = []

    async def receive() -> Message:
        return next(parts)

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(AquaMiddleware(server)(scope, receive, send))
    assert (rank.turned, sent) == ([], [])


def test_an_engine_without_an_admin_token_refuses_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AQUA_ADMIN_TOKEN")
    refused = call(Core(Rank(Feature.SLICING)), "GET", "/aqua/switches")
    assert refused.status_code == 403
    assert "AQUA_ADMIN_TOKEN" in refused.json()["remedy"]


def test_another_scheduler_is_named_as_what_is_missing() -> None:
    error = f"Call to {UTILITY} method failed: 'Scheduler' object is not callable"
    refused = call(FailingCore(RuntimeError(error)), "GET", "/aqua/switches")
    assert refused.status_code == 400
    assert "--scheduler-cls" in refused.json()["remedy"]


@pytest.mark.parametrize(
    "error",
    [
        OverflowError("can't serialize ints < -2**63 or > 2**64 - 1"),
        UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"),
    ],
)
def test_what_no_message_can_carry_is_its_callers_fault(error: Exception) -> None:
    refused = call(FailingCore(error), "PUT", "/aqua/pins/a", {"prompt_token_ids": [1 << 70]})
    assert refused.json()["code"] == "request_invalid"


def test_other_paths_are_vllms() -> None:
    assert call(Core(), "POST", "/v1/completions", {"a": 1}, token=None).text == "/v1/completions"


def test_tenants_are_listed_with_what_they_were_served() -> None:
    accounts = TenantAccounts(TenantSettings(weights={"a": 2.0}))
    accounts.added(RequestView("r", 0.0, prompt_tokens=100, tenant="a"))
    accounts.admitted("r")
    accounts.generated("r", 50)
    rank = Rank(Feature.SLICING)
    rank.accounts = accounts
    listed = call(Core(rank), "GET", "/aqua/tenants").json()
    assert listed == {"engines": [{"a": {"weight": 2.0, "served": 100.0, "waiting": 0}}]}
    refused = call(Core(Rank(Feature.SLICING)), "GET", "/aqua/tenants")
    assert "tenants" in refused.json()["remedy"]


def test_a_prefix_is_pinned_listed_and_let_go_by_its_id() -> None:
    rank = Rank(Feature.PAGING)
    core = Core(rank)
    tokens = {"prompt_token_ids": list(range(20_000)), "ttl_s": 60}
    refused = call(core, "PUT", "/aqua/pins/system", tokens)
    assert refused.status_code == 400
    assert "prefix_tier" in refused.json()["remedy"]
    rank.pins = PrefixPinTable(BlockTable(8), 0.5, lambda pin: Prefix(2, pin.prompt_token_ids[:2]))
    made = call(core, "PUT", "/aqua/pins/system", tokens).json()["engines"]
    assert [(each["id"], each["blocks"], each["present_blocks"]) for each in made] == [
        ("system", 2, 0)
    ]
    assert rank.switches.has_changed, "an idle engine tells of it"
    listed = call(core, "GET", "/aqua/pins").json()["engines"]
    assert [(each["pinned_blocks"], each["limit_blocks"]) for each in listed] == [(2, 4)]
    for method, path, body, status in (
        ("PUT", "/aqua/pins/system", {"prompt_token_ids": "text"}, 422),
        ("PUT", "/aqua/pins/a%2Fb", tokens, 422),
        ("PUT", "/aqua/pins", tokens, 405),
        ("DELETE", "/aqua/pins/other", None, 404),
        ("GET", "/aqua/pins/system", None, 405),
    ):
        assert call(core, method, path, body).status_code == status, (method, path)
    left = call(core, "DELETE", "/aqua/pins/system").json()
    assert left == {"engines": [{"pins": [], "pinned_blocks": 0, "limit_blocks": 4}]}


class EvictingRank(Rank):
    """A rank that has one evicted request, or none, and nothing else."""

    def __init__(self, *evicted: str) -> None:
        super().__init__(Feature.PAGING)
        self.evicted = list(evicted)

    def evictions(self) -> list[dict[str, str]]:
        return [{"request_id": name} for name in self.evicted]

    def evict(self, wanted: EvictionRequest) -> list[dict[str, str]]:
        self.evicted += wanted.request_ids or []
        return self.evictions()

    def resume_evicted(self, name: str) -> None:
        if name not in self.evicted:
            raise UnknownResourceError(f"no {name}")
        self.evicted.remove(name)


def test_a_rank_that_does_not_know_a_request_is_no_error_where_another_does() -> None:
    core = Core(EvictingRank("a"), EvictingRank())
    assert call(core, "DELETE", "/aqua/evictions/a").json() == {
        "engines": [{"evictions": []}, None]
    }
    refused = call(core, "DELETE", "/aqua/evictions/a")
    assert refused.status_code == 404
    assert call(core, "POST", "/aqua/evictions", {"request_ids": ["b"], "hold_s": 5}).json() == {
        "engines": [{"evictions": [{"request_id": "b"}]}] * 2
    }
    assert call(core, "GET", "/aqua/evictions").json()["engines"][1] == {
        "evictions": [{"request_id": "b"}]
    }
    assert call(core, "POST", "/aqua/evictions", {"hold_s": 5}).status_code == 422
    stock = call(Core(Rank(Feature.LENDING)), "POST", "/aqua/evictions", {"count": 1})
    assert stock.status_code == 400
    assert "AquaScheduler" in stock.json()["remedy"]


# --- A start without a coordinator -------------------------------------------------------------


def test_a_start_without_a_coordinator_goes_on_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    look_for_coordinator(load_settings(coordinator_url=NOWHERE), is_required=False)
    assert NOWHERE in caplog.text
    assert "joins when one appears" in caplog.text


def test_a_start_that_requires_a_coordinator_is_refused() -> None:
    with pytest.raises(UnavailableError, match=NOWHERE) as refused:
        look_for_coordinator(load_settings(coordinator_url=NOWHERE), is_required=True)
    assert "AQUA_COORDINATOR_URL" in refused.value.remedy
