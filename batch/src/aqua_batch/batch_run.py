"""Runs a batch file to its end, from wherever an earlier run left it, on as many engines as it has.

Finished requests are taken out first; their lengths serve as the sample. Where there is none, a
small part of the requests (1 %, spread over the prefix tree) runs first and is measured: these
requests have to run anyway, so the sample costs nothing but their order. Then the rest runs in the
policy's order, with results on disk before they count.

Several engines get a share each, equal in both resources (`split_among`), before they begin. When
an engine is lost, what its share had left waits; an engine that is free, because it ended its own
share or came back, takes as much of it as each living one would get. What had been answered stays
answered. Requests that no engine survives would kill one after another: the run stops when
`MOST_DEATHS` engines have died over the same requests without answering any of their share.

Source: BlendServe section 6.1, "Data parallelism"; the rest is ours.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Any, Final

import numpy as np
from jaxtyping import Int64

from aqua_batch.feed import Share
from aqua_batch.fleet import Event, Fleet, Lost, Ready, Report
from aqua_batch.journal import ResultJournal
from aqua_batch.outputs import RowOutput, result_line
from aqua_batch.policies import Policy
from aqua_batch.records import BatchFile
from aqua_batch.tokenization import TokenizedBatch
from aqua_protocol.errors import UnavailableError
from aqua_schedulers.blendserve import (
    UNKNOWN,
    LengthEstimate,
    PreparedPool,
    ResourceCost,
    choose_sample,
    prepare,
    split_among,
)

SAMPLE_PROBABILITY: Final = 0.01
"""Share of requests, as in the paper's evaluation (section 5.1). Doubled, twice as many run out of
order to learn lengths from."""

LEAST_TO_SAMPLE: Final = 200
"""Requests; smaller pools run at once, because a sample of a request or two says nothing. Doubled,
pools of up to 400 run without measured lengths."""

EARLY_SHARE: Final = 0.01
"""Share of the work done below which the time left is a guess. Doubled, it is said later."""

MOST_DEATHS: Final = 3
"""Engines that may die over the same requests without an answer, chosen to outlast one bad node.
Doubled, requests that no engine survives kill three more."""


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How far a run is.

    Attributes:
        done, total: Requests.
        work_done: Share of the work of this run, by compute and memory time: what "time left"
            goes by, as requests differ by orders of magnitude.
        running: Rows that engines work on.
        nodes: Engines that live.
        elapsed_s: Since the run began.
    """

    done: int
    total: int
    work_done: float
    running: int
    nodes: int
    elapsed_s: float

    def __str__(self) -> str:
        """For people, with the time left by work."""
        nodes = f"{self.nodes} nodes, " if self.nodes > 1 else ""
        return f"{self.done} of {self.total} requests, {nodes}{self._time_left}"

    @property
    def _time_left(self) -> str:
        if self.work_done < EARLY_SHARE:
            return "time left unknown"
        left_s = self.elapsed_s * (1.0 / self.work_done - 1.0)
        return f"{timedelta(seconds=round(left_s))} left"


@dataclass(eq=False)
class BatchRun:
    """A batch on its way through a fleet.

    Attributes:
        model: The name that answers carry where a request names none.
        cost: Coefficients of the engines.
        clock_s: Unix time, for the `created` of answers.
        on_progress: Called when an answer or an engine came or went.
        on_loss: Told of each engine that is lost, in words.
    """

    batch: BatchFile
    tokenized: TokenizedBatch
    fleet: Fleet
    journal: ResultJournal
    _: KW_ONLY
    model: str
    cost: ResourceCost
    policy: Policy
    clock_s: Callable[[], float] = time.time
    on_progress: Callable[[BatchProgress], None] = lambda _: None
    on_loss: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        tokenized, done = self.tokenized, self.journal.finished
        self._prompts = tokenized.prompts
        self._owner = tokenized.owner
        self._started_s = time.monotonic()
        self._held: dict[int, dict[int, RowOutput]] = {}  # of unfinished lines, by row
        self._first_row = tokenized.first_rows()
        self._observed = tokenized.lengths(done)
        finished = np.array([each.custom_id in done for each in tokenized.entries], bool)
        self._is_left = ~finished[tokenized.owner]
        self._done = int(finished.sum())
        self._work = np.zeros(self._prompts.count)
        self._work_done = 0.0
        self._work_left = 0.0
        self._idle: dict[int, None] = {}
        self._assigned: dict[int, Int64[np.ndarray, " part"]] = {}
        self._running: dict[int, int] = {}
        self._unassigned: deque[tuple[Int64[np.ndarray, " part"], bool]] = deque()
        self._productive: set[int] = set()
        self._deaths = np.zeros(self._prompts.count, np.int8)

    def finish(self) -> int:
        """Run what is left of the batch; returns the number of requests run.

        Raises:
            UnavailableError: The engines are gone, or die whatever they are given.
        """
        before = self._done
        rows = self._left()
        if len(rows):
            whole = self._prepare(rows)
            sample = self._sample(rows, whole)
            if len(sample):
                self._run_part(sample, self._prepare(sample), Policy.DFS)
                rows = self._left()
                whole = self._prepare(rows)
            self._run_part(rows, whole, self.policy)
        assert not self._is_left.any(), f"{int(self._is_left.sum())} rows were never answered"
        self.journal.sync()
        return self._done - before

    def _left(self) -> Int64[np.ndarray, " part"]:
        return np.flatnonzero(self._is_left).astype(np.int64)

    def _prepare(self, rows: Int64[np.ndarray, " part"]) -> PreparedPool:
        """Order some rows, with what is known about the lengths of all."""
        lengths = self._lengths(rows)
        prepared = prepare(self._prompts.keep(rows).pool(), self.cost, lengths=lengths)
        self._work[rows] = prepared.compute_s + prepared.resources.leaf_memory_s
        self._work_left = float(self._work[self._is_left].sum())
        return prepared

    def _lengths(self, rows: Int64[np.ndarray, " part"]) -> LengthEstimate:
        return self._prompts.pool(self._observed).estimate().take(rows)

    def _sample(
        self, rows: Int64[np.ndarray, " part"], whole: PreparedPool
    ) -> Int64[np.ndarray, " part"]:
        """Rows to run first, to learn lengths from; none where enough are known."""
        unknown = int((self._prompts.known[rows] == UNKNOWN).sum())
        observed = int((self._observed != UNKNOWN).sum())
        if unknown < LEAST_TO_SAMPLE or observed >= SAMPLE_PROBABILITY * unknown:
            return np.empty(0, np.int64)
        known = self._prompts.known[rows]
        chosen = choose_sample(whole.tree, known, probability=SAMPLE_PROBABILITY, seed=0)
        return np.asarray(rows[chosen])

    def _run_part(
        self, rows: Int64[np.ndarray, " part"], prepared: PreparedPool, policy: Policy
    ) -> None:
        """Run some rows to their end, whatever becomes of the engines meanwhile."""
        nodes = self.fleet.ready_nodes()
        self._idle = dict.fromkeys(nodes)
        if not nodes:  # all died since the last part ended
            self._unassigned.append((rows, False))
        for node, part in zip(nodes, split_among(prepared, max(1, len(nodes))), strict=False):
            if len(part):
                alone = prepared if len(nodes) == 1 else None
                self._begin(node, rows if alone else rows[part], policy, alone)
        while self._assigned or self._unassigned:
            done = self._done
            for event in self.fleet.wait():
                self._take(event)
            while self._unassigned and self._idle:
                self._begin(next(iter(self._idle)), self._next_unassigned(), policy, None)
            if self._done > done:
                self._show()

    def _take(self, event: Event) -> None:
        """Book what happened at a node."""
        node = event.node
        if isinstance(event, Report):
            rows = self._assigned[node]
            for answer in event.answers:
                self._book(int(rows[answer.request]), answer)
                self._productive.add(node)
            self._running[node] = event.running
            if event.left == 0:
                del self._assigned[node], self._running[node]
                self._idle[node] = None
        elif isinstance(event, Ready):
            self._idle[node] = None
            self._show()
        else:
            self._requeue(event)
            self._show()

    def _requeue(self, event: Lost) -> None:
        """Keep what a lost engine leaves behind for another."""
        self._idle.pop(event.node, None)
        self._running.pop(event.node, None)
        rows = self._assigned.pop(event.node, np.empty(0, np.int64))
        rows = rows[self._is_left[rows]]
        if len(rows) == 0:
            self.on_loss(event.reason)
            return
        self._unassigned.append((rows, False))
        self.on_loss(f"{event.reason}; {len(rows)} requests of its share will run again")
        if event.node in self._productive:
            return
        self._deaths[rows] += 1
        if self._deaths[rows].max() >= MOST_DEATHS:
            self.journal.sync()
            raise UnavailableError(
                f"{MOST_DEATHS} engines died over the same requests without answering one, "
                f"last: {event.reason}",
                remedy="What was finished is kept, and the same command goes on from there. "
                "See the engines' logs for why they die.",
            )

    def _next_unassigned(self) -> Int64[np.ndarray, " part"]:
        """Rows that a lost engine left, for one that is free: its part among the living."""
        rows, is_cut = self._unassigned.popleft()
        living = len(self.fleet.ready_nodes())
        if is_cut or living == 1:
            return rows
        first, *others = (part for part in split_among(self._prepare(rows), living) if len(part))
        self._unassigned.extend((rows[part], True) for part in others)
        return np.asarray(rows[first])

    def _begin(
        self,
        node: int,
        rows: Int64[np.ndarray, " part"],
        policy: Policy,
        prepared: PreparedPool | None,
    ) -> None:
        del self._idle[node]
        self._productive.discard(node)
        self._assigned[node] = rows
        lengths = prepared.lengths if prepared is not None else self._lengths(rows)
        sampling = [self._sampling_of(row) for row in rows.tolist()]
        share = Share(self._prompts.keep(rows), lengths, sampling, policy, self.cost, prepared)
        self.fleet.begin(node, share)

    def _sampling_of(self, row: int) -> Mapping[str, Any]:
        """The sampling fields of a row."""
        index, limit = int(self._owner[row]), int(self._prompts.limit[row])
        fields = {**self.tokenized.sampling[index], "max_tokens": limit}
        if "min_tokens" in fields:
            fields["min_tokens"] = min(fields["min_tokens"], limit)
        if "seed" in fields:
            # Several answers to one prompt would be one and the same.
            fields["seed"] += row - int(self._first_row[index])
        return fields

    def _book(self, row: int, answer: RowOutput) -> None:
        """Take an answer; on disk once its line of the file has all of them."""
        assert self._is_left[row], f"row {row} was answered twice"
        self._is_left[row] = False
        self._work_done += self._work[row]
        self._work_left -= self._work[row]
        if answer.output_tokens > 0:
            self._observed[row] = answer.output_tokens
        index = int(self._owner[row])
        entry, first = self.tokenized.entries[index], int(self._first_row[index])
        held = self._held.setdefault(index, {})
        held[row] = answer
        if len(held) < entry.part_count:
            return
        del self._held[index]
        offsets = self._prompts.offsets[first : first + entry.part_count + 1]
        (body,) = self.batch.bodies([entry])
        self.journal.record(
            result_line(
                entry,
                [held[row] for row in sorted(held)],
                np.diff(offsets).tolist(),
                model=body.get("model", self.model),
                created_s=int(self.clock_s()),
            )
        )
        self._done += 1

    def _show(self) -> None:
        total = self._work_done + max(0.0, self._work_left)
        self.on_progress(
            BatchProgress(
                self._done,
                len(self.tokenized.entries),
                self._work_done / total if total else 1.0,
                sum(self._running.values()),
                len(self.fleet.ready_nodes()),
                time.monotonic() - self._started_s,
            )
        )
