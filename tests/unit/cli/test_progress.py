"""A terminal sees a bar, a log a line now and then, a program nothing."""

from __future__ import annotations

import io
import sys

import pytest

from aqua_cli import progress


class Terminal(io.StringIO):
    """A standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def show(*, quiet: bool = False, total: float | None = 10, every_s: float | None = None) -> None:
    with progress("searching", total, quiet=quiet, log_every_s=every_s) as shown:
        shown.update(done=3, note="three [of] ten")
        shown.update(title="proving")


@pytest.mark.parametrize("total", [10, None], ids=["bar", "spinner"])
def test_a_terminal_sees_title_and_note(
    monkeypatch: pytest.MonkeyPatch, total: float | None
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    show(total=total)
    assert "proving" in terminal.getvalue()
    assert "three [of] ten" in terminal.getvalue()


def test_who_asked_for_json_sees_nothing_even_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    show(quiet=True, every_s=0.0)
    assert terminal.getvalue() == ""


def test_a_log_sees_nothing_unless_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    show()
    assert capsys.readouterr().err == ""
    show(every_s=0.0)
    assert capsys.readouterr().err == "searching: three [of] ten\nproving\n"
    show(every_s=3600.0)
    assert capsys.readouterr().err == ""
