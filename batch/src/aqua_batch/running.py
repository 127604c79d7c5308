"""Runs a batch file to its end, from wherever an earlier run left it.

Finished requests are taken out first; their lengths serve as the sample. Where there is none, a
small part of the requests (1 %, spread over the prefix tree) runs first and is measured: these
requests have to run anyway, so the sample costs nothing but their order. Then the rest runs in the
policy's order, with results on disk before they count.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from aqua_batch.engine import Engine
from aqua_batch.feed import BlendFeed
from aqua_batch.journal import Journal
from aqua_batch.planning import TokenizedBatch
from aqua_batch.policies import Policy, policy_for
from aqua_batch.records import BatchFile, Entry
from aqua_protocol.errors import CapacityError
from aqua_schedulers.blendserve import UNKNOWN, ResourceCost, choose_sample, prepare

Int64s = NDArray[np.int64]

SAMPLE_PROBABILITY: Final = 0.01
"""Of the paper's evaluation (section 5.1)."""

LEAST_TO_SAMPLE: Final = 200
"""Smaller pools run at once: a sample of a request or two says nothing."""


class BatchEngine(Engine, Protocol):
    """An engine that makes results of what it runs."""

    @property
    def capacity_tokens(self) -> int:
        """KV tokens that fit."""
        ...

    @property
    def max_step_tokens(self) -> int:
        """Most tokens of a step."""
        ...

    def serve(
        self,
        prompt_of: Callable[[int], list[int]],
        entry_of: Callable[[int], tuple[Entry, dict[str, Any]]],
    ) -> None:
        """Name the pool that the next requests are indices into."""
        ...

    def take_results(self) -> list[dict[str, Any]]:
        """Results since the last call, in OpenAI's output format."""
        ...


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        done, total: Requests.
        work_done: Share of the work, by compute and memory time: what "time left" goes by, as
            requests differ by orders of magnitude.
    """

    done: int
    total: int
    work_done: float
    running: int


@dataclass(frozen=True, slots=True)
class Run:
    """A run's fixed parts.

    Attributes:
        cost: Coefficients of the engine.
        now: The clock, in seconds.
        on_progress: Called after each step that ended a request.
    """

    batch: BatchFile
    tokenized: TokenizedBatch
    engine: BatchEngine
    journal: Journal
    cost: ResourceCost
    policy: Policy
    now: Callable[[], float]
    on_progress: Callable[[Progress], None]

    def finish(self) -> int:
        """Run what is left of the batch; returns the number of requests run.

        Raises:
            CapacityError: A request does not fit in the engine's memory.
        """
        self._check_fits()
        left = self._left()
        count = len(left)
        sample = self._sample(left)
        if len(sample):
            self._run_part(sample, Policy.DFS)
        left = self._left()
        if len(left):
            self._run_part(left, self.policy)
        self.journal.sync()
        return count

    def _check_fits(self) -> None:
        largest = int(np.diff(self.tokenized.offsets).max())
        if largest >= self.engine.capacity_tokens:
            raise CapacityError(
                f"a prompt of {largest} tokens does not fit in {self.engine.capacity_tokens}",
                remedy="Give the engine more KV memory, or drop the request.",
            )

    def _left(self) -> Int64s:
        """Requests without a result, as indices into the batch."""
        finished = self.journal.finished
        left = [i for i, e in enumerate(self.tokenized.entries) if e.custom_id not in finished]
        return np.array(left, dtype=np.int64)

    def _observed(self) -> dict[str, int]:
        """Lengths of finished requests, where they generated anything."""
        return {each: tokens for each, tokens in self.journal.finished.items() if tokens > 0}

    def _sample(self, left: Int64s) -> Int64s:
        """Requests to run first, to learn lengths from; none where enough are known."""
        unknown: Int64s = left[self.tokenized.known[left] == UNKNOWN]
        if len(unknown) < LEAST_TO_SAMPLE:
            return np.empty(0, np.int64)
        if len(self._observed()) >= SAMPLE_PROBABILITY * len(unknown):
            return np.empty(0, np.int64)
        part = self.tokenized.keep(left)
        chosen = choose_sample(
            part.pool({}).tree, part.known, probability=SAMPLE_PROBABILITY, seed=0
        )
        sample: Int64s = left[chosen]
        return sample

    def _run_part(self, part: Int64s, policy: Policy) -> None:
        """Run some requests, with what is known about the lengths of all."""
        estimate = self.tokenized.pool(self._observed()).estimate().take(part)
        mine = self.tokenized.keep(part)
        prepared = prepare(mine.pool({}), self.cost, lengths=estimate)
        work = prepared.compute_s + prepared.resources.leaf_memory_s
        engine = self.engine
        capacity, most = engine.capacity_tokens, engine.max_step_tokens
        feed = BlendFeed(
            policy_for(policy, prepared, capacity_tokens=capacity, max_step_tokens=most),
            prepared.tree,
            engine,
            capacity_tokens=capacity,
        )

        def entry_of(request: int) -> tuple[Entry, dict[str, Any]]:
            entry = mine.entries[request]
            return entry, next(self.batch.bodies([entry]))

        engine.serve(mine.prompt, entry_of)
        before = len(self.tokenized.entries) - len(self._left())
        done_work, total_work = 0.0, float(work.sum())
        while feed.left_count > 0:
            events = feed.step(self.now())
            for result in engine.take_results():
                self.journal.record(result)
            if events.finished:
                done_work += float(work[np.array(events.finished)].sum())
                done = before + len(part) - feed.left_count
                total = len(self.tokenized.entries)
                share = min(1.0, done_work / total_work)
                self.on_progress(Progress(done, total, share, feed.running_count))
