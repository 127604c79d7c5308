"""One trial as it is watched: events in, a verdict when to stop, and in the end a summary.

Pure: time arrives with the events. The same code watches a real endpoint and a virtual one.

Times of a request count from its *scheduled* send. A request that could not be sent in time, or
that nobody has answered yet, waits all the same: that is what a user would feel, and leaving such
requests out (coordinated omission) would show an endpoint in its best light when it is worst.

What it looks for, beside quantiles, is the *backlog*: a stretch in which the oldest request
without a token has waited for half of the limit and more. While there is a backlog the server
admits requests as fast as it can, whatever the arrivals are; first tokens per second of backlog are
its capacity. That says in one trial what repeated trials of rates say slowly, for close to the
capacity queues have a memory as long as a trial.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from aqua_profiler.measure.gap_histogram import gap_histograms
from aqua_profiler.measure.summary import Backlog, StopReason, TrialSummary
from aqua_profiler.objective import LatencyObjective, Trial, UnloadedLatency

BACKLOG_SHARE: Final = 0.5
"""Of the way from the unloaded TTFT to the limit: far from what a busy moment does to a server
with capacity to spare, and reached early by one without."""

SAME_BATCH_S: Final = 0.004
"""First tokens closer than that to the beginning of a backlog belong to its first batch."""

DISPERSION_STARTS: Final = 12
SPREAD_WINDOWS: Final = 12
LEAST_LONG_RUN: Final = 0.25
"""Of the variance between windows: an estimate from a dozen of them must not be nothing."""

RECENT_GAPS: Final = 400
SLOW_S: Final = 2.0
"""What is recent: at least so many gaps, and so long. A server that halts for a moment, as any does
on a busy machine, makes hundreds of gaps slow at once and says nothing about the rate."""

SLOW_GAP_SHARE: Final = 0.3
"""Tokens are clearly too slow when that share of the recent gaps exceeds the limit. Less is left to
the quantile of a whole trial: batches swell for a moment at any rate."""

FILLING_SDS: Final = 1.0
BATCHES: Final = 5
"""Parts of a trial whose quantiles are compared to see how exact the whole's is."""

SHED_LIMIT: Final = 8
"""Requests turned away (429) that end a trial: the endpoint says itself that it is too much."""


@dataclass(slots=True)
class _Stretch:
    begin_s: float
    times: list[float] = field(default_factory=list)


class TrialRecorder:
    """A trial under way.

    Args:
        trial: What is being sent.
        objective: What is being looked for.
        unloaded: What a lone request takes.
    """

    def __init__(
        self, trial: Trial, objective: LatencyObjective, unloaded: UnloadedLatency
    ) -> None:
        self.trial = trial
        self._objective = objective
        self._unloaded = unloaded
        base_s = min(unloaded.ttft_s, objective.ttft_s)
        self._backlog_s = base_s + BACKLOG_SHARE * (objective.ttft_s - base_s)
        self._due = array("d")
        self._first = array("d")
        self._last = array("d")
        self._latest = array("d")
        self._late = array("d")
        self._gap = array("d")
        self._gap_owner = array("L")
        self._gap_at = array("d")
        self._gap_crowd = array("d")
        self._crowd_then = array("d")
        self._change_at = array("d")
        self._crowd = array("d")
        self._waiting: dict[int, float] = {}
        self._running = 0
        self._running_area = 0.0
        self._running_since_s = 0.0
        self._recent: deque[tuple[float, bool]] = deque()
        self._slow = 0
        self._stretches: list[_Stretch] = []
        self._open: _Stretch | None = None
        self._backlog_starts = 0
        self.shed = 0
        self.finished = 0
        self.kv_usage: float | None = None
        self.tokens_peak = 0
        self._tokens = 0
        self._held = array("L")
        self.news_s = 0.0

    # --- Events, in the order of time ---------------------------------------------------

    def scheduled(self, due_s: float, prompt_tokens: int) -> int:
        """A request has become due; returns its number."""
        number = len(self._due)
        self._due.append(due_s)
        self._first.append(math.nan)
        self._last.append(math.nan)
        self._latest.append(math.nan)
        self._crowd_then.append(math.nan)
        self._held.append(prompt_tokens)
        self._waiting[number] = due_s
        self._note_crowd(due_s)
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
            self._run_more(1, at_s)
        else:
            gap = at_s - self._latest[number]
            self._gap.append(gap)
            self._gap_owner.append(number)
            self._gap_at.append(at_s)
            self._gap_crowd.append(self._crowd_then[number])
            self._note_gap(at_s, slow=gap > self._objective.tbt_s)
        self._latest[number] = at_s
        self._crowd_then[number] = self.outstanding

    def finish(self, number: int, at_s: float) -> None:
        """Its answer is complete."""
        self.news_s = at_s
        self.finished += 1
        self._last[number] = self._latest[number]
        self._hold(-self._held[number])
        self._run_more(-1, at_s)

    def turn_away(self, number: int, at_s: float) -> None:
        """The endpoint was too busy for it (429): as if its first token never came."""
        self.news_s = at_s
        self.shed += 1
        self._drop(number, at_s)

    def abandon(self, number: int, at_s: float) -> None:
        """It was cancelled after the end of the trial."""
        self._drop(number, at_s)

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
    def outstanding(self) -> int:
        """Requests due and not complete."""
        return len(self._waiting) + self._running

    @property
    def backlog_starts(self) -> int:
        """First tokens while requests queued, so far."""
        return self._backlog_starts

    def should_stop(self, now_s: float, rate_per_s: float) -> StopReason | None:
        """Whether to send no more, and why; ask a few times a second.

        Args:
            now_s: Since the start of the trial.
            rate_per_s: Due now, for ramps.
        """
        trial = self.trial
        if trial.to_the_end:
            return StopReason.TIME if now_s >= trial.most_s else None
        rules = {
            StopReason.SHED: self.shed >= SHED_LIMIT,
            StopReason.BACKLOG: 0 < trial.enough_backlog <= self._backlog_starts,
            StopReason.OVERLOAD: self.oldest_wait_s(now_s)
            > trial.patience * self._objective.ttft_s,
            StopReason.SLOW_TOKENS: self._tokens_are_slow(now_s),
            StopReason.TIME: now_s >= trial.most_s,
            StopReason.ENOUGH: self._has_enough(now_s, rate_per_s) and self._is_steady(now_s),
        }
        return next((stop for stop, holds in rules.items() if holds), None)

    def _has_enough(self, now_s: float, rate_per_s: float) -> bool:
        trial = self.trial
        if trial.doubling_s is not None:
            return rate_per_s >= trial.max_rate_per_s
        return len(self._due) >= trial.enough_requests and now_s >= trial.least_s

    def _tokens_are_slow(self, now_s: float) -> bool:
        count, lasts_s = len(self._recent), max(SLOW_S, self._unloaded.residence_s)
        if count < RECENT_GAPS or now_s < lasts_s:
            return False
        allowed = 1 - self._objective.tbt_quantile
        share = max(SLOW_GAP_SHARE, min(1.0, 2 * allowed))
        if self._slow <= share * count:
            return False
        # In all quarters of the time: a moment's halt makes many gaps slow, but all at its end.
        counts, slow = [0] * 4, [0] * 4
        for at_s, is_slow in self._recent:
            quarter = min(3, max(0, int(4 * (1 - (now_s - at_s) / lasts_s))))
            counts[quarter] += 1
            slow[quarter] += is_slow
        return all(part > share * of for part, of in zip(slow, counts, strict=True) if of)

    def _is_steady(self, now_s: float) -> bool:
        """As many leave as come, or the queue shows already that they do not."""
        if self._backlog_starts > 0:
            return True
        return now_s >= 3 * self._residence_s() and not self._is_filling(now_s)

    def _is_filling(self, now_s: float) -> bool:
        """More requests are in the system in the last third of the trial than in the second.

        By more than chance: numbers in the system scatter about as those of Poisson do.
        """
        at_s = np.maximum.accumulate(np.array(self._change_at))
        edges = [now_s / 3, 2 * now_s / 3, now_s]
        means = [
            float(np.diff(np.append(np.clip(at_s, low, high), high)) @ np.array(self._crowd))
            / (high - low)
            for low, high in pairwise(edges)
        ]
        return means[1] > 1.25 * means[0] + FILLING_SDS * math.sqrt(means[0]) + 1

    def _residence_s(self) -> float:
        known = [
            self._last[number] - self._due[number]
            for number in range(max(0, len(self._due) - 200), len(self._due))
            if not math.isnan(self._last[number])
        ]
        return float(np.mean(known)) if known else self._unloaded.residence_s

    # --- Bookkeeping --------------------------------------------------------------------

    def _note_start(self, at_s: float) -> None:
        if not self.is_backlogged(at_s):
            self._open = None
            return
        if self._open is None:
            self._open = _Stretch(at_s)
            self._stretches.append(self._open)
        elif at_s > self._open.begin_s + SAME_BATCH_S:
            self._open.times.append(at_s)
            self._backlog_starts += 1

    def _note_gap(self, at_s: float, *, slow: bool) -> None:
        since_s = at_s - max(SLOW_S, self._unloaded.residence_s)
        self._recent.append((at_s, slow))
        self._slow += slow
        while len(self._recent) > RECENT_GAPS and self._recent[0][0] < since_s:
            self._slow -= self._recent.popleft()[1]

    def _drop(self, number: int, at_s: float) -> None:
        self._hold(-self._held[number])
        if self._waiting.pop(number, None) is not None:
            self._note_crowd(at_s)
        elif math.isnan(self._last[number]):
            self._run_more(-1, at_s)

    def _run_more(self, change: int, at_s: float) -> None:
        self._running_area += self._running * (at_s - self._running_since_s)
        self._running_since_s = at_s
        self._running += change

        self._note_crowd(at_s)

    def _note_crowd(self, at_s: float) -> None:
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
        due, first, last = (np.array(times) for times in (self._due, self._first, self._last))
        # Unanswered to the end: it waited at least until now, whatever it would have waited.
        ttft = np.where(
            np.isnan(first), np.maximum(now_s - due, self._objective.ttft_s), first - due
        )
        residence = last - first
        residence = residence[~np.isnan(residence)]
        residence_s = float(residence.mean()) if residence.size else self._unloaded.residence_s
        cut = _warm_up(due, ttft, residence_s)
        steady = ttft[cut:]
        over = steady > self._objective.ttft_s
        owners = np.array(self._gap_owner, dtype=np.int64)
        every_gap = np.array(self._gap)
        gaps = every_gap[owners >= cut]
        if not gaps.size:
            gaps = every_gap
        complete = ~np.isnan(last)
        return TrialSummary(
            rate_per_s=rate_per_s,
            ramp=self.trial.doubling_s is not None,
            stop=stop,
            sent=len(self._late),
            finished=self.finished,
            shed=self.shed,
            seconds=sending_s,
            window=len(steady),
            ttft_s=_quantile(steady, self._objective.ttft_quantile),
            ttft_p99_s=_quantile(steady, 0.99),
            over_share=float(over.mean()) if over.size else 0.0,
            effective_count=effective_count(steady),
            ttft_error=_quantile_error(steady, self._objective.ttft_quantile),
            tbt_s=_quantile(gaps, self._objective.tbt_quantile) if gaps.size else None,
            tbt_error=_quantile_error(gaps, self._objective.tbt_quantile),
            gaps=int(gaps.size),
            residence_s=residence_s,
            running=self._running_area / now_s if now_s else 0.0,
            backlogs=tuple(
                found
                for stretch in self._stretches
                if (found := _backlog(stretch, residence_s)) is not None
            ),
            lateness_p99_s=_quantile(np.array(self._late), 0.99),
            tokens_peak=self.tokens_peak,
            kv_usage=self.kv_usage,
            gaps_per_request=float(complete[owners].sum() / max(1, complete.sum())),
            paces=gap_histograms(
                (np.maximum.accumulate(np.array(self._change_at)), np.array(self._crowd)),
                (np.array(self._gap_at), every_gap, np.array(self._gap_crowd)),
                self._objective.tbt_s,
                min(residence_s, sending_s / 4),
                sending_s,
            ),
        )


Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def _quantile(values: Floats, share: float) -> float:
    return float(np.quantile(values, share, method="higher")) if values.size else 0.0


def _quantile_error(values: Floats, share: float) -> float:
    """Relative standard error of a quantile of a correlated series, from parts of it."""
    if values.size < 4 * BATCHES:
        return 1.0
    parts = np.array([_quantile(part, share) for part in np.array_split(values, BATCHES)])
    return float(parts.std(ddof=1)) / max(float(parts.mean()), 1e-9) / math.sqrt(BATCHES)


def _warm_up(due: Floats, ttft: Floats, residence_s: float) -> int:
    """How many requests to leave out at the start: MSER-5, or one residence if that leaves half.

    MSER (White, 1997) cuts where the standard error of the mean of the rest is least. An empty
    server fills for as long as a request stays, which its first TTFTs need not show.
    """
    count = len(ttft)
    means = [float(ttft[at : at + 5].mean()) for at in range(0, count - 4, 5)]
    best, cut = math.inf, 0
    for skipped in range(len(means) // 2):
        rest = np.array(means[skipped:])
        error = float(rest.var()) / rest.size
        if error < best:
            best, cut = error, skipped * 5
    fill = int(np.searchsorted(due, residence_s))
    return max(cut, min(fill, count // 2))


def effective_count(values: Floats) -> float:
    """Independent values that a correlated series is worth, by the variance of its batch means."""
    size = int(math.sqrt(values.size))
    if size < 4:  # noqa: PLR2004 - nothing can be said about correlation
        return float(values.size)
    batches = values[: values.size // size * size].reshape(-1, size)
    within = float(values.var())
    between = float(batches.mean(axis=1).var(ddof=1))
    if between <= 0 or within <= 0:
        return float(values.size)
    return max(1.0, min(float(values.size), within / between * batches.shape[0]))


def _backlog(stretch: _Stretch, residence_s: float) -> Backlog | None:
    """Measure a stretch; the first residence is left out where more is left.

    Requests that filled an empty server leave it in the rhythm in which they came, so for one
    residence the starts repeat the arrivals.
    """
    times = np.array(stretch.times)
    if not times.size:
        return None
    begin_s = stretch.begin_s
    if times[-1] - begin_s > 2 * residence_s:
        begin_s += residence_s
        times = times[times > begin_s]
        begin_s = float(times[0])
        times = times[times > begin_s + SAME_BATCH_S]
    if not times.size:
        return None
    seconds = float(times[-1] - begin_s)
    windows = times.size // DISPERSION_STARTS
    short = _counts(times, begin_s, windows)
    long = _counts(times, begin_s, min(SPREAD_WINDOWS, windows))
    return Backlog(
        int(times.size),
        seconds,
        None if short is None else float(short.var(ddof=1) / short.mean()),
        None if long is None else _long_run(long),
    )


def _counts(times: Floats, begin_s: float, windows: int) -> Floats | None:
    if windows < 4:  # noqa: PLR2004 - so few counts have no variance worth naming
        return None
    return np.histogram(times, bins=windows, range=(begin_s, float(times[-1])))[0].astype(float)


def _long_run(counts: Floats) -> float:
    """Variance over mean that a longer window would show.

    Neighbours that make up for each other, as halves of a deck do, take it down.
    """
    apart = counts - counts.mean()
    variance = float(apart @ apart) / (counts.size - 1)
    neighbours = float(apart[1:] @ apart[:-1]) / (counts.size - 1)
    return max(LEAST_LONG_RUN * variance, variance + 2 * neighbours) / float(counts.mean())
