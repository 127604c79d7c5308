"""Least squares for step times, in which every observation weighs what it is worth.

An observation says how many steps, tokens, contexts and token pairs took so many seconds together.
Of a request that had its engine for itself all of it is known. Beside others it is not: who ran
where, and how many decoded when a prompt came, is reckoned from means. So each observation says how
much of it is reckoned (`doubts`), counts by what that may amount to in seconds, and for less once
it is far off all others. Prompts that others saw have coefficients of their own, close to those of
prompts alone: how many saw them is off by the same factor all day. How close, counts for more the
more observations there are, since their errors are alike: else those of an engine that is
overloaded all day, which shows no prompt alone, outweigh it.

What the observations do not tell apart is taken from the data sheet, which stands in the system as
a few weak rows: what is of the same kind is as far off it. A step reads the weights as it reads
contexts; tokens are computed, as pairs are. How well coefficients are known in the end is found
with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Self

import numpy as np
from jaxtyping import Bool, Float64
from scipy.optimize import nnls

COLUMNS: Final = 7
"""Of an observation: steps, tokens, contexts, token pairs, first tokens; tokens and pairs of
prompts beside it. Fixed by the model of a step."""

_OWN: Final = 5
"""Columns of which all models of a kind share the coefficients; fixed by them."""

LEAST_ERROR: Final = 0.002
"""Of an observation's seconds, that nothing explains, however many steps it has. Doubled, the
fewest busy steps count for less, and contexts are known half as well."""

STEP_ERROR: Final = 0.01
"""Of the seconds of one step, by which steps alike differ in a real engine; n of them together by
the root of n less. Doubled, observations of few steps count for a quarter."""

MET_SPREAD: Final = 0.3
"""Of the prompts that others saw, by which their number may be off all day. Halved, a day on which
it is off more is fitted worse; doubled, what a busy day tells of tokens is lost."""

ALIKE: Final = 300.0
"""Observations whose errors, being alike, tell as much of that number as its spread does. Doubled,
tokens of an engine that is overloaded all day are found 17 % off where they were 2; without, 4.7
times what they take."""

KIND_SPREAD: Final = 1.0
"""Of a coefficient, by which it may be off the data sheet otherwise than the one of its kind.
Doubled, what the recording hardly tells is drawn a quarter as much to its kind."""

SHEET_SPREAD: Final = 5.0
"""Of a coefficient, by which steps and tokens may be off the data sheet. Doubled, nothing changes
where there are observations of them."""

FRONT_SPREAD: Final = 3.0
"""Of a median observation, by which what is before a first token may differ from nothing. Doubled,
nothing changes where first tokens were seen."""

FAR: Final = 2.0
"""Standard errors from which on an observation counts for less. Doubled, outliers pull more."""

_ROUNDS: Final = 8
"""Of solving and weighing anew. Doubled, nothing changes."""


@dataclass(frozen=True, eq=False)
class StepObservations:
    """What was seen of the steps of a model's engines.

    Attributes:
        rows: Numbers of each of `COLUMNS`.
        seconds: What they took together.
        doubts: How much of these numbers is reckoned and may be wrong, a standard error.
        steps: Over how many steps the seconds are a mean.
    """

    rows: Float64[np.ndarray, "rows 7"] = field(default_factory=lambda: np.empty((0, COLUMNS)))
    seconds: Float64[np.ndarray, " rows"] = field(default_factory=lambda: np.empty(0))
    doubts: Float64[np.ndarray, "rows 7"] = field(default_factory=lambda: np.empty((0, COLUMNS)))
    steps: Float64[np.ndarray, " rows"] = field(default_factory=lambda: np.empty(0))

    def __len__(self) -> int:
        return len(self.seconds)

    def known(self, chosen: Bool[np.ndarray, " rows"]) -> Self:
        """Some of them."""
        return type(self)(
            self.rows[chosen], self.seconds[chosen], self.doubts[chosen], self.steps[chosen]
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """All of several, in their order."""
        return cls(
            np.vstack([cls().rows, *(each.rows for each in parts)]),
            np.concatenate([cls().seconds, *(each.seconds for each in parts)]),
            np.vstack([cls().doubts, *(each.doubts for each in parts)]),
            np.concatenate([cls().steps, *(each.steps for each in parts)]),
        )


@dataclass(frozen=True, eq=False)
class FittedSteps:
    """Coefficients that a fit found.

    Attributes:
        seconds: By step, token, context, token pair and first token.
        covariance: Of the errors of the first four.
    """

    seconds: Float64[np.ndarray, " 5"]
    covariance: Float64[np.ndarray, "4 4"]


def solved(
    models: Sequence[StepObservations], sheet_seconds: Float64[np.ndarray, " 4"]
) -> FittedSteps:
    """Coefficients of models whose engines are alike.

    Args:
        models: Of each of them; one observation at least among all.
        sheet_seconds: What the data sheet has for the first four coefficients.
    """
    seen = StepObservations.joined(models)
    count = len(models)
    median_s = float(np.median(seen.seconds))
    # In shares of the data sheet's values and of the observed seconds: all errors are relative.
    scale = np.concatenate([sheet_seconds, [median_s], np.tile(sheet_seconds[[1, 3]], count)])
    model = np.repeat(np.arange(count), [len(each) for each in models])
    system, doubts = (
        _spread_out(each, model, count) * scale / seen.seconds[:, None]
        for each in (seen.rows, seen.doubts)
    )
    met_spreads = [MET_SPREAD / np.sqrt(1.0 + len(each) / ALIKE) for each in models]
    least = np.hypot(LEAST_ERROR, STEP_ERROR / np.sqrt(np.maximum(1.0, seen.steps)))
    found = np.ones(system.shape[1])
    error = np.hypot(least, np.abs(doubts).sum(axis=1) / np.maximum(1e-9, system.sum(axis=1)))
    for number in range(_ROUNDS):
        if number:
            error = np.hypot(least, doubts @ found)
            off = (system @ found - 1.0) / error
            error *= np.sqrt(1.0 + (off / FAR) ** 2)
        prior, wanted = _prior(found, met_spreads)
        whole = np.vstack([system / error[:, None], prior])
        found, _ = nnls(whole, np.concatenate([1.0 / error, wanted]))
    # Where observations are further off than their errors say, so are coefficients.
    off = (system @ found - 1.0) / error
    covariance = np.linalg.inv(whole.T @ whole) * max(1.0, float(np.mean(off**2)))
    four = scale[:4]
    return FittedSteps((found * scale)[:_OWN], covariance[:4, :4] * np.outer(four, four))


def _spread_out(
    rows: Float64[np.ndarray, "rows 7"], model: np.ndarray, count: int
) -> Float64[np.ndarray, "rows columns"]:
    """Rows in which each model has columns of its own for prompts beside others."""
    wide = np.zeros((len(rows), _OWN + 2 * count))
    wide[:, :_OWN] = rows[:, :_OWN]
    for offset in range(2):
        wide[np.arange(len(rows)), _OWN + 2 * model + offset] = rows[:, _OWN + offset]
    return wide


def _prior(
    found: Float64[np.ndarray, " columns"], met_spreads: Sequence[float]
) -> tuple[Float64[np.ndarray, "rows columns"], Float64[np.ndarray, " rows"]]:
    """What the data sheet says, beside coefficients of about that size."""
    size = np.maximum(found, 1e-3)
    ties = [(2, 0, KIND_SPREAD), (3, 1, KIND_SPREAD)]
    for index, spread in enumerate(met_spreads):
        ties += [(_OWN + 2 * index, 1, spread), (_OWN + 2 * index + 1, 3, spread)]
    rows = np.zeros((3 + len(ties), len(found)))
    for index in range(2):
        rows[index, index] = 1.0 / (SHEET_SPREAD * max(1.0, size[index]))
    rows[2, 4] = 1.0 / FRONT_SPREAD
    for place, (index, other, spread) in enumerate(ties, start=3):
        rows[place, [index, other]] = np.array([1.0, -1.0]) / (spread * size[other])
    wanted = np.zeros(len(rows))
    wanted[:2] = rows[[0, 1], [0, 1]]
    return rows, wanted
