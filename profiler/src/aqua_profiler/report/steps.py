"""A step-time profile for people: what it says of an engine, how far it is off, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aqua_cli.figures import AMBER, BLUE, FAINT, TEAL, figure
from aqua_schedulers.conserve import MeasuredStep, StepLoad, StepTimeProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN_CONTEXT: Final = 1000
"""Tokens of the context that examples have: a usual conversation. Doubled, examples have longer
ones."""


def lines_of_steps(profile: StepTimeProfile, row_count: int) -> list[str]:
    """The profile, line by line."""
    alone = StepLoad().and_decode(SHOWN_CONTEXT)
    batch = StepLoad(32, 32 * SHOWN_CONTEXT, 0.0, 32)
    prompt = StepLoad().and_chunk(profile.max_tokens, 0)
    examples = {
        f"1 decode at {SHOWN_CONTEXT} tokens": alone,
        f"32 decodes at {SHOWN_CONTEXT} tokens": batch,
        f"a prompt of {profile.max_tokens} tokens": prompt,
    }
    return [
        f"{profile.model} on {profile.engine}, {profile.gpu}",
        "",
        *(f"{name:30s} {profile.seconds(load) * 1e3:8.2f} ms" for name, load in examples.items()),
        f"{'off by at most':30s} {profile.relative_error:8.1%} for 95% of loads kept from the fit",
        f"{'loads':30s} {row_count:8d} of up to {profile.max_tokens} tokens",
    ]


def draw_steps(profile: StepTimeProfile, rows: Sequence[MeasuredStep], path: Path) -> None:
    """Write a picture to a .png or .svg file: times by tokens, and predicted beside measured.

    Raises:
        ConfigError: It cannot be drawn there.
    """
    with figure(path, width=9, height=3.6) as drawing:
        left, right = drawing.subplots(1, 2)
        tokens = [row.load.new_tokens for row in rows]
        measured = [row.seconds * 1e3 for row in rows]
        predicted = [profile.seconds(row.load) * 1e3 for row in rows]
        _scatter(left, rows, tokens, measured)
        left.set(xlabel="tokens of the step", ylabel="ms", xscale="log", yscale="log")
        _scatter(right, rows, measured, predicted)
        ends = (min(measured), max(measured))
        right.plot(ends, ends, color=FAINT, linewidth=1)
        right.set(xlabel="measured (ms)", ylabel="predicted (ms)", xscale="log", yscale="log")
        left.legend()
        off = f"95% of unseen loads within {profile.relative_error:.1%}"
        drawing.suptitle(f"{profile.model} on {profile.gpu}: {off}", fontsize=10)


def _scatter(
    axes: Axes, rows: Sequence[MeasuredStep], x: Sequence[float], y: Sequence[float]
) -> None:
    kinds = [_kind(row.load) for row in rows]
    for kind, color in (("prompts", BLUE), ("decodes", AMBER), ("both", TEAL)):
        at = [index for index, each in enumerate(kinds) if each == kind]
        axes.plot([x[i] for i in at], [y[i] for i in at], "o", label=kind, color=color, alpha=0.7)


def _kind(load: StepLoad) -> str:
    if not load.pair_tokens:
        return "decodes"
    return "both" if load.context_tokens else "prompts"
