"""Steps as scrapes show them: counters between moments at which an engine had nothing to do.

A mean over minutes mixes what ran beside each other, and of what a context costs it tells little.
Scrapes tell more: where no request is inside, everything counted before has ended, so that between
two such scrapes requests, steps, tokens and seconds are those of the same few requests, mostly of
one. Where an engine is never without one, a stretch is cut after half a minute, and what reaches
over its ends is reckoned.

How many decode beside each other follows from steps and their sizes: as many steps as tokens, and
each was alone. What a token reads is known when its request ends, whose lengths are counted then.

Differences of counters at scrapes are exact, which those over windows (`increase`) are not. Where a
counter fell, an engine came or went, or samples lack, a stretch ends and nothing is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import isfinite, nan
from typing import Final, Self

import numpy as np
from jaxtyping import Bool, Float64, Int64

from aqua_simulator.whatif.cluster import EngineShape
from aqua_simulator.whatif.step_fit import StepObservations

Counts = Float64[np.ndarray, " scrapes"]
Stretches = Float64[np.ndarray, " stretches"]

STRETCH_S: Final = 30.0
"""Seconds after which a stretch of a busy engine is cut. Halved, more of a stretch are requests
that reach over its ends; doubled, more is mixed, and offline work is 15 % off at most on drawn days
where it was 7 %."""

QUIET_SHARE: Final = 0.5
"""Of first tokens of a stretch, those that may have waited or belong to another one, up to which it
tells of prompts. Doubled, more stretches do, and waiting enters their step times."""

UNSEEN_SHARE: Final = 0.05
"""Of first tokens of several requests, what they may have waited for each other's prompts though
none decoded beside another. Doubled, such stretches tell a quarter as much of prompts."""

RECKONED_SHARE: Final = 0.3
"""Of what is computed for others beside a token, by which its number may be wrong. Doubled,
stretches with several requests tell half as much."""

_ROUNDS: Final = 4
"""Of finding how many decode beside each other and beside prompts. Doubled, nothing changes."""
_HALVINGS: Final = 40
"""Of a span of 1: as fine as floats of that size. Doubled, nothing changes."""

_WIDEST: Final = 4.0
"""Times the mean step of decodes, beyond which a step was a prompt's: a stretch seldom has decodes
so uneven. Doubled, prompts that are computed again count as decodes sooner."""


@dataclass(frozen=True, eq=False)
class ScrapedCounters:
    """Counters of a model's engines, all engines together, at scrapes without one in between.

    Attributes:
        first, first_s: First tokens, and seconds that they took.
        between, between_s: Tokens after first ones, and seconds between them and those before.
        steps, step_tokens: Steps, and tokens in them.
        sizes: Steps up to so many tokens, by bound.
        ended: Requests that ended; their `prompts` and `outputs` in tokens.
    """

    at_s: Counts
    first: Counts
    first_s: Counts
    between: Counts
    between_s: Counts
    steps: Counts
    step_tokens: Counts
    ended: Counts
    prompts: Counts
    outputs: Counts
    sizes: Mapping[str, Counts]

    @classmethod
    def pieces(
        cls, counted: Mapping[str, Counts], sizes: Mapping[str, Counts], engines: Counts
    ) -> Iterator[Self]:
        """What lies between samples that lack, counters that fell, and engines that came or went.

        Args:
            counted: By the names of attributes.
            engines: How many of them the counts are of.
        """
        table = np.vstack([*counted.values(), *sizes.values(), engines])
        is_there = np.isfinite(table).all(axis=0)
        goes_on = is_there[1:] & is_there[:-1]
        with np.errstate(invalid="ignore"):
            grown = np.diff(table, axis=1)
            goes_on &= (grown[:-1] >= 0.0).all(axis=0) & (grown[-1] == 0.0)
        start = 0
        for end in [*(np.flatnonzero(~goes_on) + 1).tolist(), table.shape[1]]:
            if end - start > 1:
                own = {name: values[start:end] for name, values in counted.items()}
                yield cls(**own, sizes={le: values[start:end] for le, values in sizes.items()})
            start = end

    def cuts(self) -> tuple[Int64[np.ndarray, " cuts"], Bool[np.ndarray, " cuts"]]:
        """Scrapes between which stretches lie, and which of them are without a request."""
        is_idle = self._is_idle()
        found = [0]
        for index in range(1, len(self.at_s)):
            is_long = self.at_s[index] - self.at_s[found[-1]] >= STRETCH_S
            if is_idle[index] or is_long:
                found.append(index)
        return np.array(found), is_idle[found]

    def _is_idle(self) -> Bool[np.ndarray, " scrapes"]:
        """Whether no request is inside.

        None is when nothing was counted since the scrape before; and none in between, where as many
        have begun as ended and as much of prompts was computed as they have. What never ends as it
        began (aborted requests, cached prompts) shows as a difference between two silences.
        """
        moving = np.vstack([self.first, self.between, self.steps, self.ended])
        is_still = np.append(False, (np.diff(moving, axis=1) == 0.0).all(axis=0))
        places = np.arange(len(is_still))
        before = np.maximum.accumulate(np.where(is_still, places, -1))
        after = np.minimum.accumulate(np.where(is_still, places, len(places))[::-1])[::-1]
        is_between = (before >= 0) & (after < len(places))
        for inside in (
            self.first - self.ended,
            self.step_tokens - self.between - self.prompts,
        ):
            start, end = (inside[np.where(is_between, each, 0)] for each in (before, after))
            is_between &= (np.abs(end - start) < 0.5) & (np.abs(inside - start) < 0.5)  # noqa: PLR2004 - they are whole
        found: Bool[np.ndarray, " scrapes"] = is_still | is_between
        return found

    def observations(self, shape: EngineShape, spreads: tuple[float, float]) -> StepObservations:
        """Stretches as observations of steps: of decodes, and of prompts where little else ran.

        A token sees the prompts that are computed beside it: those that come to an engine while
        others decode there. One that comes to an idle engine is seen by no token.

        Args:
            spreads: Squared ratios of deviation to mean, of prompts and of outputs.
        """
        cuts, is_idle = self.cuts()
        first, between, steps = (np.diff(each[cuts]) for each in _three(self))
        first_s, between_s = (np.diff(each[cuts]) for each in (self.first_s, self.between_s))
        prefilled = np.maximum(0.0, np.diff(self.step_tokens[cuts]) - between)
        context, prompt, widest = self._lengths(cuts, spreads)
        none, one = np.zeros(len(first)), np.ones(len(first))
        with np.errstate(divide="ignore", invalid="ignore"):
            chunks = first * np.ceil(prompt / shape.deployed.max_num_batched_tokens)
            chunks = np.minimum(steps, np.nan_to_num(chunks))
            sizes = {le: np.diff(each[cuts]) for le, each in self.sizes.items()}
            others = others_beside(sizes, between, chunks)
            # As many steps as tokens: each had its own.
            others = np.where(np.abs(steps - chunks - between) < 0.5, 0.0, others)  # noqa: PLR2004 - they are whole
            pairs = prefilled * widest / 2.0
            seen = others / between
            contexts = (1.0 + others) * context
            decodes = np.column_stack(
                [one, 1.0 + others, contexts, none, none, seen * prefilled, seen * pairs]
            )
            shares = (chunks, prefilled, none, pairs, first, none, none)
            # A prompt that is computed at a cut counts on one side, and its first token on the
            # other; beside others, a first token may have waited as long as it took.
            open_ends = 2.0 - is_idle[1:] - is_idle[:-1]
            waited = np.where(between > 0, others, 0.0) + open_ends / 2.0 / first
            waited += UNSEEN_SHARE * (first > 1.0)
            prompts = np.column_stack([each / first for each in shares])
            doubts = decodes * RECKONED_SHARE
            doubts[:, 0] = 0.0
            doubts[:, 1:3] *= (others / (1.0 + others))[:, None]
        prompts[~(waited <= QUIET_SHARE)] = np.nan
        found = StepObservations(
            np.vstack([decodes, prompts]),
            np.concatenate(
                [between_s / np.maximum(1.0, between), first_s / np.maximum(1.0, first)]
            ),
            np.vstack([doubts, prompts * waited[:, None]]),
            np.concatenate([between, chunks]),
        )
        is_known = np.isfinite(found.rows).all(axis=1) & np.isfinite(found.doubts).all(axis=1)
        return found.known(is_known & (found.seconds > 0.0))

    def _lengths(
        self, cuts: Int64[np.ndarray, " cuts"], spreads: tuple[float, float]
    ) -> tuple[Stretches, Stretches, Stretches]:
        """Mean context of a token, mean prompt, and mean prompt of a token in one, by stretch.

        The requests of a stretch are those that ended in it and the next to end, as many as were
        inside: requests end about in the order in which they begin.
        """
        ended, prompts, outputs = (
            np.diff(each) for each in (self.ended, self.prompts, self.outputs)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            # Several that ended since the last scrape differ as all do.
            several = 1.0 - 1.0 / ended
            read = outputs * prompts / ended
            read = read + outputs**2 / ended / 2.0 * (1.0 + spreads[1] * several)
            squares = prompts**2 / ended * (1.0 + spreads[0] * several)
        number = self.ended - self.ended[0]
        inside = self.first - self.ended
        low = number[cuts[:-1]]
        high = np.maximum(number[cuts[1:]] + (inside - inside.min())[cuts[1:]], low + 1.0)
        high = np.minimum(high, number[-1])
        low = np.minimum(low, high - 1.0)
        known, place = np.unique(number, return_index=True)

        def summed(values: Counts) -> Stretches:
            sums = np.append(0.0, np.cumsum(np.where(ended > 0, values, 0.0)))[place]
            found: Stretches = np.interp(high, known, sums) - np.interp(low, known, sums)
            return found

        with np.errstate(divide="ignore", invalid="ignore"):
            return (
                summed(read) / summed(outputs),
                summed(prompts) / (high - low),
                summed(squares) / summed(prompts),
            )


def _three(each: ScrapedCounters) -> tuple[Counts, Counts, Counts]:
    return each.first, each.between, each.steps


def others_beside(
    buckets: Mapping[str, Stretches], decodes: Stretches, chunks: Stretches
) -> Stretches:
    """How many requests decode beside another one, from how many tokens steps had.

    Steps of prompts have the most tokens; those of the others are their decodes. A request sees a
    step with n of them n times as often as it is taken, so mean squares tell what is seen. Where
    in its bucket a step lies is the same place in all, by which there are as many decodes as were
    counted.

    Args:
        buckets: Steps up to so many tokens, by bound.
    """
    if not buckets:
        return np.full(len(decodes), nan)
    bounds = sorted(float(bound) for bound in buckets)
    highest = max((bound for bound in bounds if isfinite(bound)), default=1.0)
    high = np.minimum(bounds, 2.0 * highest)[:, None]
    low = np.minimum(np.append(0.0, high[:-1]) + 1.0, high[:, 0])[:, None]
    by_bound = {float(bound): values for bound, values in buckets.items()}
    steps = np.maximum.accumulate([np.nan_to_num(by_bound[bound]) for bound in bounds])
    others = np.zeros(len(decodes))
    with np.errstate(divide="ignore", invalid="ignore"):
        alone = steps[-1] - chunks
        of_decodes = np.diff(np.minimum(steps, alone), axis=0, prepend=0.0)
        # Prompts that were put out and computed again make more such steps than there are prompts.
        of_decodes[low > _WIDEST * (1.0 + decodes / alone)] = 0.0
        for _ in range(_ROUNDS):
            # Prompts meet as many decodes as a decode does.
            wanted = decodes - chunks * others
            least, most = np.zeros(len(decodes)), np.ones(len(decodes))
            for _ in range(_HALVINGS):
                place = (least + most) / 2.0
                is_less = (of_decodes * low ** (1.0 - place) * high**place).sum(axis=0) < wanted
                least, most = np.where(is_less, place, least), np.where(is_less, most, place)
            size = low ** (1.0 - least) * high**least
            seen = (of_decodes * size**2).sum(axis=0) / (of_decodes * size).sum(axis=0)
            others = np.maximum(0.0, np.nan_to_num(seen) - 1.0)
    return np.where(decodes > 0, others, nan)
