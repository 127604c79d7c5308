from __future__ import annotations

import io
import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aqua_batch.journal import ResultJournal
from aqua_batch.records import RejectionCode, read_batch, write_errors
from aqua_batch.target import describe
from aqua_batch.tokenization import plan, read_lengths, tokenize
from aqua_batch.tokens import (
    BYTE_TOKENIZER,
    IMAGE_BYTES,
    load_tokenizer,
    plain_chat,
    prompt_tokens,
)
from aqua_protocol.errors import ConfigError
from harness.bounds import HANG_S


def line(custom_id: str = "a", **body: Any) -> str:  # noqa: ANN401 - JSON
    content = {"model": "m", "prompt": "hello", "max_tokens": 5, **body}
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": content}
    )


def chat(custom_id: str, *messages: tuple[str, str]) -> str:
    body = {"messages": [{"role": role, "content": text} for role, text in messages]}
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}
    )


def batch_of(path: Path, *lines: str | bytes) -> Path:
    file = path / "in.jsonl"
    file.write_bytes(b"".join((x.encode() if isinstance(x, str) else x) + b"\n" for x in lines))
    return file


def test_bad_lines_are_named_and_good_ones_kept(tmp_path: Path) -> None:
    file = batch_of(
        tmp_path,
        line("a"),
        '{"custom_id": "b", "url": ',
        line("a"),
        "",
        json.dumps({"custom_id": "c", "url": "/v1/embeddings", "body": {}}),
        json.dumps({"custom_id": "d", "url": "/v1/completions", "body": {"prompt": ""}}),
        line("e", max_tokens=0),
        b'{"custom_id": "\xff"}',
        "[1, 2]",
        json.dumps({"url": "/v1/completions", "body": {"prompt": "x"}}),
        line("f", n=0),
        chat("g", ("user", "hi")),
    )
    batch = read_batch(file)
    assert [(entry.custom_id, entry.line) for entry in batch.entries] == [("a", 1), ("g", 12)]
    assert [(each.line, each.code) for each in batch.rejections] == [
        (2, RejectionCode.INVALID_JSON),
        (3, RejectionCode.DUPLICATE_ID),
        (5, RejectionCode.INVALID_URL),
        (6, RejectionCode.INVALID_REQUEST),
        (7, RejectionCode.INVALID_REQUEST),
        (8, RejectionCode.INVALID_JSON),
        (9, RejectionCode.INVALID_JSON),
        (10, RejectionCode.INVALID_REQUEST),
        (11, RejectionCode.INVALID_REQUEST),
    ]
    assert "line 1 already" in batch.rejections[1].message
    assert batch.rejections[4].param == "body.max_tokens"


def test_lines_are_read_back_byte_for_byte(tmp_path: Path) -> None:
    lines = [line("ä", prompt="größe"), "  " + line("b"), line("c")]
    file = tmp_path / "in.jsonl"
    # A byte order mark, Windows line ends, no end of the last line.
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines).encode())
    batch = read_batch(file)
    read = list(batch.lines(reversed(batch.entries)))
    assert read == [text.encode() for text in reversed(lines)]
    assert next(body["prompt"] for body in batch.bodies(batch.entries)) == "größe"


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"])
def test_an_empty_file_is_said_to_be_empty(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="empty"):
        read_batch(file)


def test_errors_are_written_as_openai_does_with_the_line(tmp_path: Path) -> None:
    batch = read_batch(batch_of(tmp_path, line("a"), line("a")))
    out = io.StringIO()
    write_errors(out, batch.rejections)
    record = json.loads(out.getvalue())
    assert record["custom_id"] == "a"
    assert record["response"] is None
    assert record["error"]["code"] == "duplicate_custom_id"
    assert record["error"]["line"] == 2


def test_prompts_longer_than_the_model_are_rejected_and_limits_cut_to_it(tmp_path: Path) -> None:
    file = batch_of(tmp_path, line("a", prompt="x" * 50), line("b", prompt="y" * 20))
    tokenized = tokenize(read_batch(file), BYTE_TOKENIZER, longest_tokens=23)
    assert [entry.custom_id for entry in tokenized.entries] == ["b"]
    assert tokenized.prompts.limit.tolist() == [3]
    (rejection,) = tokenized.rejections
    assert rejection.code is RejectionCode.CONTEXT_LENGTH
    assert "50 tokens" in rejection.message


def test_a_file_without_any_good_line_is_read_to_its_end(tmp_path: Path) -> None:
    batch = read_batch(batch_of(tmp_path, "{", line("a", n="2")))
    tokenized = tokenize(batch, BYTE_TOKENIZER, longest_tokens=None)
    assert tokenized.prompts.count == len(tokenized.entries) == 0
    assert [each.line for each in tokenized.rejections] == [1, 2]


def test_token_ids_are_taken_as_they_are_and_fixed_lengths_known(tmp_path: Path) -> None:
    file = batch_of(
        tmp_path,
        line("a", prompt=[5, 6, 7], ignore_eos=True, max_tokens=900),
        line("b", max_tokens=9, min_tokens=9),
        line("c"),
    )
    tokenized = tokenize(read_batch(file), BYTE_TOKENIZER, longest_tokens=None)
    assert tokenized.prompts.prompt(0) == [5, 6, 7]
    assert tokenized.prompts.known.tolist() == [900, 9, -1]


def test_lengths_of_an_earlier_run_place_its_requests(tmp_path: Path) -> None:
    names = [f"r{index}" for index in range(40)]
    file = batch_of(
        tmp_path,
        *(line(name, prompt=chr(48 + int(name[1:])) + " text", max_tokens=4000) for name in names),
    )
    earlier = tmp_path / "earlier.jsonl"
    answers = [
        {"custom_id": name, "response": {"body": {"usage": {"completion_tokens": tokens}}}}
        for name, tokens in zip(names, [2] * 20 + [3000] * 20, strict=True)
    ]
    earlier.write_text("".join(json.dumps(each) + "\n" for each in answers) + "rubbish\n")
    tokenized = tokenize(read_batch(file), BYTE_TOKENIZER, longest_tokens=None)
    prepared = plan(tokenized, describe("A100-80GB", None), read_lengths(earlier))
    assert set(prepared.order.requests[:20].tolist()) == set(range(20))


def test_the_byte_tokenizer_says_that_it_is_not_exact() -> None:
    words = load_tokenizer("bytes")
    assert not words.exact
    assert words.text("aß") == [97, 195, 159]
    assert bytes(words.chat([{"role": "user", "content": "hi"}])).decode() == "user: hi\nassistant:"


def test_message_parts_become_text_and_images_are_stood_in_for() -> None:
    def chat_of(image: str) -> str:
        parts = [
            {"type": "text", "text": "see "},
            {"type": "image_url", "image_url": {"url": image}},
        ]
        return plain_chat([{"role": "user", "content": parts}])

    one, other = chat_of("data:,cat"), chat_of("data:,dog")
    assert one.startswith("user: see \n<image_url ")
    assert one == chat_of("data:,cat") != other
    assert len(one) == len(other) > IMAGE_BYTES


def test_tools_are_at_the_beginning_of_a_chat() -> None:
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    (tokens,) = prompt_tokens(BYTE_TOKENIZER, "/v1/chat/completions", body)
    text = bytes(tokens).decode()
    assert text == json.dumps(tools[0]) + "\nuser: hi\nassistant:"


@pytest.mark.parametrize("name", ["no-such-encoding", "./no/such/folder", "nobody/nothing"])
def test_an_unknown_tokenizer_is_an_error_with_a_remedy(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(name)
    assert name in str(caught.value)
    assert caught.value.remedy


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_memory_too_small_for_the_model_is_an_error(tmp_path: Path) -> None:
    config = {
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_hidden_layers": 80,
        "intermediate_size": 28672,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="leaves no memory"):
        describe("A100-80GB", tmp_path)
    assert describe("A100-80GB", tmp_path, capacity_tokens=1000).capacity_tokens == 1000
    with pytest.raises(ConfigError, match="no GPU named"):
        describe("abacus", None)


def result(custom_id: str, tokens: int = 3) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "response": {"body": {"usage": {"completion_tokens": tokens}}},
        "error": None,
    }


def test_a_journal_finds_what_was_finished_and_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with ResultJournal(path) as journal:
        journal.record(result("a", 7))
        journal.record(result("b"))
    whole = path.read_bytes()
    for torn in range(1, 30):
        path.write_bytes(whole + json.dumps(result("c")).encode()[:torn])
        with ResultJournal(path) as journal:
            assert journal.finished == {"a": 7, "b": 3}
            journal.record(result("c"))
        assert [json.loads(x)["custom_id"] for x in path.read_bytes().splitlines()] == [
            "a",
            "b",
            "c",
        ]


def test_a_journal_refuses_a_file_that_is_something_else(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("once upon a time\n")
    with pytest.raises(ConfigError, match="line 1"):
        ResultJournal(path)
    assert path.read_text() == "once upon a time\n"


def _hold(path: str, ready: Any, release: Any) -> None:  # noqa: ANN401 - events
    with ResultJournal(Path(path)):
        ready.set()
        release.wait(HANG_S)


def test_two_runs_do_not_write_one_file(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready, release = context.Event(), context.Event()
    path = tmp_path / "out.jsonl"
    other = context.Process(target=_hold, args=(str(path), ready, release))
    other.start()
    try:
        assert ready.wait(HANG_S)
        with pytest.raises(ConfigError, match="another run"):
            ResultJournal(path)
    finally:
        release.set()
        other.join(30)
    ResultJournal(path).close()


def test_a_result_is_recorded_once(tmp_path: Path) -> None:
    with ResultJournal(tmp_path / "out.jsonl") as journal:
        journal.record(result("a"))
        with pytest.raises(AssertionError):
            journal.record(result("a"))


def test_rows_can_be_taken_out_of_a_tokenized_batch(tmp_path: Path) -> None:
    file = batch_of(tmp_path, *(line(name, prompt=name * 3) for name in "abc"))
    tokenized = tokenize(read_batch(file), BYTE_TOKENIZER, longest_tokens=None)
    part = tokenized.prompts.keep(np.array([2, 0]))
    assert [bytes(part.prompt(index)) for index in range(2)] == [b"ccc", b"aaa"]
