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


def test_a_table_without_rows_is_its_head(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("Batches", ("id", "status"), [])
    assert "status" in capsys.readouterr().out
