"""One trial as it is watched: events in, whether to stop, and in the end a summary.

Pure: time arrives with the events. The same code watches a real endpoint and a virtual one.

Times of a request count from its *scheduled* send. A request that could not be sent in time, or
that has not been answered yet, waits all the same: that is what a user would feel, and leaving such
requests out (coordinated omission) would show an endpoint in its best light when it is worst.

What it looks for, beside quantiles, is the *backlog* (`summary`): a stretch in which the oldest
request without a token has waited for half of the limit and more.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from typing import Final

import numpy as np
from jaxtyping import Float64

from aqua_profiler.load.trial import Trial
from aqua_profiler.measure.gap_histogram import gap_histograms
from aqua_profiler.measure.kv_cache import EngineFigures
from aqua_profiler.measure.summary import BacklogClock, StopReason, TrialSummary
from aqua_profiler.spec import LatencyObjective, UnloadedLatency

BACKLOG_SHARE: Final = 0.5
"""Share of the way from the unloaded TTFT to the limit at which a backlog begins: far from what a
busy moment does to a server with capacity to spare, reached early by one without. Doubled, which is
the limit itself, backlogs begin late and a search needs longer trials."""

RECENT_GAPS: Final = 400
"""Gaps between tokens that are looked at, at the least, to end a trial whose tokens are too slow.
Twice as many let slow servers fall behind for twice as long."""

RECENT_S: Final = 2.0
"""Seconds, or one residence, that they must span: a server that halts for a moment, as any does on
a busy machine, makes hundreds of gaps slow at once. Doubled, slow trials last longer."""

SLOW_GAP_SHARE: Final = 0.3
"""Share of the recent gaps beyond the limit at which tokens are clearly too slow. Less is left to
the quantile of a whole trial: batches swell for a moment at any rate. Doubled, trials far beyond
the limit last to their end."""

STEADY_RESIDENCES: Final = 3.0
"""Residences of a request after which as many leave as come. Doubled, trials of servers with long
outputs take twice as long and find the same."""

RESIDENCE_REQUESTS: Final = 200
"""Latest requests from which the present residence is taken: a window, to bound the work. Doubled,
it follows a changing load more slowly."""

SHED_LIMIT: Final = 8
"""Requests turned away (429) that end a trial: the endpoint says itself that it is too much. Chosen
by hand; doubled, such trials last a little longer."""


class TrialRecorder:
    """A trial under way.

    Attributes:
        tokens_peak: Most tokens of context that requests in the system would hold together.
        backlog_starts: First tokens while requests queued.
        news_s: When the endpoint last gave a sign of life.
    """

    def __init__(
        self, trial: Trial, objective: LatencyObjective, unloaded: UnloadedLatency
    ) -> None:
        self._trial = trial
        self._objective = objective
        self._unloaded = unloaded
        base_s = min(unloaded.ttft_s, objective.ttft_s)
        self._backlog_s = base_s + BACKLOG_SHARE * (objective.ttft_s - base_s)
        # By request; NaN until it happens.
        self._due, self._first, self._latest, self._last = (array("d") for _ in range(4))
        self._held = array("L")
        self._crowd_then = array("d")
        # By gap between tokens.
        self._gap, self._gap_at, self._gap_crowd = (array("d") for _ in range(3))
        self._gap_owner = array("L")
        # By change of the number of requests in the system.
        self._change_at, self._crowd = array("d"), array("d")
        self._late = array("d")
        self._waiting: dict[int, float] = {}
        self._running = 0
        self._tokens = 0
        self._backlogs: list[BacklogClock] = []
        self._open: BacklogClock | None = None
        self.shed = 0
        self.finished = 0
        self._kv_usage: float | None = None
        self._looked_at, self._queue = array("d"), array("d")
        self.tokens_peak = 0
        self.backlog_starts = 0
        self.news_s = 0.0

    # --- Events, in the order of time ---------------------------------------------------

    def scheduled(self, due_s: float, prompt_tokens: int) -> int:
        """A request has become due; returns its number."""
        number = len(self._due)
        self._due.append(due_s)
        for times in (self._first, self._latest, self._last, self._crowd_then):
            times.append(math.nan)
        self._held.append(prompt_tokens)
        self._waiting[number] = due_s
        self._count_requests(due_s)
        self._hold(prompt_tokens)
        return number

    def sent(self, number: int, at_s: float) -> None:
        """Its bytes have been handed to the socket."""
        self._late.append(at_s - self._due[number])

    def token(self, number: int, at_s: float) -> None:
        """A piece of its answer has arrived."""
        self.news_s = at_s
        self._held[number] += 1
        self._hold(1)
        if number in self._waiting:
            self._note_start(at_s)
            del self._waiting[number]
            self._first[number] = at_s
            self._running += 1
            self._count_requests(at_s)
        else:
            self._gap.append(at_s - self._latest[number])
            self._gap_at.append(at_s)
            self._gap_crowd.append(self._crowd_then[number])
            self._gap_owner.append(number)
        self._latest[number] = at_s
        self._crowd_then[number] = self.outstanding

    def finish(self, number: int, at_s: float) -> None:
        """Its answer is complete."""
        self.news_s = at_s
        self.finished += 1
        self._last[number] = self._latest[number]
        self._leave(number, at_s)

    def turn_away(self, number: int, at_s: float) -> None:
        """The endpoint was too busy for it (429): as if its first token never came."""
        self.news_s = at_s
        self.shed += 1
        self._leave(number, at_s)

    def abandon(self, number: int, at_s: float) -> None:
        """It failed, which says nothing about the endpoint's capacity."""
        self._leave(number, at_s)

    def look_inside(self, figures: EngineFigures, now_s: float) -> None:
        """What the engine itself says, as of its last page of metrics."""
        if figures.usage is not None:
            self._kv_usage = max(figures.usage, self._kv_usage or 0.0)
        if figures.waiting is not None:
            self._looked_at.append(now_s)
            self._queue.append(figures.waiting)

    # --- Decisions ----------------------------------------------------------------------

    def oldest_wait_s(self, now_s: float) -> float:
        """How long the oldest request without a token has waited."""
        oldest = next(iter(self._waiting.values()), now_s)
        return max(0.0, now_s - oldest)

    def is_backlogged(self, now_s: float) -> bool:
        """Requests queue now."""
        return self.oldest_wait_s(now_s) > self._backlog_s

    @property
    def count(self) -> int:
        """Requests due so far."""
        return len(self._due)

    @property
    def sent_count(self) -> int:
        """Requests handed to the socket so far."""
        return len(self._late)

    @property
    def outstanding(self) -> int:
        """Requests due and not complete."""
        return len(self._waiting) + self._running

    def should_stop(self, now_s: float, rate_per_s: float) -> StopReason | None:
        """Whether to send no more, and why; ask a few times a second.

        Args:
            now_s: Since the start of the trial.
            rate_per_s: Due now, for ramps.
        """
        trial = self._trial
        if trial.to_the_end:
            return StopReason.TIME if now_s >= trial.most_s else None
        patience_s = trial.patience * self._objective.ttft_s
        rules = {
            StopReason.SHED: self.shed >= SHED_LIMIT,
            StopReason.BACKLOG: 0 < trial.enough_backlog <= self.backlog_starts,
            StopReason.OVERLOAD: self.oldest_wait_s(now_s) > patience_s,
            StopReason.SLOW_TOKENS: self._tokens_are_slow(now_s),
            StopReason.TIME: now_s >= trial.most_s,
            StopReason.ENOUGH: self._has_enough(now_s, rate_per_s) and self._is_steady(now_s),
        }
        return next((stop for stop, holds in rules.items() if holds), None)

    def _has_enough(self, now_s: float, rate_per_s: float) -> bool:
        if self._trial.doubling_s is not None:
            return rate_per_s >= self._trial.max_rate_per_s
        return self.count >= self._trial.enough_requests and now_s >= self._trial.least_s

    def _tokens_are_slow(self, now_s: float) -> bool:
        """In each quarter of the recent time: a halt makes many gaps slow, but all at its end."""
        lasts_s = max(RECENT_S, self._unloaded.residence_s)
        if len(self._gap) < RECENT_GAPS or now_s < lasts_s:
            return False
        first = min(bisect_left(self._gap_at, now_s - lasts_s), len(self._gap) - RECENT_GAPS)
        ago = (now_s - np.array(self._gap_at[first:])) / lasts_s
        quarter = np.clip(4 * ago, 0, 3).astype(int)
        slow = np.array(self._gap[first:]) > self._objective.tbt_s
        counts = np.bincount(quarter)
        return bool(
            (np.bincount(quarter, slow)[counts > 0] > SLOW_GAP_SHARE * counts[counts > 0]).all()
        )

    def _is_steady(self, now_s: float) -> bool:
        """As many leave as come, or the queue shows already that they do not."""
        if self.backlog_starts > 0:
            return True
        stays = np.array(self._last[-RESIDENCE_REQUESTS:]) - np.array(
            self._due[-RESIDENCE_REQUESTS:]
        )
        stays = stays[~np.isnan(stays)]
        residence_s = float(stays.mean()) if stays.size else self._unloaded.residence_s
        return now_s >= STEADY_RESIDENCES * residence_s

    # --- Bookkeeping --------------------------------------------------------------------

    def _note_start(self, at_s: float) -> None:
        if not self.is_backlogged(at_s):
            self._open = None
        elif self._open is None:
            self._open = BacklogClock(at_s, [])
            self._backlogs.append(self._open)
        else:
            self.backlog_starts += self._open.start(at_s)

    def _leave(self, number: int, at_s: float) -> None:
        self._hold(-self._held[number])
        if self._waiting.pop(number, None) is None:
            self._running -= 1
        self._count_requests(at_s)

    def _count_requests(self, at_s: float) -> None:
        self._change_at.append(at_s)
        self._crowd.append(self.outstanding)

    def _hold(self, change: int) -> None:
        self._tokens += change
        self.tokens_peak = max(self.tokens_peak, self._tokens)

    # --- The end ------------------------------------------------------------------------

    def summary(
        self, stop: StopReason, rate_per_s: float, sending_s: float, now_s: float
    ) -> TrialSummary:
        """What is kept of the trial.

        Args:
            stop: Why sending ended.
            rate_per_s: Of a ramp, the rate it reached.
            sending_s: When sending ended.
            now_s: When the last answer was complete or cancelled.
        """
        objective = self._objective
        due, first, last = (np.array(times) for times in (self._due, self._first, self._last))
        # Unanswered to the end: it waited at least until now, whatever it would have waited.
        waits = np.where(np.isnan(first), np.maximum(now_s - due, objective.ttft_s), first - due)
        stays = (last - first)[~np.isnan(last - first)]
        residence_s = float(stays.mean()) if stays.size else self._unloaded.residence_s
        # An empty server fills for as long as a request stays, which its first TTFTs need not show.
        warm_up = min(int(np.searchsorted(due, residence_s)), len(due) // 2)
        steady = waits[warm_up:]
        owners, every_gap = np.array(self._gap_owner, dtype=np.int64), np.array(self._gap)
        gaps = every_gap[owners >= warm_up] if (owners >= warm_up).any() else every_gap
        complete = ~np.isnan(last)
        until_s = np.where(complete, last, now_s)
        return TrialSummary(
            rate_per_s=rate_per_s,
            ramp=self._trial.doubling_s is not None,
            stop=stop,
            sent=self.sent_count,
            finished=self.finished,
            shed=self.shed,
            seconds=sending_s,
            window=len(steady),
            ttft_s=_quantile(steady, objective.ttft_quantile),
            ttft_p99_s=_quantile(steady, 0.99),
            over_share=float((steady > objective.ttft_s).mean()) if steady.size else 0.0,
            tbt_s=_quantile(gaps, objective.tbt_quantile) if gaps.size else None,
            gaps=int(gaps.size),
            residence_s=residence_s,
            running=float(np.nansum(until_s - first)) / now_s if now_s else 0.0,
            backlogs=tuple(
                found
                for backlog in self._backlogs
                if (found := backlog.summary(residence_s)) is not None
            ),
            lateness_p99_s=_quantile(np.array(self._late), 0.99),
            tokens_peak=self.tokens_peak,
            kv_usage=self._kv_usage,
            queue=self._mean_queue(min(residence_s, sending_s / 4), sending_s),
            gaps_per_request=float(complete[owners].sum() / max(1, complete.sum())),
            paces=gap_histograms(
                (np.maximum.accumulate(np.array(self._change_at)), np.array(self._crowd)),
                (np.array(self._gap_at), every_gap, np.array(self._gap_crowd)),
                objective.tbt_s,
                min(residence_s, sending_s / 4),
                sending_s,
            ),
        )

    def _mean_queue(self, from_s: float, to_s: float) -> tuple[float, float] | None:
        """Requests that wait on average, and the share of time in which any do."""
        looked_at = np.array(self._looked_at)
        begins = np.clip(looked_at, from_s, to_s)
        seconds = np.diff(begins, append=to_s)
        if not seconds.any():
            return None
        queue = np.array(self._queue)
        return float(np.average(queue, weights=seconds)), float(
            np.average(queue > 0, weights=seconds)
        )


def _quantile(values: Float64[np.ndarray, " values"], share: float) -> float:
    return float(np.quantile(values, share, method="higher")) if values.size else 0.0
