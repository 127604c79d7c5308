"""Pictures look alike and come out the same twice."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aqua_cli.figures import PALETTE, figure
from aqua_protocol import ConfigError, UnavailableError


def draw(path: Path) -> None:
    with figure(path) as drawing:
        axes = drawing.subplots()
        axes.plot([0, 1], [0, 1], label="ours")
        axes.legend()


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_the_same_drawing_gives_the_same_bytes(tmp_path: Path, ending: str) -> None:
    first, second = tmp_path / f"a{ending}", tmp_path / f"b{ending}"
    draw(first)
    draw(second)
    assert first.read_bytes() == second.read_bytes()
    assert len(first.read_bytes()) > 1000


def test_colours_come_from_the_palette_and_the_style_does_not_leak(tmp_path: Path) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    with figure(tmp_path / "a.svg") as drawing:
        (line,) = drawing.subplots().plot([0, 1], [0, 1])
        assert line.get_color() == PALETTE[0]
    assert dict(mpl.rcParams) == before


def test_another_format_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot draw a\.jpg"), figure(tmp_path / "a.jpg"):
        pytest.fail("drew")


def test_a_drawing_that_fails_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), figure(tmp_path / "a.png"):
        raise ZeroDivisionError
    assert not (tmp_path / "a.png").exists()


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnavailableError, match="matplotlib") as raised, figure(tmp_path / "a.png"):
        pytest.fail("drew")
    assert "aqua-cli[plot]" in raised.value.remedy
