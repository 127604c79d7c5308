"""One engine on one node of a Ray cluster.

The class is what Ray calls an actor once `ray_fleet` has wrapped it: a process of its own, whose
methods run one after another. Expected failures come back as values (`ErrorBody`), because the
driver must tell a model that cannot be served from a process that died.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aqua_batch.engine import BatchEngine, CacheCounters, EngineProperties
from aqua_batch.outputs import RowOutput
from aqua_protocol.errors import AquaError, ErrorBody

if TYPE_CHECKING:
    from aqua_batch.share import Share, ShareRun

EngineFactory = Callable[[], BatchEngine]


@dataclass(frozen=True, slots=True)
class Advance:
    """What an engine did in one call, and how it stands.

    Attributes:
        running, left: As in `fleet.Report`.
    """

    answers: list[RowOutput]
    running: int
    left: int


class EngineActor:
    """An engine and the share that it works on."""

    def __init__(self) -> None:
        self._engine: BatchEngine | None = None
        self._run: ShareRun | None = None

    def host(self) -> str:
        """Name of the machine; answers as soon as Ray has placed the process."""
        return socket.gethostname()

    def start(
        self, make_engine: EngineFactory, environment: Mapping[str, str]
    ) -> EngineProperties | ErrorBody:
        """Start the engine.

        Args:
            environment: Variables for it; a worker's own are those that Ray was started with.
        """
        os.environ.update(environment)
        try:
            self._engine = make_engine()
        except AquaError as error:
            return error.to_body()
        return self._engine.facts

    def begin(self, share: Share) -> None:
        """Prepare a share."""
        from aqua_batch.share import ShareRun

        assert self._engine is not None, "not started"
        assert self._run is None or self._run.left_count == 0, "the last share has not ended"
        self._run = ShareRun(share, self._engine)

    def advance(self, for_s: float) -> Advance:
        """Take steps for about that long, or until the share ends."""
        run = self._run
        if run is None:
            return Advance([], 0, 0)
        answers: list[RowOutput] = []
        end_s = time.monotonic() + for_s
        while run.left_count > 0:
            answers += run.step(time.monotonic())
            if time.monotonic() >= end_s:
                break
        if run.left_count == 0:
            self._run = None
        return Advance(answers, run.running_count, run.left_count)

    def cache_counters(self) -> CacheCounters:
        """The engine's own counters."""
        assert self._engine is not None, "not started"
        return self._engine.cache_counters()
