"""An engine that counts instead of computing: it generates `max_tokens` letters for each row.

What it was given is what it answers with, so a test sees from the answers alone which prompt ran
with which fields, and where.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aqua_batch.engine import CacheCounters, EngineProperties, StepEvents
from aqua_batch.outputs import RowOutput
from aqua_protocol.errors import ConfigError


class CountingEngine:
    """Answers each row with JSON: its prompt, the fields it came with, the process it ran in.

    Args:
        dies_after: Rows after which a step raises KeyboardInterrupt.
        stops_after: Answers after which steps bring no more,
        goes_on_at: until a file of this name exists.
    """

    def __init__(
        self,
        dies_after: int | None = None,
        stops_after: int | None = None,
        goes_on_at: str = "",
    ) -> None:
        self.facts = EngineProperties(
            capacity_tokens=20_000, max_step_tokens=512, longest_tokens=None
        )
        self.submitted: list[str] = []
        self._dies_after = dies_after
        self._stops_after = stops_after
        self._goes_on_at = Path(goes_on_at)
        self._answered = 0
        self._left: dict[int, int] = {}
        self._new: list[int] = []
        self._outputs: list[RowOutput] = []

    def serve(
        self,
        prompt_of: Callable[[int], list[int]],
        sampling_of: Callable[[int], Mapping[str, Any]],
    ) -> None:
        self._prompt_of, self._sampling_of = prompt_of, sampling_of

    def submit(self, request: int) -> None:
        self.submitted.append(bytes(self._prompt_of(request)).decode())
        self._left[request] = self._sampling_of(request)["max_tokens"]
        self._new.append(request)

    def step(self, token_budget: int) -> StepEvents:
        if self._dies_after is not None and len(self.submitted) >= self._dies_after:
            raise KeyboardInterrupt
        started, self._new = self._new, []
        finished, tokens = [], []
        for request in list(self._left):
            self._left[request] -= 1
            if self._left[request] > 0 or self._is_held():
                continue
            del self._left[request]
            self._answered += 1
            wish = self._sampling_of(request)
            finished.append(request)
            tokens.append(wish["max_tokens"])
            prompt = bytes(self._prompt_of(request)).decode()
            text = json.dumps({"prompt": prompt, "wish": wish, "process": os.getpid()})
            self._outputs.append(RowOutput(request, text, "length", wish["max_tokens"], 0))
        if self._is_held():
            time.sleep(0.01)  # a file has no event to wait for
        return StepEvents(started, finished, tokens)

    def _is_held(self) -> bool:
        held = self._stops_after is not None and self._answered >= self._stops_after
        return held and not self._goes_on_at.exists()

    def take_outputs(self) -> list[RowOutput]:
        taken, self._outputs = self._outputs, []
        return taken

    def cache_counters(self) -> CacheCounters:
        return CacheCounters(len(self.submitted), 0)


def refuse(message: str, remedy: str) -> CountingEngine:
    """An engine that cannot start."""
    raise ConfigError(message, remedy=remedy)
