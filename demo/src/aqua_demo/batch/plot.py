"""The picture of the batch demo: people's first tokens, the batch's answers, the memory lent.

Source: ConServe Figure 6 and Aqua Figure 12, over one time, with the deaths marked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from aqua_cli.figures import AMBER, FAINT, INK, RED, TEAL
from aqua_demo.batch.report import BatchEvents
from aqua_demo.engines.plot import draw_first_tokens
from aqua_demo.engines.race import Run
from aqua_demo.messages import ProducerSample
from aqua_demo.panels import panels
from aqua_protocol import MIB


def draw(
    runs: Mapping[str, Run],
    done: BatchEvents,
    moments: Sequence[ProducerSample],
    path: Path,
    *,
    subtitle: str,
) -> None:
    """Write the plot of the three runs, a .png or .svg file."""
    end_s = max(max(run["progress"][-1][0], run["seconds"]) for run in runs.values())
    title = "A batch on harvested memory and time: whatever goes away, each answer comes once"
    with panels(path, title, subtitle) as (above, middle, below):
        draw_first_tokens(above, runs["ordered"], runs["ours"])
        for name, label, colour in (
            ("stock", "its own engine, file order", FAINT),
            ("ordered", "its own engine, BlendServe's order", AMBER),
            ("ours", "and the gaps of the online engine", TEAL),
        ):
            moments_s, counts = zip(*runs[name]["progress"], strict=True)
            middle.step(moments_s, counts, color=colour, label=label, where="post")
        middle.set_ylabel("offline requests answered")
        times_s = [each.at_s for each in moments]
        offered = [each.offered_bytes / MIB for each in moments]
        leased = [each.leased_bytes / MIB for each in moments]
        below.step(times_s, offered, color=FAINT, label="on offer", where="post")
        below.fill_between(times_s, leased, color=TEAL, alpha=0.6, label="lent", step="post")
        below.set_ylabel("memory (MiB)")
        below.set_ylim(bottom=0)
        for axis in (above, middle, below):
            for at, colour, text in (
                (done.burst_s, INK, "memory wanted back"),
                (done.dispatcher_s, RED, "dispatcher killed"),
                (done.engine_s, RED, "engine killed"),
            ):
                if at is not None:
                    axis.axvline(at, color=colour, linewidth=0.8, linestyle=":")
                if at is not None and axis is middle:
                    place = (at, axis.get_ylim()[1])
                    axis.annotate(text, place, fontsize=8, color=colour, rotation=90, va="top")
            axis.legend(loc="upper right" if axis is not middle else "lower right", ncols=3)
        below.set_xlabel("seconds since the batch was submitted")
        below.set_xlim(0, end_s)
