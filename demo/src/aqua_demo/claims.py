"""What a demo promises, and whether it held: the part that all reports have.

A demo succeeds only if every *claim* holds. One that fails names its reason, and the demo exits
with it.
"""

from __future__ import annotations

import os
import platform

import torch
from pydantic import Field

from aqua_protocol.wire import Wire


class Claim(Wire):
    """Something the demo shows, and whether it did."""

    text: str
    holds: bool
    reason: str = Field(default="", description="Why not, with figures.")


class ClaimsReport(Wire):
    """The part of `demo-report.json` that all demos have."""

    claims: list[Claim]
    scale: str
    seed: int
    machine: str
    versions: dict[str, str]

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


def this_machine() -> str:
    """What it runs on, in a few words."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    cores = len(os.sched_getaffinity(0))
    return f"{platform.system()} {platform.release()}, {device}, {cores} cores"
