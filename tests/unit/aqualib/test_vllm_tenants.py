"""Whose a request is and what its priority is worth, from the server to the scheduler."""

from __future__ import annotations

import asyncio
import json
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from aqua_protocol.errors import RequestTooLargeError
from aqualib.engines.vllm.operations.admin_api import MAX_REQUEST_BYTES
from aqualib.engines.vllm.options import read_options
from aqualib.engines.vllm.requests.priority import UrgentPriority, weight_of
from aqualib.engines.vllm.requests.tenant_key import (
    MAX_NAME_LENGTH,
    TenantSource,
    key_name,
    tenant_of,
)
from harness.vllm_middleware import before, through

if TYPE_CHECKING:
    from aqualib.engines.vllm.operations.admin_api import App, Message, Receive, Scope, Send

KEY = "sk-team-b"
SHARING: dict[str, Any] = {"tenants": {}}


def test_a_header_names_the_tenant() -> None:
    got = through({"prompt": "a"}, SHARING, x_aqua_tenant="team-a")
    assert got == {"prompt": "a", "vllm_xargs": {"aqua_tenant": "team-a"}}


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_header_names_a_tenant_in_any_letters(encoding: str) -> None:
    got = through({}, SHARING, ("x-aqua-tenant", "Müller".encode(encoding)))
    assert got["vllm_xargs"] == {"aqua_tenant": "Müller"}


def test_a_header_is_named_in_any_case() -> None:
    got = through({}, {**SHARING, "tenant_headers": ["X-Team"]}, x_team="a")
    assert got["vllm_xargs"] == {"aqua_tenant": "a"}


def test_llm_ds_fairness_id_is_a_tenant() -> None:
    got = through({"vllm_xargs": {"n": 1}}, SHARING, x_llm_d_inference_fairness_id="team-a")
    assert got["vllm_xargs"] == {"n": 1, "aqua_tenant": "team-a"}


def test_the_first_source_counts() -> None:
    claim = {"vllm_xargs": {"aqua_tenant": "claimed"}}
    got = through(claim, SHARING, x_aqua_tenant="gateway")
    assert got["vllm_xargs"]["aqua_tenant"] == "gateway"
    other = {**SHARING, "tenant_sources": ["xargs", "header"]}
    got = through(claim, other, x_aqua_tenant="gateway")
    assert got["vllm_xargs"]["aqua_tenant"] == "claimed"


def test_a_key_is_shown_by_its_digest_only_and_no_claim_counts_against_it() -> None:
    options = {**SHARING, "tenant_sources": ["api_key"]}
    claim = {"vllm_xargs": {"aqua_tenant": "claimed"}}
    got = through(claim, options, authorization=f"Bearer {KEY}", x_aqua_tenant="claimed")
    assert got["vllm_xargs"] == {"aqua_tenant": key_name(KEY)}
    assert KEY not in str(got)
    assert through(claim, options)["vllm_xargs"] == {}, "without a key it is nobody's"


@pytest.mark.parametrize(
    ("more", "headers"),
    [
        ([], {"content_type": "Application/JSON; charset=utf-8"}),
        ([("content-type", "text/plain")], {}),
        ([("authorization", "Bearer made-up")], {}),
    ],
)
def test_headers_are_read_as_vllm_reads_them_so_none_hides_whose_a_request_is(
    more: list[tuple[str, str]], headers: dict[str, str]
) -> None:
    options = {**SHARING, "tenant_sources": ["api_key"]}
    claim = {"vllm_xargs": {"aqua_tenant": "claimed"}}
    got = through(claim, options, *more, authorization=f"Bearer {KEY}", **headers)
    assert got["vllm_xargs"] == {"aqua_tenant": key_name(KEY)}


def test_a_claim_counts_for_nothing_where_headers_alone_do() -> None:
    options = {**SHARING, "tenant_sources": ["header"]}
    assert through({"vllm_xargs": {"aqua_tenant": "claimed"}}, options) == {"vllm_xargs": {}}


def test_sampling_parameters_of_token_ids_say_whose_they_are_likewise() -> None:
    options = {**SHARING, "tenant_sources": ["header"]}
    claim = {"sampling_params": {"extra_args": {"aqua_tenant": "claimed", "n": 1}}}
    got = through(claim, options, x_aqua_tenant="gateway")
    assert got["sampling_params"] == {"extra_args": {"aqua_tenant": "gateway", "n": 1}}
    assert through(claim, options) == {"sampling_params": {"extra_args": {"n": 1}}}


def test_a_body_that_is_nested_too_deeply_is_refused() -> None:
    answer = through(b"[" * 100_000, SHARING, x_aqua_tenant="team-a")
    assert json.loads(answer)["code"] == "request_invalid"


@pytest.mark.parametrize(
    ("content", "options", "headers"),
    [
        ({"prompt": "a"}, SHARING, {}),
        ({"prompt": "a"}, {}, {"x_aqua_tenant": "team-a"}),
        (b"{", SHARING, {"x_aqua_tenant": "team-a"}),
        (b"[1]", SHARING, {"x_aqua_tenant": "team-a"}),
        (b"--part", SHARING, {"x_aqua_tenant": "team-a", "content_type": "multipart/form-data"}),
    ],
)
def test_what_needs_no_tenant_or_is_no_request_goes_on_as_it_is(
    content: object, options: dict[str, Any], headers: dict[str, str]
) -> None:
    assert through(content, options, **headers) == content


def post(vllm: App, part: bytes, gone_after: float = inf) -> tuple[int | None, int]:
    """Post an endless body of such parts: the status, if any, and how many parts were read."""
    parts = 0
    sent: list[Message] = []

    async def receive() -> Message:
        nonlocal parts
        if parts >= gone_after:
            return {"type": "http.disconnect"}
        parts += 1
        return {"type": "http.request", "body": part, "more_body": True}

    async def send(message: Message) -> None:
        sent.append(message)

    async def serve() -> None:
        headers = [(b"content-type", b"application/json"), (b"x-aqua-tenant", b"team-a")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
        await before(vllm, SHARING)(scope, receive, send)

    asyncio.run(serve())
    return (sent[0]["status"] if sent else None), parts


def test_a_body_is_read_once_vllm_asks_for_it_so_nothing_is_held_for_a_stranger() -> None:
    async def refuse(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    assert post(refuse, b"{") == (401, 0)


def test_a_body_without_end_is_refused_whatever_the_server_makes_of_it() -> None:
    async def misread(_: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(RequestTooLargeError):
            await receive()
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b"there was an error"})

    assert post(misread, bytes(MAX_REQUEST_BYTES // 4)) == (413, 5)


def test_half_a_body_of_a_client_that_went_away_is_no_request() -> None:
    told: list[Message] = []

    async def read(_: Scope, receive: Receive, __: Send) -> None:
        told.append(await receive())

    assert post(read, b"{}", gone_after=1) == (None, 1)
    assert told == [{"type": "http.disconnect"}]


def request(extra: dict[str, Any] | None = None, lora: str | None = None) -> Any:  # noqa: ANN401 - vLLM's
    return SimpleNamespace(
        sampling_params=None if extra is None else SimpleNamespace(extra_args=extra or None),
        lora_request=None if lora is None else SimpleNamespace(lora_name=lora),
    )


def test_the_scheduler_finds_the_tenant_by_the_same_order() -> None:
    sources = read_options(SHARING).tenant_sources
    both = request({"aqua_tenant": "team-a"}, "adapter")
    assert tenant_of(both, sources) == "team-a"
    assert tenant_of(both, (TenantSource.LORA, TenantSource.XARGS)) == "adapter"
    assert tenant_of(request({}, "adapter"), sources) == "adapter"
    assert tenant_of(request({}), sources) == ""
    assert tenant_of(request(), sources) == "", "a pooling request"
    assert tenant_of(request({"aqua_tenant": 7}), sources) == ""
    assert len(tenant_of(request({"aqua_tenant": "x" * 1000}), sources)) == MAX_NAME_LENGTH
    assert tenant_of(both, ()) == "", "where tenants do not share, it is not looked for"


@pytest.mark.parametrize(
    ("priority", "urgent", "unit", "weight"),
    [
        (0, "lower", 1, 1.0),
        (0, "higher", 1, 1.0),
        (-1, "lower", 1, 2.0),
        (3, "lower", 1, 1 / 8),
        (99, "lower", 1, 1 / 16),
        (1, "higher", 1, 2.0),
        (-3, "higher", 1, 1 / 8),
        (100, "higher", 25, 16.0),
        (50, "higher", 25, 4.0),
        (-1000, "higher", 25, 1 / 16),
    ],
)
def test_a_priority_weighs_by_the_sign_that_the_deployment_says(
    priority: int, urgent: str, unit: int, weight: float
) -> None:
    assert weight_of(priority, UrgentPriority(urgent), unit) == weight
