"""Requests that no client of OpenAI's sends: each is refused in OpenAI's words, none by 5xx."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from harness.batch_service import BatchServiceProcess
from harness.counting_server import CountingServer
from harness.postgres_process import postgres


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def http(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("batch")
    with CountingServer() as engine:
        if request.param == "sqlite":
            with (
                BatchServiceProcess(folder, [engine.url]) as service,
                httpx.Client(base_url=service.url) as client,
            ):
                yield client
            return
        with (
            postgres() as process,
            BatchServiceProcess(folder, [engine.url], database_url=process.url) as service,
            httpx.Client(base_url=service.url) as client,
        ):
            yield client


@pytest.mark.parametrize(
    "path",
    [
        "files/%00",
        "files/%00/content",
        "files?after=%00",
        "files?purpose=%00",
        "files?after=%ff",
        "files%0A",
        "files?limit=0",
        "batches/%00",
        "batches?after=%00",
        "batches?after=no-such-batch",
        "batches?limit=%D9%A1",
        "batches?limit=101",
    ],
)
def test_a_url_that_names_nothing_is_refused(http: httpx.Client, path: str) -> None:
    answer = http.get(f"/v1/{path}")
    assert answer.status_code in {400, 404}
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", ["v1/batches", "aqua/batches", "healthz", "no-such-path", "docs"])
@pytest.mark.parametrize("host", ["elsewhere.example", "elsewhere.example:8080", "127.0.0.1.x", ""])
def test_a_page_that_lets_its_own_name_point_here_gets_nothing(
    http: httpx.Client, host: str, path: str
) -> None:
    answer = http.get(f"/{path}", headers={"Host": host})
    assert answer.status_code == 421
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "misdirected_request")
    assert "AQUA_BATCH_ALLOWED_HOSTS" in error["message"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:8080"])
def test_names_that_only_this_machine_has_are_answered_to(http: httpx.Client, host: str) -> None:
    assert http.get("/v1/batches", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("method", ["DELETE", "HEAD", "OPTIONS", "TRACE"])
def test_a_method_that_a_url_does_not_have_is_refused(http: httpx.Client, method: str) -> None:
    answer = http.request(method, "/v1/batches")
    assert answer.status_code == 404
    if method != "HEAD":
        assert answer.json()["error"]["code"] == "not_served"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("batches", "[" * 60_000),
        ("batches", '{"a":' * 10_000),
        (
            "batches",
            r'{"input_file_id":"\u0000","endpoint":"/v1/embeddings","completion_window":"1h"}',
        ),
        ("batches/%00/cancel", ""),
        ("chat/completions", "[" * 200_000),
        ("chat/completions", '{"model":"m","service_tier":["flex"]}'),
        ("chat/completions", '{"model":"m","service_tier":{"flex":1}}'),
    ],
)
def test_a_body_that_asks_for_nothing_is_refused(http: httpx.Client, path: str, body: str) -> None:
    answer = http.post(f"/v1/{path}", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
