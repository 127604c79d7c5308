"""What the stand-in for the driver has against a program, with the stacks of all who took part."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Final

import torch

_HERE: Final = str(Path(__file__).parent)
_TORCH: Final = str(Path(torch.__file__).parent)
STACK_DEPTH: Final = 12
"""Frames kept of a stack, innermost; from a driver call to the test that caused it."""


class Kind(StrEnum):
    """Ways to break CUDA's rules that real hardware punishes with a fault, or with wrong bytes."""

    RACE = "race"
    """Two pieces of work touch the same bytes, one writes, and nothing orders them."""
    UNSET = "unset"
    """Bytes are read that nothing has been written to since they were allocated."""
    UNMAPPED = "unmapped"
    """There is no memory behind an address, or this GPU may not use it."""
    REUSED = "reused"
    """Memory was taken away, or put to another use, under work that was still queued."""
    CONTEXT = "context"
    """A call in the wrong context, or a context made on a GPU that is not this thread's."""
    CAPTURE = "capture"
    """A call that is forbidden while a graph is being captured; the capture is lost."""
    WAIT = "wait"
    """Work waited for a stream that the test keeps from running."""
    REFCOUNT = "refcount"
    """A handle, mapping, range or registration was given back twice, or never was there."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule.

    Attributes:
        stacks: Of those that took part, the one noticed first.
    """

    kind: Kind
    what: str
    stacks: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{self.kind}: {self.what}"]
        return "\n".join([*parts, *(f"--- stack {n}\n{s}" for n, s in enumerate(self.stacks))])


class Stack:
    """Where a call came from; cheap to take, and only put in words when asked."""

    __slots__ = ("_frames",)

    def __init__(self) -> None:
        frame: FrameType | None = sys._getframe(1)
        frames: list[tuple[str, int, str]] = []
        while frame is not None and len(frames) < STACK_DEPTH:
            code = frame.f_code
            if not code.co_filename.startswith((_HERE, _TORCH)):
                frames.append((code.co_filename, frame.f_lineno, code.co_name))
            frame = frame.f_back
        self._frames = frames

    def __str__(self) -> str:
        summary = [traceback.FrameSummary(*frame) for frame in reversed(self._frames)]
        return "".join(traceback.StackSummary.from_list(summary).format())
