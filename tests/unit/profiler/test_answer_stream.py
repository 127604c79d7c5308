"""Event streams: tokens, ends, and all that is neither."""

from __future__ import annotations

import json

import pytest

from aqua_profiler.errors import EndpointGarbledError, EndpointRefusedError
from aqua_profiler.load.endpoint import AnswerStream


def _event(**choice: object) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def test_pieces_of_text_are_counted_however_the_bytes_are_cut() -> None:
    data = (
        _event(text="a", finish_reason=None)
        + b": keep-alive\n\n"
        + _event(text="", finish_reason=None)
        + _event(text="b", finish_reason="length")
        + b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 3}}\n\n'
        + b"data: [DONE]\n\n"
    )
    for size in (1, 7, len(data)):
        stream = AnswerStream()
        pieces = sum(stream.feed(data[at : at + size]) for at in range(0, len(data), size))
        stream.end()
        assert pieces == stream.tokens == 3
        assert stream.prompt_tokens == 3


def test_the_role_that_opens_a_chat_is_no_token() -> None:
    stream = AnswerStream()
    stream.feed(_event(delta={"role": "assistant", "content": ""}, finish_reason=None))
    assert stream.tokens == 0
    stream.feed(_event(delta={"content": "hi"}, finish_reason=None))
    stream.feed(_event(delta={}, finish_reason="stop"))
    stream.end()
    assert stream.tokens == 1


@pytest.mark.parametrize(
    "data",
    [
        b"<html>bad gateway</html>\n",
        b"data: {not json}\n",
        b"data: 7\n",
        b'data: {"choices": "none"}\n',
        b'data: {"choices": [7]}\n',
    ],
)
def test_nonsense_is_garbled(data: bytes) -> None:
    with pytest.raises(EndpointGarbledError):
        AnswerStream().feed(data)


def test_an_answer_cut_off_is_garbled() -> None:
    stream = AnswerStream()
    stream.feed(_event(text="a", finish_reason=None))
    with pytest.raises(EndpointGarbledError, match="1 tokens"):
        stream.end()


def test_an_answer_without_tokens_is_garbled() -> None:
    stream = AnswerStream()
    stream.feed(b"data: [DONE]\n")
    with pytest.raises(EndpointGarbledError):
        stream.end()


def test_a_short_answer_packed_into_its_end_without_text_is_an_answer() -> None:
    stream = AnswerStream()
    stream.feed(_event(text="", finish_reason="length"))
    stream.feed(b"data: [DONE]\n")
    stream.end()
    assert stream.tokens == 1


def test_an_error_within_the_stream_is_the_endpoints() -> None:
    with pytest.raises(EndpointRefusedError, match="out of memory"):
        AnswerStream().feed(b'data: {"error": {"message": "out of memory"}}\n')
