from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from aqua_batch import records
from aqua_batch.bodies import (
    CHAT_URL,
    COMPLETION_URL,
    ChatBody,
    CompletionBody,
    Problem,
    output_limit,
    problem_of,
    prompt_parts,
    run_problem,
    sampling,
)
from aqua_batch.records import RejectionCode, read_batch
from aqua_batch.tokenization import tokenize
from aqua_batch.tokens import BYTE_TOKENIZER
from aqua_protocol.errors import ConfigError

MESSAGES = [{"role": "user", "content": "hi"}]


def row(custom_id: str, body: dict[str, Any], url: str = COMPLETION_URL) -> bytes:
    return json.dumps({"custom_id": custom_id, "url": url, "body": body}).encode()


def form_problem(url: str, body: dict[str, Any]) -> Problem | None:
    try:
        (ChatBody if url == CHAT_URL else CompletionBody).model_validate(body)
    except ValidationError as error:
        return problem_of(error)
    return None


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ("text", ["text"]),
        (["one", "two"], ["one", "two"]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
    ],
)
def test_prompts_are_texts_or_token_ids_one_or_several(prompt: Any, parts: list[Any]) -> None:  # noqa: ANN401 - JSON
    assert form_problem(COMPLETION_URL, {"prompt": prompt}) is None
    assert prompt_parts(prompt) == parts


@pytest.mark.parametrize(
    "prompt", [None, "", [], [""], [[]], ["a", 1], [1, "a"], [True], [-1], [2**31], [[1], [2**40]]]
)
def test_what_is_no_prompt_is_refused(prompt: Any) -> None:  # noqa: ANN401 - JSON
    problem = form_problem(COMPLETION_URL, {"prompt": prompt})
    assert problem is not None
    assert problem.param == "prompt"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (3, "content"),
        (["text"], "content[0]"),
        ([{"type": "text"}], "content[0].text"),
        ([{"type": "text", "text": "a"}, {"text": "b"}], "content[1].type"),
    ],
)
def test_what_is_no_message_is_refused_with_its_place(content: Any, param: str) -> None:  # noqa: ANN401 - JSON
    problem = form_problem(CHAT_URL, {"messages": [{"role": "user", "content": content}]})
    assert problem is not None
    assert problem.param == f"messages[0].{param}"


def test_a_limit_that_is_not_given_is_openais() -> None:
    assert output_limit(COMPLETION_URL, {}) == 16
    assert output_limit(COMPLETION_URL, {"max_tokens": None}) == 16
    assert output_limit(CHAT_URL, {}) is None
    assert output_limit(CHAT_URL, {"max_completion_tokens": None, "max_tokens": 7}) == 7
    assert output_limit(CHAT_URL, {"max_completion_tokens": 5, "max_tokens": 7}) == 5


@pytest.mark.parametrize(
    "wish",
    [
        {"tools": [{"type": "function"}]},
        {"logprobs": True},
        {"logprobs": 0},
        {"response_format": {"type": "json_object"}},
        {"stream": True},
        {"echo": True},
        {"best_of": 3},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"temperature": True},
        {"temperature": 10**400},
        {"top_p": 0},
        {"seed": 2**63},
        {"stop": [""]},
        {"stop_token_ids": ["x"]},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {"5": 1000}},
        {"min_tokens": 6},
    ],
    ids=str,
)
def test_a_wish_that_cannot_be_met_is_refused_by_name_and_not_left_out(
    wish: dict[str, Any],
) -> None:
    problem = run_problem(COMPLETION_URL, {"prompt": "x", "max_tokens": 5, **wish})
    assert problem is not None
    assert next(iter(wish)) in problem.message


def test_a_wish_that_changes_nothing_is_no_reason_to_refuse() -> None:
    harmless = {
        "tools": [],
        "logprobs": False,
        "response_format": {"type": "text"},
        "stream": False,
        "best_of": 1,
        "user": "somebody",
        "temperature": None,
        "seed": -3,
    }
    assert run_problem(CHAT_URL, {"messages": MESSAGES, **harmless}) is None
    assert sampling({**harmless, "logit_bias": {"7": -1.5}}) == {
        "seed": -3,
        "logit_bias": {7: -1.5},
    }


def test_pictures_are_refused_where_a_request_is_run_and_not_where_it_is_ordered() -> None:
    parts = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {}}]
    body = {"messages": [{"role": "user", "content": parts}]}
    assert form_problem(CHAT_URL, body) is None
    problem = run_problem(CHAT_URL, body)
    assert problem is not None
    assert problem.param == "body.messages[0].content[1]"


# --- Files ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        rb'{"custom_id": "half \ud800", "url": "/v1/completions", "body": {"prompt": "x"}}',
        rb'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "\udc00"}}',
        b'{"custom_id": "a", "n": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b"\xff\xfe\x00",
    ],
    ids=["half an id", "half a prompt", "digits", "depth", "bytes"],
)
def test_what_breaks_a_parser_breaks_one_line(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(line + b"\n" + row("good", {"prompt": "x"}))
    batch = read_batch(file)
    assert [entry.custom_id for entry in batch.entries] == ["good"]
    assert [each.code for each in batch.rejections] == [RejectionCode.INVALID_JSON]


def test_whole_characters_in_two_halves_are_text(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(
        rb'{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "\ud83d\ude00"}}'
    )
    tokenized = tokenize(read_batch(file), BYTE_TOKENIZER, longest_tokens=None)
    assert bytes(tokenized.prompts.prompt(0)).decode() == "😀"


def test_a_line_too_long_to_read_is_one_rejected_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "LONGEST_LINE_BYTES", 200)
    file = tmp_path / "in.jsonl"
    long = row("long", {"prompt": "x" * 700})
    file.write_bytes(b"\n".join([row("a", {"prompt": "x"}), long, row("b", {"prompt": "y"})]))
    batch = read_batch(file)
    assert [(entry.custom_id, entry.line) for entry in batch.entries] == [("a", 1), ("b", 3)]
    assert [body["prompt"] for body in batch.bodies(batch.entries)] == ["x", "y"]
    assert [each.line for each in batch.rejections] == [2]


def test_a_zipped_file_is_read_and_its_copy_goes_with_the_batch(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(gzip.compress(b"\xef\xbb\xbf" + row("a", {"prompt": "x"}) + b"\r\n"))
    batch = read_batch(file)
    copy = batch.content.path
    assert copy != file
    assert [body["prompt"] for body in batch.bodies(batch.entries)] == ["x"]
    del batch
    assert not copy.exists()
    file.write_bytes(file.read_bytes()[:-6])
    with pytest.raises(ConfigError, match="not a whole gzip"):
        read_batch(file)


def test_each_answer_that_a_line_wants_is_a_row_of_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    body = {"prompt": ["left", "right"], "n": 2, "max_tokens": 3}
    file.write_bytes(row("one", {"prompt": "x"}) + b"\n" + row("four", body))
    tokenized = tokenize(read_batch(file), BYTE_TOKENIZER, longest_tokens=None)
    assert tokenized.owner.tolist() == [0, 1, 1, 1, 1]
    assert tokenized.first_rows().tolist() == [0, 1]
    assert bytes(tokenized.prompts.prompt(3)) == b"right"
    assert tokenized.lengths({"four": 40}).tolist() == [-1, 10, 10, 10, 10]


def test_a_prompt_that_fills_the_memory_is_rejected_and_the_others_are_cut_to_it(
    tmp_path: Path,
) -> None:
    file = tmp_path / "in.jsonl"
    rows = [row("big", {"prompt": "x" * 60}), row("small", {"prompt": "y" * 40, "max_tokens": 99})]
    file.write_bytes(b"\n".join(rows))
    words = BYTE_TOKENIZER
    tokenized = tokenize(read_batch(file), words, longest_tokens=100, capacity_tokens=50)
    assert [each.code for each in tokenized.rejections] == [RejectionCode.CONTEXT_LENGTH]
    assert "the memory holds 50" in tokenized.rejections[0].message
    assert tokenized.prompts.limit.tolist() == [10]
