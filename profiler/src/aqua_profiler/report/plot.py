"""Pictures of a profile, like Figures 4 and 7(b) of the paper for an LLM, 7(a) for batches."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from aqua_cli.figures import FAINT, GREEN, figure
from aqua_profiler.errors import ProfileInvalidError
from aqua_profiler.report.text import sentence

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from aqua_protocol.profile import ModelProfile


def draw(profile: ModelProfile, path: Path) -> None:
    """Write a picture to a .png or .svg file.

    Raises:
        ProfileInvalidError: The profile has nothing to draw.
        ConfigError: It cannot be drawn there.
    """
    steps, runs = profile.added("batches") or [], profile.added("runs") or []
    if not steps and not runs:
        raise ProfileInvalidError(
            f"the profile of {profile.model} has no measurements to draw",
            remedy="Draw the file that aqua-profile run wrote.",
        )
    with figure(path, width=9, height=3.4) as drawing:
        left, right = drawing.subplots(1, 2)
        if steps:
            _batches(left, right, steps)
        else:
            _rates(left, right, profile, runs)
        drawing.suptitle(sentence(profile), fontsize=10)


def _rates(left: Axes, right: Axes, profile: ModelProfile, runs: list[dict[str, Any]]) -> None:
    objective = profile.added("objective") or {}
    steady = sorted((run for run in runs if not run["ramp"]), key=lambda run: run["rate_per_s"])
    rates = [run["rate_per_s"] for run in steady]
    left.plot(rates, [run["ttft_s"] for run in steady], "o", label="TTFT, median")
    left.plot(rates, [run["ttft_p99_s"] for run in steady], "^", label="TTFT, p99", alpha=0.5)
    timed = [run for run in steady if run["tbt_s"] is not None]
    left.plot(
        [run["rate_per_s"] for run in timed],
        [run["tbt_s"] for run in timed],
        "s",
        label="time between tokens, p99",
    )
    for name, style in (("ttft_s", "--"), ("tbt_s", ":")):
        if name in objective:
            left.axhline(objective[name], linestyle=style, color=FAINT, linewidth=1)
    left.set(xlabel="requests/s", ylabel="seconds", yscale="log")
    used = [run for run in steady if run["kv_usage"] is not None]
    cache = profile.added("kv_cache") or {}
    if used and cache.get("nbytes"):
        free = [(1 - run["kv_usage"]) * cache["nbytes"] / 1e9 for run in used]
        right.plot([run["rate_per_s"] for run in used], free, "o")
        right.axhline(profile.threshold_bytes / 1e9, linestyle="--", color=FAINT, linewidth=1)
        right.set(ylabel="free KV memory (GB)")
    else:
        right.plot(rates, [run["running"] for run in steady], "o")
        right.set(ylabel="requests running")
    right.set(xlabel="requests/s")
    for axes in (left, right):
        if profile.stable_rate_per_s:
            axes.axvline(profile.stable_rate_per_s, color=GREEN, linewidth=1)
    left.legend()


def _batches(left: Axes, right: Axes, steps: list[dict[str, Any]]) -> None:
    sizes = [step["size"] for step in steps]
    left.plot(sizes, [step["items_per_s"] for step in steps], "o-")
    left.set(xlabel="batch size", ylabel="items/s", xscale="log")
    right.plot(sizes, [step["free_bytes"] / 1e9 for step in steps], "o-")
    right.set(xlabel="batch size", ylabel="free memory (GB)", xscale="log")
