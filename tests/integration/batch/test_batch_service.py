"""OpenAI's own client against a real batch service and a real engine process."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from harness.batch_service import (
    BatchServiceProcess,
    chat_line,
    completed,
    records,
    submit,
    wait_until,
)
from harness.counting_server import CountingServer


@pytest.fixture(scope="module")
def service(
    engine: CountingServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BatchServiceProcess]:
    # A name of two addresses, of which the one for IPv6 has no engine.
    by_name = engine.url.replace("http://127.0.0.1", "dns+http://localhost")
    with BatchServiceProcess(tmp_path_factory.mktemp("batch"), [by_name]) as service:
        yield service


@pytest.fixture
def client(service: BatchServiceProcess) -> openai.OpenAI:
    return service.client()


def test_a_batch_runs_as_in_openais_example(client: openai.OpenAI) -> None:
    batch = submit(client, [chat_line(f"request-{i}", f"prompt {i}") for i in range(50)])
    assert batch.status in {"validating", "in_progress"}
    ended = wait_until(client, batch.id)
    assert ended.status == "completed"
    assert ended.request_counts
    assert (ended.request_counts.total, ended.request_counts.completed) == (50, 50)
    answers = records(client, ended.output_file_id)
    assert [each["custom_id"] for each in answers] == [f"request-{i}" for i in range(50)]
    for i, each in enumerate(answers):
        assert each["response"]["status_code"] == 200
        assert each["error"] is None
        content = each["response"]["body"]["choices"][0]["message"]["content"]
        assert content == f"prompt {i} was asked"
    assert ended.error_file_id is None


@pytest.mark.parametrize("tells", [False, True])
def test_engines_are_told_by_when_a_batch_expires_if_the_operator_says_so(
    tmp_path: Path, *, tells: bool
) -> None:
    with (
        CountingServer() as engine,
        BatchServiceProcess(tmp_path, [engine.url], engine_deadlines=str(tells)) as service,
    ):
        client = service.client()
        batch = wait_until(client, submit(client, [chat_line("a", "prompt")]).id)
        assert batch.expires_at
        window_s = batch.expires_at - batch.created_at
        told = [float(seconds) for seconds in engine.counts()["deadlines"]]
    assert len(told) == tells
    assert all(0 < seconds <= window_s for seconds in told)
    assert all(seconds > window_s / 2 for seconds in told), "it was sent at once"


def test_every_outcome_is_in_one_of_the_two_files(client: openai.OpenAI) -> None:
    good = [chat_line("fine", "fine"), chat_line("again", "shaky at first")]
    refused = chat_line("refused", "refuse this")
    bad = [
        b"{not json\n",
        b"[]\n",
        chat_line("fine", "a second of this id"),
        chat_line("elsewhere", "x", url="/v1/embeddings"),
        b'{"custom_id":"bare","method":"POST","url":"/v1/chat/completions","body":{}}\n',
        b"\n",  # Blank: no line of the batch.
        b'{"custom_id":"get","method":"GET","url":"/v1/chat/completions","body":{"model":"m"}}\n',
    ]
    batch = submit(client, [*good, refused, *bad])
    ended = wait_until(client, batch.id)
    assert ended.status == "completed"
    assert ended.request_counts
    assert ended.request_counts.to_dict() == {"total": 9, "completed": 2, "failed": 7}
    assert [each["custom_id"] for each in records(client, ended.output_file_id)] == [
        "fine",
        "again",
    ]
    first, *others = records(client, ended.error_file_id)
    assert first["custom_id"] == "refused"
    assert first["response"]["status_code"] == 400
    assert first["response"]["body"]["error"]["message"] == "no such model"
    told = [(each["error"]["line"], each["error"]["code"]) for each in others]
    assert told == [
        (4, "invalid_json_line"),
        (5, "invalid_json_line"),
        (6, "duplicate_custom_id"),
        (7, "invalid_url"),
        (8, "invalid_request"),
        (10, "invalid_method"),
    ]
    assert ended.errors
    assert ended.errors.data
    assert [each.line for each in ended.errors.data] == [line for line, _ in told]


def test_a_file_without_a_good_line_fails_its_batch(client: openai.OpenAI) -> None:
    for lines, code in (([b"nonsense\n"], "invalid_json_line"), ([b"\n"], "empty_file")):
        ended = wait_until(client, submit(client, lines).id)
        assert ended.status == "failed"
        assert ended.errors
        assert ended.errors.data
        assert [each.code for each in ended.errors.data] == [code]
        assert ended.output_file_id is None


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (b'\xef\xbb\xbf{"custom_id":"marked"}\n', "invalid_method"),
        (chat_line("nan", "x").replace(b'"m"', b'"m","top_p":NaN'), "invalid_json_line"),
        (chat_line("huge", "x").replace(b'"m"', b'"m","top_p":1e999'), "invalid_request"),
        (chat_line("nul", "x", model="\0"), "invalid_request"),
        (chat_line("long", "x", model="m" * 5000), "invalid_request"),
    ],
)
def test_a_line_that_nobody_can_run_is_named_and_the_rest_runs(
    client: openai.OpenAI, bad: bytes, code: str
) -> None:
    """The first is read with its byte order mark; of the others, engines or PostgreSQL trip."""
    rest = [chat_line("fine", "Infinity"), chat_line("large", "1e999 NaN")]
    ended = wait_until(client, submit(client, [bad, *rest]).id)
    assert ended.status == "completed"
    (error,) = records(client, ended.error_file_id)
    assert (error["error"]["line"], error["error"]["code"]) == (1, code)
    answers = records(client, ended.output_file_id)
    assert [each["custom_id"] for each in answers] == ["fine", "large"]


def test_files_are_listed_read_and_deleted(client: openai.OpenAI) -> None:
    content = chat_line("a", "b")
    files = [
        client.files.create(
            file=(f"../x/{i}.jsonl", content),
            purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        for i in range(3)
    ]
    first = files[0]
    assert (first.filename, first.bytes, first.purpose) == ("0.jsonl", len(content), "batch")
    assert first.expires_at == first.created_at + 3600
    assert client.files.content(first.id).content == content
    newest = client.files.list(limit=2, purpose="batch")
    assert [each.id for each in newest.data] == [files[2].id, files[1].id]
    assert newest.has_more
    everything = [each.id for each in client.files.list(limit=2)]  # The client turns pages.
    assert [each for each in everything if each in {f.id for f in files}] == [
        each.id for each in reversed(files)
    ]
    for each in files:
        assert client.files.delete(each.id).deleted
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.retrieve(first.id)
    assert caught.value.body == {
        "message": f"No such File object: {first.id}",
        "type": "invalid_request_error",
        "param": "id",
        "code": "not_found",
    }


def test_batches_are_listed_with_their_metadata(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", chat_line("a", "b")), purpose="batch")
    made = [
        client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"number": str(number)},
        )
        for number in range(3)
    ]
    page = client.batches.list(limit=2)
    assert [each.id for each in page.data] == [made[2].id, made[1].id]
    assert page.has_more
    after = client.batches.list(limit=1, after=made[1].id)
    assert after.data[0].metadata == {"number": "0"}
    assert made[0].expires_at == made[0].created_at + 86_400


def test_images_tools_and_formats_reach_the_engine_as_they_are(client: openai.OpenAI) -> None:
    """And fields that OpenAI does not know: what an engine takes is its own affair."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0="}}
    content = [{"type": "text", "text": "echo this: \u00e9 \U0001f30a"}, image]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    schema = {"name": "s", "schema": {"type": "object", "maximum": 1e-7}, "strict": True}
    body: dict[str, Any] = {
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "tools": [tool],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": schema},
        "vllm_xargs": {"big": 2**70, "none": None, "share": 0.1},
    }
    line = {"custom_id": "all", "method": "POST", "url": "/v1/chat/completions", "body": body}
    ended = wait_until(client, submit(client, [json.dumps(line).encode() + b"\n"]).id)
    (record,) = records(client, ended.output_file_id)
    answer = record["response"]["body"]["choices"][0]["message"]["content"]
    assert json.loads(answer) == body
    extra = {"vllm_xargs": body.pop("vllm_xargs")}
    online = client.chat.completions.create(**body, extra_body=extra)
    assert online.choices[0].message.content
    assert json.loads(online.choices[0].message.content) == body | extra


def test_embeddings_are_a_batch_of_their_own(client: openai.OpenAI) -> None:
    body = {"model": "m", "input": "four", "dimensions": 1, "encoding_format": "float"}
    line = {"custom_id": "e", "method": "POST", "url": "/v1/embeddings", "body": body}
    content = json.dumps(line).encode() + b"\n"
    ended = wait_until(client, submit(client, [content], endpoint="/v1/embeddings").id)
    (record,) = records(client, ended.output_file_id)
    assert record["response"]["body"]["data"][0]["embedding"] == [4.0]


def test_what_is_not_served_is_refused_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="/v1/responses is not served"):
        client.responses.create(model="m", input="hello")
    with pytest.raises(openai.NotFoundError, match="/v1/images is not served"):
        client.images.generate(prompt="a lease")
    file = client.files.create(file=("in.jsonl", chat_line("a", "b")), purpose="batch")
    with pytest.raises(openai.NotFoundError, match="batches of /v1/responses are not served"):
        client.batches.create(
            input_file_id=file.id, endpoint="/v1/responses", completion_window="24h"
        )
    with pytest.raises(openai.BadRequestError, match="fine-tune"):
        client.files.create(file=b"x", purpose="fine-tune")


def test_a_cancelled_batch_is_broken_off_at_the_engine(
    client: openai.OpenAI, engine: CountingServer
) -> None:
    gone, began = (sum(engine.counts()[kind].values()) for kind in ("gone", "began"))
    lines = [chat_line("fine", "fine and quick")]
    lines += [chat_line(f"held-{i}", f"hold for cancelling {i}") for i in range(100)]
    batch = submit(client, lines)
    wait_until(client, batch.id, lambda seen: completed(seen) > 0)
    engine.wait_for("began", began + 10)
    with pytest.raises(openai.BadRequestError, match=f"is the input of {batch.id}"):
        client.files.delete(batch.input_file_id)
    cancelled = client.batches.cancel(batch.id)
    assert cancelled.status == "cancelling"
    ended = wait_until(client, batch.id)
    assert ended.status == "cancelled"
    assert ended.cancelled_at
    engine.wait_for("gone", gone + sum("cancelling" in each for each in engine.counts()["began"]))
    assert [each["custom_id"] for each in records(client, ended.output_file_id)] == ["fine"]
    errors = records(client, ended.error_file_id)
    assert [each["custom_id"] for each in errors] == [f"held-{i}" for i in range(100)]
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a batch with status"):
        client.batches.cancel(batch.id)


def test_a_batch_expires_with_its_window(client: openai.OpenAI) -> None:
    # On a busy machine the first may not be answered within a second, either: then it expires, too.
    for window in ("1s", "10s", "100s"):
        batch = submit(client, [chat_line("a", "fine"), chat_line("b", "hold for expiry")], window)
        ended = wait_until(client, batch.id)
        assert ended.status == "expired"
        assert ended.expired_at
        answered = records(client, ended.output_file_id) if ended.output_file_id else []
        late = records(client, ended.error_file_id)
        assert sorted(each["custom_id"] for each in (*answered, *late)) == ["a", "b"]
        assert "b" in {each["custom_id"] for each in late}
        for each in late:
            assert each["error"] == {
                "code": "batch_expired",
                "message": "This request could not be executed before the completion window "
                "expired.",
            }
        if answered:
            return
    pytest.fail("no window was long enough for one answer")


def test_a_batch_runs_in_blendserves_order_once_that_is_found(tmp_path: Path) -> None:
    heads = [f"{letter} " + "the same beginning of many " * 20 for letter in "ab"]
    lines = [chat_line(str(i), f"{heads[i % 2]} {i}") for i in range(40)]
    with (
        CountingServer() as engine,
        BatchServiceProcess(
            tmp_path, [engine.url], order="foresight", engine_concurrency="1"
        ) as service,
    ):
        client = service.client()
        # A held request has the only place until the order is there.
        batch = submit(client, [chat_line("held", "hold them"), *lines])
        engine.wait_for("began", 1)
        assert service.wait_to_say("batch ordered")["requests"] == 41
        engine.release("them")
        assert completed(wait_until(client, batch.id)) == 41
        first = [prompt[0] for prompt in engine.counts()["began"]][2:]  # One was leased before.
        assert sum(a != b for a, b in itertools.pairwise(first)) <= 3
