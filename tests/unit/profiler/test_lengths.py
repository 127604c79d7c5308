"""Lengths: lenient on names, strict on values, fair and even in the drawing."""

from __future__ import annotations

import gzip
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from aqua_profiler.errors import LengthsInvalidError
from aqua_profiler.load.lengths import lengths_of, read_lengths


@pytest.mark.parametrize(
    "header",
    [
        "prompt_tokens,output_tokens",
        "Prompt-Tokens, Output-Tokens",
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "input_len;output_len",
        "prompt_tokens\toutput_tokens",
        "t_s,model,prompt_tokens,output_tokens,total_tokens",
    ],
)
def test_columns_are_found_by_any_common_name(tmp_path: Path, header: str) -> None:
    mark = next(mark for mark in ("\t", ";", ",") if mark in header)
    known = {"t_s": "7", "TIMESTAMP": "7", "model": "m", "total_tokens": "30"}
    lengths = iter(["10", "20"])
    row = mark.join(known.get(name) or next(lengths) for name in header.split(mark))
    path = tmp_path / "lengths.csv"
    path.write_text(f"{header}\n{row}\n")
    assert read_lengths(path).pairs == ((10, 20),)


def test_a_trace_of_json_lines_and_a_zipped_file_are_read_alike(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 1, "input_length": 10, "output_length": 20, "hash_ids": [1]}\n')
    zipped = tmp_path / "lengths.csv.gz"
    zipped.write_bytes(gzip.compress(b"prompt_tokens,output_tokens\n10,20\n"))
    assert read_lengths(trace) == read_lengths(zipped)


@pytest.mark.parametrize("value", ["-1", "0", "x", "", "1.5", "nan", "inf", "1e99"])
def test_a_value_that_is_no_count_is_refused_with_its_line(tmp_path: Path, value: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(f"prompt_tokens,output_tokens\n5,6\n{value},6\n")
    with pytest.raises(LengthsInvalidError, match="line 3"):
        read_lengths(path)


@pytest.mark.parametrize(
    "content", ["", "prompt_tokens,output_tokens\n", "a,b\n1,2\n", "{nonsense\n"]
)
def test_a_file_without_requests_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(content)
    with pytest.raises(LengthsInvalidError):
        read_lengths(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("lengths.csv", b"prompt_tokens,output_tokens\n" + b"9" * 200_000 + b",3\n"),
        ("lengths.jsonl", b'{"prompt_tokens": ' + b"[" * 100_000),
        (
            "lengths.csv.gz",
            gzip.compress(b"prompt_tokens,output_tokens\n1,2\n", mtime=0)[:10] + b"\xff" * 9,
        ),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LengthsInvalidError, match=name):
        read_lengths(tmp_path / name)


def test_every_row_is_drawn_about_as_often_as_any_other() -> None:
    lengths = lengths_of([(number + 1, (number * 37) % 100 + 1) for number in range(100)])
    counts = Counter(islice(lengths.drawn(1), 64 * 500))
    assert set(counts) == set(lengths.pairs)
    assert max(counts.values()) < 3 * min(counts.values())


def test_any_stretch_of_requests_carries_nearly_the_same_work() -> None:
    lengths = lengths_of([(number + 1, (number * 37) % 100 + 1) for number in range(1000)])
    drawn = list(islice(lengths.drawn(1), 64 * 20))
    usual = sum(output for _, output in lengths.pairs) / len(lengths.pairs)
    for at in range(0, len(drawn), 64):
        mean = sum(output for _, output in drawn[at : at + 64]) / 64
        assert abs(mean / usual - 1) < 0.03


def test_requests_that_exceed_the_context_are_left_out_or_refused() -> None:
    lengths = lengths_of([(10, 10), (100, 10)])
    assert lengths.fitting(50).pairs == ((10, 10),)
    with pytest.raises(LengthsInvalidError):
        lengths.fitting(5)
