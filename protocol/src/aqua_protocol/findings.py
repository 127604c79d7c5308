"""What an examination of a machine found: the answer of each probe that `aqua doctor` asks.

A distribution offers a probe by an entry point of the group `aqua.doctor`: a function without
arguments that returns findings. So the doctor knows nothing of transports or coordinators, and
those know nothing of command lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, TypeAlias

from pydantic import Field

from aqua_protocol.wire import Wire


class FindingLevel(StrEnum):
    """How grave a finding is."""

    OK = "ok"
    WARN = "warn"
    """Something that Aqua can do is not available here, or needs a next step."""
    FAIL = "fail"
    """What is installed or configured cannot work as it is."""


class Finding(Wire):
    """One thing that was looked at."""

    check: str = Field(description="What was looked at, in a word or two.")
    level: FindingLevel = FindingLevel.OK
    message: str = Field(description="What was found, for people.")
    remedy: str = Field(default="", description="The next step, where there is one.")
    details: dict[str, Any] = Field(default_factory=dict, description="JSON values, for programs.")


Probe: TypeAlias = Callable[[], Iterable[Finding]]
