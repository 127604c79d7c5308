"""Documents that people wrote: read as they were meant, or refused with the place."""

from __future__ import annotations

import pytest

from aqua_cli import parse_document


@pytest.mark.parametrize(
    ("text", "is_json", "words"),
    [
        ("a: 1\nb: {c: 1, d: 2, c: 3}\n", False, "'c' is there twice in the mapping of line 2"),
        ('{"a": {"b": 1, "b": 2}}', True, "'b' is there twice"),
        ("[" * 5000, False, "nested too deeply"),
        ("[" * 100_000, True, "nested too deeply"),
        ("a:\n\t- b\n", False, "line 2"),
        ("{", True, "line 1"),
    ],
)
def test_what_a_parser_would_pass_over_is_refused(text: str, is_json: bool, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse_document(text, is_json=is_json)


def test_a_merged_mapping_may_be_overridden() -> None:
    text = "base: &base {a: 1, b: 2}\nnext: &next {<<: *base, a: 3}\nlast: {<<: *next, b: 4}\n"
    assert parse_document(text, is_json=False)["last"] == {"a": 3, "b": 4}
