"""OpenAI's own client through a real batch service to a real engine process, online."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from harness.batch_service import BatchServiceProcess, chat_line, submit, wait_until
from harness.bounds import HANG_S
from harness.counting_server import CountingServer


@pytest.fixture(scope="module")
def service(
    engine: CountingServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BatchServiceProcess]:
    # Of two engines one is away: it is passed over.
    engines = ["http://127.0.0.1:9", engine.url]
    folder = tmp_path_factory.mktemp("batch")
    with BatchServiceProcess(folder, engines, engine_concurrency="2") as service:
        yield service


@pytest.fixture
def client(service: BatchServiceProcess) -> openai.OpenAI:
    return service.client().with_options(max_retries=0)


def test_chats_completions_and_embeddings_are_answered_by_an_engine(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert chat.choices[0].message.content == "hi was asked"
    completion = client.completions.create(model="m", prompt="two words")
    assert completion.choices[0].text == "two words was asked"
    found = client.embeddings.create(model="m", input="four", encoding_format="float")
    assert found.data[0].embedding == [4.0]


def test_tokens_stream_as_they_come(client: openai.OpenAI, engine: CountingServer) -> None:
    """The stream has begun while its end is far; leaving it breaks the request off."""
    gone = sum(engine.counts()["gone"].values())
    with client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "please stay"}], stream=True
    ) as stream:
        words = (chunk.choices[0].delta.content for chunk in stream)
        assert [next(words), next(words)] == ["please", "stay"]
    engine.wait_for("gone", gone + 1)
    whole = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "a b c"}], stream=True
    )
    assert [chunk.choices[0].delta.content for chunk in whole] == ["a", "b", "c"]


def test_a_caller_that_leaves_before_an_answer_breaks_it_off(
    service: BatchServiceProcess, engine: CountingServer
) -> None:
    began, gone = (sum(engine.counts()[kind].values()) for kind in ("began", "gone"))
    body = {"model": "m", "prompt": "hold leaving"}
    request = httpx.Request("POST", f"{service.url}/v1/completions", json=body)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection((request.url.host, request.url.port or 80), HANG_S) as caller:
        caller.sendall(f"POST {request.url.path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        engine.wait_for("began", began + 1)
    engine.wait_for("gone", gone + 1)


def test_an_engines_refusal_comes_through_as_it_is(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no such model"):
        client.completions.create(model="m", prompt="refuse this")
    with pytest.raises(openai.InternalServerError, match="out of memory"):
        client.completions.create(model="m", prompt="fail now")


def test_models_are_those_of_the_engines_that_answer(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["m"]
    assert client.models.retrieve("m").owned_by == "test"
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        client.models.retrieve("other")


def test_tiers_are_told_to_the_engine_and_flex_takes_a_place_of_batches(
    client: openai.OpenAI, engine: CountingServer
) -> None:
    for tier in ("auto", "default", "priority", "flex"):
        client.completions.create(
            model="m", prompt=f"tier {tier}", extra_body={"service_tier": tier}
        )
    counts = engine.counts()
    assert counts["online"] == {"tier priority": 1}
    assert {p: n for p, n in counts["offline"].items() if p.startswith("tier")} == {"tier flex": 1}
    with pytest.raises(openai.BadRequestError, match="service_tier must be one of"):
        client.completions.create(model="m", prompt="x", extra_body={"service_tier": "gold"})
    began = sum(counts["began"].values())
    batch = submit(client, [chat_line(f"{i}", f"hold places {i}") for i in range(2)])
    engine.wait_for("began", began + 2)
    with pytest.raises(openai.RateLimitError, match="no engine has room for flex") as caught:
        client.completions.create(model="m", prompt="y", extra_body={"service_tier": "flex"})
    assert caught.value.response.headers["retry-after"] == "1"
    assert client.completions.create(model="m", prompt="y").choices[0].text == "y was asked"
    engine.release("places")
    assert wait_until(client, batch.id).status == "completed"


@pytest.mark.parametrize("body", [b"{", b"[]", b""])
def test_a_body_that_is_no_request_is_refused_before_any_engine(
    service: BatchServiceProcess, body: bytes
) -> None:
    answer = httpx.post(f"{service.url}/v1/chat/completions", content=body, timeout=HANG_S)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_without_any_engine_requests_are_told_to_come_again(tmp_path: Path) -> None:
    with BatchServiceProcess(tmp_path, ["http://127.0.0.1:9"]) as service:
        client = service.client().with_options(max_retries=0)
        with pytest.raises(openai.InternalServerError, match="no engine can be reached") as caught:
            client.completions.create(model="m", prompt="x")
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"
        with pytest.raises(openai.InternalServerError, match="no engine tells its models"):
            client.models.list()


def test_a_queue_at_the_engine_lets_batches_run_less_at_once(tmp_path: Path) -> None:
    """What vLLM tells of its queue reaches the limit; the service tells the limit itself."""
    with CountingServer() as crowded, BatchServiceProcess(tmp_path, [crowded.url]) as service:
        limit = f'aqua_batch_engine_limit{{engine="{crowded.url}"}}'
        assert f"{limit} 16.0" in httpx.get(f"{service.url}/metrics", timeout=HANG_S).text
        client = service.client()
        batch = submit(client, [chat_line(f"{i}", f"hold all {i}") for i in range(17)])
        crowded.wait_for("began", 16)
        told = httpx.get(f"{service.url}/metrics", timeout=HANG_S).text
        assert "aqua_batch_open_requests 17.0" in told
        assert "aqua_batch_late_batches 0.0" in told
        crowded.tell_metrics("vllm:num_requests_waiting 4.0\n")
        while f"{limit} 8.0" not in httpx.get(f"{service.url}/metrics", timeout=HANG_S).text:
            pass  # The metrics have no event; looks are a second apart.
        crowded.release("all")
        assert wait_until(client, batch.id).status == "completed"
