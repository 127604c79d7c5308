"""The order of an input: prefixes run together, what computes beside what decodes."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqua_batch.policies import Policy
from aqua_batch.service.order import input_order
from aqua_batch.service.order.input_order import BLOCK_BYTES, blocks_of, order_lines
from aqua_batch.service.order.order_task import OrderTask

CHAT = "/v1/chat/completions"
LONG = "Summarise what follows. " * 200


def task_of(folder: Path, lines: Sequence[object], endpoint: str = CHAT) -> OrderTask:
    text = "\n".join(each if isinstance(each, str) else json.dumps(each) for each in lines)
    (folder / "in.jsonl").write_text(text)
    return OrderTask(
        files=f"file://{folder}",
        input_key="in.jsonl",
        endpoint=endpoint,
        policy=Policy.FORESIGHT,
        tokenizer="bytes",
        gpu="A100-80GB",
        model=None,
    )


def chat(prompt: str, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"body": {"model": "m", "messages": messages, "max_tokens": max_tokens}}


@given(st.binary(max_size=300), st.binary(min_size=1, max_size=200))
def test_blocks_of_a_prefix_are_a_prefix_of_the_blocks(prefix: bytes, rest: bytes) -> None:
    whole, head = blocks_of(prefix + rest), blocks_of(prefix)
    shared = len(prefix) // BLOCK_BYTES
    assert np.array_equal(whole[:shared], head[:shared])
    assert len(whole) == -(-len(prefix + rest) // BLOCK_BYTES)
    assert (whole >= 0).all()


def test_blocks_that_differ_have_other_numbers() -> None:
    prompts = [f"{i:064}".encode() for i in range(1000)]
    assert len({int(blocks_of(each)[0]) for each in prompts}) == 1000


def test_requests_of_one_prefix_run_together(tmp_path: Path) -> None:
    heads = [f"{letter} {LONG}" for letter in "abc"]
    order = order_lines(task_of(tmp_path, [chat(f"{heads[i % 3]} {i}", 16) for i in range(30)]))
    assert sorted(order) == list(range(1, 31))
    changes = sum(a % 3 != b % 3 for a, b in itertools.pairwise(order))
    assert changes <= 4  # In the order of the file: 29.


def test_what_decodes_for_long_begins_before_all_prompts_are_computed(tmp_path: Path) -> None:
    computes = [chat(f"{i} {LONG * 4}", 1) for i in range(100)]
    decodes = [chat(f"{i}", 256) for i in range(100)]
    order = order_lines(task_of(tmp_path, [*computes, *decodes])).tolist()
    early = sum(line > 100 for line in order[:100])
    assert early >= 50  # In the order of the file: none.


def test_earlier_batches_tell_which_requests_decode_for_long(tmp_path: Path) -> None:
    """By task, here the response format: prompts share nothing, and no request has a limit."""

    def request(number: int, *, is_long: bool) -> dict[str, Any]:
        prompt = f"{number}" * 40 + ("" if is_long else LONG)
        body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": prompt}]}
        if not is_long:
            body["response_format"] = {"type": "json_object"}
        return {"custom_id": f"{number}", "body": body}

    def answer(number: int, tokens: int) -> dict[str, Any]:
        usage = {"completion_tokens": tokens}
        return {"custom_id": f"{number}", "response": {"body": {"usage": usage}}}

    earlier = [request(i, is_long=i % 2 == 1) for i in range(1000, 1040)]
    answers = [answer(i, 2000 if i % 2 else 2) for i in range(1000, 1040)]
    wrong = [{"custom_id": "1000", "body": ["not an object"]}]
    for name, lines in (
        ("earlier", wrong + earlier),
        ("answers", [*answers, answer(7, 0), "junk"]),
    ):
        (tmp_path / name).write_text("\n".join(map(json.dumps, lines)))
    task = task_of(tmp_path, [request(i, is_long=i >= 100) for i in range(200)])
    known = task.model_copy(update={"earlier": [("earlier", "answers"), ("gone", "gone")]})
    without, order = order_lines(task), order_lines(known)
    assert sorted(order) == sorted(without) == list(range(1, 201))
    first = [sum(line > 100 for line in found[:50]) for found in (without.tolist(), order.tolist())]
    assert first[1] > first[0] + 10, first


def test_a_limit_beyond_all_memory_holds_nothing_up(tmp_path: Path) -> None:
    lines = [chat(f"{i}", 10**15) for i in range(3)]
    lines[0]["body"]["ignore_eos"] = True
    assert sorted(order_lines(task_of(tmp_path, lines))) == [1, 2, 3]


def test_lines_that_are_wrong_are_left_out(tmp_path: Path) -> None:
    wrong: list[object] = ["{", "[]", {"body": 3}, {"body": {"model": "m"}}, "", chat("", 4)]
    order = order_lines(task_of(tmp_path, [*wrong, chat("fine", 4)]))
    assert sorted(order) == [6, 7]  # An engine may take an empty message.
    assert len(order_lines(task_of(tmp_path, ["{"]))) == 0


@pytest.mark.parametrize("prompt", ["text", ["two", "texts"], [1, 2, 3], [[1], [2, 3]]])
def test_completions_are_ordered_whatever_form_their_prompts_have(
    tmp_path: Path, prompt: object
) -> None:
    lines = [{"body": {"model": "m", "prompt": prompt}}] * 2
    assert sorted(order_lines(task_of(tmp_path, lines, "/v1/completions"))) == [1, 2]


def test_a_failure_is_told_without_what_it_was_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = task_of(tmp_path, [chat("secret", 4)]).model_copy(update={"gpu": "secret"})
    monkeypatch.setattr("os.nice", lambda _: 0)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(task.model_dump_json().encode())))
    assert input_order.main() == 1
    assert capsys.readouterr().err == "ConfigError"
