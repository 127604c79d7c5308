"""Tables for people."""

from __future__ import annotations

import pytest

from aqua_cli import print_table


def test_an_id_can_be_copied_from_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    rows = [(f"batch_{'0123456789ab' * 2}", "in_progress", "12345 of 50000", "2026-11-26 16:14")]
    print_table("Batches", ("id", "status", "ended", "created"), rows)
    assert rows[0][0] in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["1", "20", "40"])
def test_no_number_is_cut_however_narrow_a_terminal_is(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    rows = [("ttft_mean_s", "0.028954321", "1234567.89", "+123.45"), ("a", "1", "2", "3")]
    print_table("Replayed", ("", "recorded", "simulated", "difference"), rows)
    text = capsys.readouterr().out
    assert "\u2026" not in text
    assert all(word in text for word in (*rows[0], "recorded", "simulated", "difference"))


def test_a_table_without_rows_is_its_head(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Batches", ("id", "status"), [])
    assert "status" in capsys.readouterr().out
