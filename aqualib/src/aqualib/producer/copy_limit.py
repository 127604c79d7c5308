"""The copy limit: how fast consumers may copy in the background, from what copies do to our steps.

Copies to and from lent memory take a share of the lender's memory bandwidth and of its links. How
much that slows its steps depends on its kernels, so it is measured. In *quiet* windows consumers
hold background copies back, in *paced* ones they copy at the present rate, and steps of the one are
compared with steps of as many tokens of the other. Without harm the rate rises, by doubling until
harm was seen once and by equal amounts from then on; with harm it falls by a factor, and by a
larger one each time in a row, since consumers may have been far below what they were allowed.

A slowdown is believed only if it remains when the quiet state is measured anew: an engine whose
work has changed gets its rate back. It is acted on at once all the same: the lender comes first.

A window ends as soon as its median is known well enough to decide; so noisy steps are watched for
longer, up to `MAX_STEPS`, and a quiet one, which keeps consumers waiting, for `MAX_QUIET_S`: then
what is known by then has to do. Durations far above the usual are pauses between requests, and left
out; where one follows the other, the engine has become slower, and is measured anew.

What no rate can hold back is what requests wait for: loads and page-outs count against the rate,
so that background copies make room for them, and go on. A lender that they harm has its memory
taken back by its informer, as ever. Pure; owned by one thread, or by who has its lock.

Source: AIMD as in D. Chiu and R. Jain, "Analysis of the increase and decrease algorithms for
congestion avoidance", 1989; the doubling is TCP's slow start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, sqrt
from statistics import median
from typing import Final

HARM_SHARE: Final = 0.02
"""Slowdown of a lender's steps at which the rate falls, by judgement: what it costs on the average
stays below, for the rate is mostly lower and windows are often quiet. Doubled, copies may go about
twice as fast."""

MIN_STEPS: Final = 8
"""Steps of a window at least; a median of fewer is chance. Doubled, a harmful rate is noticed eight
steps later."""

MAX_STEPS: Final = 256
"""Steps of a window at most, however noisy: seconds of an engine. Doubled, the rate follows an
engine's changes half as fast."""

MAX_QUIET_S: Final = 10.0
"""Seconds of a quiet window at most: of an engine with few steps, or whose steps vary beyond
measure on a busy machine. Doubled, promotions to such a lender wait for up to 20 s at a time."""

LOOK_STEPS: Final = 4
"""Steps between looks at a window, each some 0.1 ms of medians. Doubled, a window ends up to four
steps later."""

PACED_WINDOWS: Final = 6
"""Paced windows for each quiet one, in which the link is not used. Doubled, a twelfth instead of a
seventh of the time is lost, and comparisons are with older steps."""

FIRST_RATE: Final = 1e9
"""Bytes per second to begin with: 2 % of PCIe 5. Doubled, one window of the doubling is saved."""

MIN_RATE: Final = 16e6
"""Bytes per second at least, to see when harm has ended: 64 MiB in 4 s. Doubled, a lender that
minds every byte is harmed twice as much."""

MAX_RATE: Final = 400e9
"""Bytes per second that no link of today exceeds. Doubled, it takes longer to fall from there."""

DECREASE: Final = 0.75
"""Factor of the first fall. Half of it gives away more of the link after each passed limit."""

INCREASES: Final = 16
"""Windows from zero to the rate at which harm was seen. Doubled, the rate is found twice as slowly
and passes the limit by half as much."""

PAUSE_FACTOR: Final = 4.0
"""Of the usual duration: beyond it, the engine had nothing to do for a while, or did something
rare. Doubled, pauses of several steps' length count as harm."""

LASTING_STEPS: Final = 8
"""Usual steps for which a rate is told, and `MIN_LASTING_S` at least: a lender that has no steps
has nothing to protect. Doubled, an idle lender's link lies idle for longer."""

MIN_LASTING_S: Final = 1.0
"""Seconds for which a rate is told at least. Doubled, consumers are told half as often."""

MAX_LASTING_S: Final = 600.0
"""Seconds for which a rate is told at most, by judgement: eight steps of more than a minute, longer
than those of any engine; the first of a loop may be hours of idleness. Doubled, consumers of a
lender that then falls idle wait for twice as long."""


@dataclass(frozen=True, slots=True)
class CopyRate:
    """What consumers are told.

    Attributes:
        bytes_per_s: All of a consumer's copies; what goes beyond it is taken from background ones.
        lasts_s: Seconds from now for which it holds; unlimited after that.
    """

    bytes_per_s: float
    lasts_s: float


@dataclass(slots=True)
class _Window:
    """Durations of steps in seconds, by kind."""

    steps: dict[str, list[float]] = field(default_factory=dict)

    def add(self, kind: str, seconds: float) -> None:
        self.steps.setdefault(kind, []).append(seconds)

    def relative_to(self, base: dict[str, float]) -> list[float]:
        """Durations over the usual one of their kind; kinds without one are left out."""
        known = [(all_of, base[kind]) for kind, all_of in self.steps.items() if kind in base]
        return [seconds / usual for all_of, usual in known for seconds in all_of]

    def count(self) -> int:
        """How many there are."""
        return sum(map(len, self.steps.values()))

    def medians(self) -> dict[str, float]:
        """Of each kind; one of few steps stands for itself."""
        return {kind: median(all_of) for kind, all_of in self.steps.items()}


class CopyLimit:
    """The limit of one lender, from its steps.

    Args:
        harm_share: Of its time, how much background copies may cost; above 0.

    Attributes:
        bytes_per_s: The rate of paced windows now.
        is_quiet: Whether background copies are held back to measure.
    """

    def __init__(self, harm_share: float = HARM_SHARE) -> None:
        assert harm_share > 0, harm_share
        self.harm_share: Final = harm_share
        self.bytes_per_s = FIRST_RATE
        self.is_quiet = True
        self._window = _Window()
        self._base: dict[str, float] = {}
        self._quiet_since_s = 0.0
        self._pauses = 0  # One after the other.
        self._paced_windows = 0
        self._increase = inf  # Doubling, until harm was seen.
        self._falls = 0
        # The rate before the last fall, and the window that it fell for.
        self._suspect: tuple[float, float, _Window] | None = None
        self._told_until_s = -inf
        self._told: float | None = None

    def stepped(self, seconds: float, now_s: float, kind: str = "") -> CopyRate | None:
        """A step ended; returns what to tell consumers, if they are to hear anything.

        Args:
            seconds: How long it took. Nothing, less, or what is no number says nothing, and is left
                out.
            now_s: Any monotonic clock.
            kind: Steps of one kind take about as long: a class of token counts.
        """
        if not 0 < seconds < inf:
            return None
        if not self.is_quiet or now_s > self._told_until_s:
            self._quiet_since_s = now_s
        if seconds > PAUSE_FACTOR * self._usual(kind, seconds):
            self._pause(kind)
        else:
            self._pauses = 0
            self._window.add(kind, seconds)
            if not self._window.count() % LOOK_STEPS:
                self._look()
        if self.is_quiet and now_s - self._quiet_since_s > MAX_QUIET_S:
            self._end_quiet()
        rate = 0.0 if self.is_quiet else self.bytes_per_s
        lasts_s = LASTING_STEPS * self._usual(kind, seconds)
        lasts_s = min(max(MIN_LASTING_S, lasts_s), MAX_LASTING_S)
        if rate == self._told and now_s + lasts_s / 2 < self._told_until_s:
            return None
        self._told, self._told_until_s = rate, now_s + lasts_s
        return CopyRate(rate, lasts_s)

    # --- Inside ---------------------------------------------------------------------------

    def _pause(self, kind: str) -> None:
        """Leave a duration out; a window holds none from before, when copies were unlimited."""
        self._pauses += 1
        if self._pauses < MIN_STEPS:
            self._window = _Window()
            return
        self._pauses = 0
        self._base.pop(kind, None)
        self._begin(is_quiet=True)

    def _look(self) -> None:
        if not self.is_quiet:
            self._end_paced()
        elif self._is_known(self._window.relative_to(self._window.medians())):
            self._end_quiet()

    def _usual(self, kind: str, seconds: float) -> float:
        """The duration of such a step; `seconds` while none is known."""
        if kind in self._base:
            return self._base[kind]
        seen = self._window.steps.get(kind)
        return median(seen) if seen else seconds

    def _end_quiet(self) -> None:
        self._base = {**self._base, **self._window.medians()}
        if self._suspect is not None:
            before, increase, window = self._suspect
            self._suspect = None
            found = window.relative_to(self._base)
            if not found or median(found) - 1 <= self.harm_share:
                # The engine's steps are longer now without copies, too, or of other kinds.
                self.bytes_per_s, self._increase, self._falls = before, increase, 0
        self._begin(is_quiet=False)

    def _end_paced(self) -> None:
        found = self._window.relative_to(self._base)
        if not self._is_known(found, limit=self.harm_share):
            if self._window.count() >= MAX_STEPS:
                self._begin(is_quiet=True)  # Steps of kinds that were not seen before.
            return
        if median(found) - 1 > self.harm_share:
            self._suspect = self.bytes_per_s, self._increase, self._window
            self._increase = self.bytes_per_s / INCREASES
            factor = DECREASE / 2**self._falls
            self._falls += 1
            self.bytes_per_s = max(MIN_RATE, self.bytes_per_s * factor)
            self._begin(is_quiet=True)
            return
        self._falls = 0
        self.bytes_per_s += min(self.bytes_per_s, self._increase)
        self.bytes_per_s = min(self.bytes_per_s, MAX_RATE)
        self._paced_windows += 1
        self._begin(is_quiet=self._paced_windows % PACED_WINDOWS == 0)

    def _begin(self, *, is_quiet: bool) -> None:
        self.is_quiet = is_quiet
        self._window = _Window()

    def _is_known(self, found: list[float], limit: float | None = None) -> bool:
        """Whether the median of relative durations is known well enough.

        The standard error of a median, from the median deviation, for durations of a normal
        distribution; it is small beside the share, or the median is beyond doubt on one side of
        the limit.
        """
        if len(found) < MIN_STEPS:
            return False
        middle = median(found)
        spread = 1.4826 * median(abs(each - middle) for each in found)
        error = 1.2533 * spread / sqrt(len(found))
        is_clear = limit is not None and abs(middle - 1 - limit) > 2 * error
        return is_clear or error <= self.harm_share / 4 or len(found) >= MAX_STEPS
